"""Incremental detokenization: text comes out whole, once, and in the same order whatever the chunks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace.protocol import BadRequest, wire
from headrace.workers.derender.detokenize import MAX_PENDING, Bytewise, Detokenizer, Window, Windowed, detokenizer
from headrace.workers.derender.logprobs import CONTEXT, LogprobText
from headrace.workers.derender.progress import carried, resumed
from headrace.workers.derender.vocabulary import InBytes, InContext, Tokens, Vocabulary, load_vocabulary
from tests.unit.derender_tokenizer import END, METASPACE, byte_fallback, byte_level, ids_of
from tests.unit.derender_vocabularies import BYTE, CONTROL, UNKNOWN, sentencepiece, tekken, tiktoken

Vocabularies = dict[str, Vocabulary]
BYTE_KINDS = ["byte-level", "tekken", "tiktoken"]
KINDS = [*BYTE_KINDS, "byte-fallback", "sentencepiece", "metaspace", "word-piece", "word-level"]
IDS = st.lists(st.integers(min_value=-1, max_value=360), max_size=40)
ANY_ID = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 360)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def byte_tokenizer(folder: Path) -> Tokenizer:
    return byte_level(folder / "byte-level")


@pytest.fixture(scope="module")
def bytes_vocabulary(folder: Path, byte_tokenizer: Tokenizer) -> Vocabulary:
    return load_vocabulary(folder / "byte-level")


@pytest.fixture(scope="module")
def fallback_tokenizer(folder: Path) -> Tokenizer:
    return byte_fallback(folder / "byte-fallback")


@pytest.fixture(scope="module")
def fallback_vocabulary(folder: Path, fallback_tokenizer: Tokenizer) -> Vocabulary:
    return load_vocabulary(folder / "byte-fallback")


@pytest.fixture(scope="module")
def word_tokenizers() -> dict[str, Tokenizer]:
    pieces = ["[UNK]", "the", "##re", "do", "n't", ".", "?", "##\u00e9"]
    words = Tokenizer(models.WordPiece(dict(zip(pieces, range(99), strict=False)), unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    levels = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 5}, unk_token="[UNK]"))
    scores = [(piece, 0.0) for piece in ("<unk>", f"{METASPACE}the", METASPACE, f"{METASPACE * 2}x", "re", "a b")]
    unigrams = Tokenizer(models.Unigram(scores, unk_id=0))
    unigrams.decoder = decoders.Metaspace()
    for tokenizer in (words, levels, unigrams):
        tokenizer.add_special_tokens(["[END]"])
        tokenizer.add_tokens([AddedToken("<call>", lstrip=True, rstrip=True)])
    return {"word-piece": words, "word-level": levels, "metaspace": unigrams}


@pytest.fixture(scope="module")
def vocabularies(
    folder: Path,
    bytes_vocabulary: Vocabulary,
    fallback_vocabulary: Vocabulary,
    word_tokenizers: dict[str, Tokenizer],
) -> Vocabularies:
    for kind, tokenizer in word_tokenizers.items():
        (folder / kind).mkdir()
        tokenizer.save(str(folder / kind / "tokenizer.json"))
        (folder / kind / "special_tokens_map.json").write_text('{"eos_token": "[END]"}')
    tekken(folder / "tekken")
    tiktoken(folder / "tiktoken", added_tokens_decoder={"270": {"content": END}}, eos_token=END)
    bytes_of_fallback = ((f"<0x{byte:02X}>", BYTE) for byte in range(256))
    words = (("\u2581the", None), ("\u2581", None), ("你", None))
    sentencepiece(folder / "sentencepiece", [("<unk>", UNKNOWN), ("</s>", CONTROL), *bytes_of_fallback, *words])
    return {kind: load_vocabulary(folder / kind) for kind in KINDS}


def said(one: Detokenizer, chunks: list[list[int]], prompt: list[int] | None = None, *, skip: bool = True) -> list[str]:
    window = one.open(prompt, skip_special=skip)
    return [one.feed(window, chunk, skip_special=skip) for chunk in chunks]


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("kind", BYTE_KINDS)
@given(ids=IDS, prompt=IDS, skip=st.booleans())
def test_bytes_and_windows_lead_to_the_same_text_and_the_same_state(
    vocabularies: Vocabularies, kind: str, ids: list[int], prompt: list[int], skip: bool
) -> None:
    vocabulary = vocabularies[kind]
    fast, slow = detokenizer(vocabulary), Windowed(vocabulary, in_a_row(vocabulary))
    assert isinstance(fast, Bytewise)
    one, other = fast.open(prompt, skip_special=skip), slow.open(prompt, skip_special=skip)
    for token_id in ids:
        assert fast.feed(one, [token_id], skip_special=skip) == slow.feed(other, [token_id], skip_special=skip)
        assert (one.tokens, one.prefix, one.read) == (other.tokens, other.prefix, other.read)


def in_a_row(vocabulary: Vocabulary) -> InContext:
    """Bytes joined and decoded as a whole: what the reference does with its window."""
    decoding = vocabulary.decoding
    assert isinstance(decoding, InBytes)

    def join(spellings: list[str]) -> str:
        spoken = [spelling for spelling in spellings if spelling not in decoding.textless]
        return b"".join(map(decoding.bytes_of, spoken)).decode("utf-8", "replace")

    return InContext(join)


@pytest.mark.parametrize("kind", KINDS)
@given(ids=IDS, prompt=IDS, cuts=st.lists(st.integers(0, 40), max_size=8), skip=st.booleans())
def test_any_chunks_of_the_same_tokens_give_the_same_text(
    vocabularies: Vocabularies, kind: str, ids: list[int], prompt: list[int], cuts: list[int], skip: bool
) -> None:
    one = detokenizer(vocabularies[kind])
    assert "".join(said(one, chunked(ids, cuts), prompt, skip=skip)) == "".join(said(one, [ids], prompt, skip=skip))


@pytest.mark.parametrize("kind", KINDS)
@given(ids=IDS, prompt=IDS, cut=st.integers(0, 40))
def test_a_resumed_window_is_the_window_that_was_left(
    vocabularies: Vocabularies, kind: str, ids: list[int], prompt: list[int], cut: int
) -> None:
    one = detokenizer(vocabularies[kind])
    window = one.open(prompt, skip_special=True)
    one.feed(window, ids[:cut], skip_special=True)
    left = one.resume(list(window.tokens), window.prefix, window.read)
    assert left == window
    assert one.feed(left, ids[cut:], skip_special=True) == one.feed(window, ids[cut:], skip_special=True)


@given(text=st.text(max_size=60))
def test_the_text_of_an_encoding_is_the_text(
    byte_tokenizer: Tokenizer, bytes_vocabulary: Vocabulary, text: str
) -> None:
    # What ends in a replacement character is held back: more bytes could make it another.
    ids = byte_tokenizer.encode(text, add_special_tokens=False).ids
    given_out = "".join(said(detokenizer(bytes_vocabulary), [[i] for i in ids], skip=False))
    assert given_out == byte_tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")


@pytest.mark.parametrize("kind", ["metaspace", "word-level"])
@given(ids=st.lists(st.integers(0, 8), max_size=20), skip=st.booleans())
def test_tokens_by_and_by_say_what_the_tokenizer_says_of_them_all(
    vocabularies: Vocabularies, word_tokenizers: dict[str, Tokenizer], kind: str, ids: list[int], skip: bool
) -> None:
    known = [i for i in ids if vocabularies[kind].token(i) is not None]
    given_out = "".join(said(detokenizer(vocabularies[kind]), [[i] for i in known], skip=skip))
    assert given_out == word_tokenizers[kind].decode(known, skip_special_tokens=skip)


def test_word_pieces_join_and_words_are_spaced(
    vocabularies: Vocabularies, word_tokenizers: dict[str, Tokenizer]
) -> None:
    the, re, do, stop, call = ids_of(word_tokenizers["word-piece"], ["the", "##re", "do", "##\u00e9", "<call>"])
    one = detokenizer(vocabularies["word-piece"])
    assert said(one, [[the], [re], [do], [stop], [call]]) == ["the", "re", " do", "\u00e9", " <call>"]


def test_a_character_split_over_tokens_comes_with_its_last_one(
    fallback_tokenizer: Tokenizer, fallback_vocabulary: Vocabulary
) -> None:
    ids = ids_of(fallback_tokenizer, ["a", "<0xE4>", "<0xBD>", "<0xA0>", "b"])
    assert said(detokenizer(fallback_vocabulary), [[i] for i in ids]) == ["a", "", "", "你", "b"]


def test_bytes_of_mistrals_tokens_are_carried_where_they_make_no_character_yet(vocabularies: Vocabularies) -> None:
    one = detokenizer(vocabularies["tekken"])
    woman = [24 + 256 + 4, 24 + 256 + 5]
    window = one.open([24 + ord("k")], skip_special=True)
    assert one.feed(window, woman[:1], skip_special=True) == ""
    assert window.tokens[-1] == "\ufffd\u0120\u00f0\u0141"
    left = one.resume(list(window.tokens), window.prefix, window.read)
    assert one.feed(left, woman[1:], skip_special=True) == " 👩"


def test_the_first_token_keeps_its_space_after_a_prompt_only(
    fallback_tokenizer: Tokenizer, fallback_vocabulary: Vocabulary
) -> None:
    the, a = ids_of(fallback_tokenizer, ["\u2581the", "a"])
    one = detokenizer(fallback_vocabulary)
    assert said(one, [[the], [the]]) == ["the", " the"]
    assert said(one, [[the], [the]], prompt=[]) == ["the", " the"]
    assert said(one, [[the], [the]], prompt=[a] * 20) == [" the", " the"]


def test_only_the_last_few_ids_of_a_prompt_matter(bytes_vocabulary: Vocabulary) -> None:
    one = detokenizer(bytes_vocabulary)
    prompt = list(range(100))
    assert one.open(prompt, skip_special=True) == one.open(prompt[-7:], skip_special=True)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_where_asked_for(
    byte_tokenizer: Tokenizer, bytes_vocabulary: Vocabulary, skip: bool
) -> None:
    (end,) = ids_of(byte_tokenizer, [END])
    ids = [*byte_tokenizer.encode("one").ids, end, *byte_tokenizer.encode("two").ids]
    assert "".join(said(detokenizer(bytes_vocabulary), [ids], skip=skip)) == ("onetwo" if skip else f"one{END}two")


@pytest.mark.parametrize("unknown", [-1, 10**6, 2**40])
def test_an_id_outside_the_vocabulary_has_no_text_and_does_no_harm(
    byte_tokenizer: Tokenizer, bytes_vocabulary: Vocabulary, unknown: int
) -> None:
    one = detokenizer(bytes_vocabulary)
    before, after = byte_tokenizer.encode("one").ids, byte_tokenizer.encode("two").ids
    assert "".join(said(one, [before, [unknown], after])) == "onetwo"
    assert one.text([unknown]) == ""


@pytest.mark.parametrize("kind", KINDS)
@given(
    ids=st.lists(ANY_ID, max_size=30),
    prompt=st.none() | st.lists(ANY_ID, max_size=10),
    tops=st.lists(ANY_ID, max_size=3),
    skip=st.booleans(),
)
def test_any_ids_at_all_are_answered(
    vocabularies: Vocabularies, kind: str, ids: list[int], prompt: list[int] | None, tops: list[int], skip: bool
) -> None:
    vocabulary = vocabularies[kind]
    one = detokenizer(vocabulary)
    text = "".join(said(one, [[i] for i in ids], prompt, skip=skip))
    candidates = [wire.TokenLogprob(token_id=i, logprob=-1.0) for i in tops]
    entries = [wire.TokenLogprobEntry(token_id=i, logprob=-1.0, top_logprobs=candidates) for i in ids]
    filled = LogprobText(vocabulary, one).resolve(wire.TokenLogprobs(content=entries), ids[:CONTEXT])
    assert len(filled.content or ()) == len(ids)
    for entry in filled.content or ():
        assert len(entry.top_logprobs) == len(tops)
    text.encode()


STATES = st.builds(
    wire.StreamState,
    prev_tokens=st.lists(
        st.text(max_size=6) | st.sampled_from(["<0xE4>", "\ufffd\u00e4", "\ufffd", "\u0120a", METASPACE, "##x"]),
        max_size=8,
    ),
    prefix_offset=st.integers(-1, 9),
    read_offset=st.integers(-1, 9),
    logprob_context_token_ids=st.lists(ANY_ID, max_size=5),
    logprob_text_offset=st.integers(-1, 2**50),
)


@pytest.mark.parametrize("kind", KINDS)
@given(state=STATES, ids=IDS)
def test_any_state_at_all_is_refused_or_goes_on_and_is_carried_again(
    vocabularies: Vocabularies, kind: str, state: wire.StreamState, ids: list[int]
) -> None:
    one = detokenizer(vocabularies[kind])
    try:
        progress = resumed(state, one)
    except BadRequest as refusal:
        assert refusal.error.error.param is not None
        return
    text = one.feed(progress.window, ids, skip_special=True)
    again = resumed(carried(progress), one)
    assert again.window == progress.window
    assert len(again.window.tokens) <= len(state.prev_tokens) + len(ids)
    text.encode()


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_garbage_is_held_back_within_bounds_and_then_given_out(
    byte_tokenizer: Tokenizer,
    bytes_vocabulary: Vocabulary,
    fallback_tokenizer: Tokenizer,
    fallback_vocabulary: Vocabulary,
    size: int,
) -> None:
    bytes_garbage = ids_of(byte_tokenizer, ["\u0122"])  # the byte 0x80, by its printable name
    for vocabulary, garbage in (
        (bytes_vocabulary, bytes_garbage),
        (fallback_vocabulary, ids_of(fallback_tokenizer, ["<0x80>"])),
    ):
        one = detokenizer(vocabulary)
        window = one.open(None, skip_special=True)
        ids = garbage * 5000
        parts = []
        for at in range(0, len(ids), size):
            parts.append(one.feed(window, ids[at : at + size], skip_special=True))
            assert len(window.tokens) <= 2 * MAX_PENDING + 2
        assert 4500 < len("".join(parts)) <= 5000
        assert set("".join(parts)) == {"\ufffd"}


def test_tokens_without_text_do_not_fill_the_window(bytes_vocabulary: Vocabulary) -> None:
    one = detokenizer(bytes_vocabulary)
    window = one.open(None, skip_special=True)
    assert one.feed(window, [10**6] * 5000, skip_special=True) == ""
    assert len(window.tokens) <= MAX_PENDING


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_tokens_without_text_are_not_read_again_and_again_in_a_crowd(vocabularies: Vocabularies, kind: str) -> None:
    one = detokenizer(vocabularies[kind])
    window = one.resume(["<0x80>" if kind == "byte-fallback" else "\u0122"] * (MAX_PENDING // 2), 0, 0)
    left = (list(window.tokens), window.read)
    assert one.feed(window, [10**6] * 5000, skip_special=True) == ""
    assert (window.tokens, window.read) == left


def test_a_tokenizer_without_a_decoder_spaces_its_tokens() -> None:
    spaced = Vocabulary(Tokens(enumerate([b"one", b"two"])), InContext(" ".join))
    assert said(detokenizer(spaced), [[0], [1, 0]]) == ["one", " two one"]


def test_a_window_that_was_cut_within_a_character_waits_for_clean_text(
    byte_tokenizer: Tokenizer, bytes_vocabulary: Vocabulary
) -> None:
    one = detokenizer(bytes_vocabulary)
    first, *rest = byte_tokenizer.encode("鬱", add_special_tokens=False).ids
    window = one.open([first], skip_special=True)
    assert isinstance(window, Window)
    assert window.before
    assert one.feed(window, [*rest, *byte_tokenizer.encode("x").ids], skip_special=True) == "x"
    assert not window.before
