"""Incremental detokenization: text comes out whole, once, and in the same order whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.workers.derender.detokenize import MAX_PENDING, ByteLevel, Detokenizer, Window, Windowed, detokenizer
from headrace.workers.derender.vocabulary import Vocabulary
from tests.unit.derender_tokenizer import END, byte_fallback, byte_level, ids_of

Make = Callable[[Path], Tokenizer]
IDS = st.lists(st.integers(min_value=-1, max_value=360), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def byte_tokenizer(folder: Path) -> Tokenizer:
    return byte_level(folder / "byte_level")


@pytest.fixture(scope="module")
def bytes_vocabulary(folder: Path, byte_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.load(folder / "byte_level")


@pytest.fixture(scope="module")
def fallback_tokenizer(folder: Path) -> Tokenizer:
    return byte_fallback(folder / "byte_fallback")


@pytest.fixture(scope="module")
def fallback_vocabulary(folder: Path, fallback_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.load(folder / "byte_fallback")


def said(one: Detokenizer, chunks: list[list[int]], prompt: list[int] | None = None, *, skip: bool = True) -> list[str]:
    window = one.open(prompt, skip_special=skip)
    return [one.feed(window, chunk, skip_special=skip) for chunk in chunks]


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


@given(ids=IDS, prompt=IDS, skip=st.booleans())
def test_bytes_and_windows_lead_to_the_same_text_and_the_same_state(
    bytes_vocabulary: Vocabulary, ids: list[int], prompt: list[int], skip: bool
) -> None:
    fast, slow = ByteLevel(bytes_vocabulary), Windowed(bytes_vocabulary)
    one, other = fast.open(prompt, skip_special=skip), slow.open(prompt, skip_special=skip)
    for token_id in ids:
        assert fast.feed(one, [token_id], skip_special=skip) == slow.feed(other, [token_id], skip_special=skip)
        assert (one.tokens, one.prefix, one.read) == (other.tokens, other.prefix, other.read)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(ids=IDS, prompt=IDS, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_any_chunks_of_the_same_tokens_give_the_same_text(
    bytes_vocabulary: Vocabulary,
    fallback_vocabulary: Vocabulary,
    kind: str,
    ids: list[int],
    prompt: list[int],
    cuts: list[int],
) -> None:
    one = detokenizer(bytes_vocabulary if kind == "byte_level" else fallback_vocabulary)
    assert "".join(said(one, chunked(ids, cuts), prompt)) == "".join(said(one, [ids], prompt))


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(ids=IDS, prompt=IDS, cut=st.integers(0, 40))
def test_a_resumed_window_is_the_window_that_was_left(
    bytes_vocabulary: Vocabulary,
    fallback_vocabulary: Vocabulary,
    kind: str,
    ids: list[int],
    prompt: list[int],
    cut: int,
) -> None:
    one = detokenizer(bytes_vocabulary if kind == "byte_level" else fallback_vocabulary)
    window = one.open(prompt, skip_special=True)
    one.feed(window, ids[:cut], skip_special=True)
    resumed = one.resume(list(window.tokens), window.prefix, window.read)
    assert resumed == window
    assert one.feed(resumed, ids[cut:], skip_special=True) == one.feed(window, ids[cut:], skip_special=True)


@given(text=st.text(max_size=60))
def test_the_text_of_an_encoding_is_the_text(
    byte_tokenizer: Tokenizer, bytes_vocabulary: Vocabulary, text: str
) -> None:
    # What ends in a replacement character is held back: more bytes could make it another.
    ids = byte_tokenizer.encode(text, add_special_tokens=False).ids
    given_out = "".join(said(ByteLevel(bytes_vocabulary), [[i] for i in ids], skip=False))
    assert given_out == byte_tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")


def test_a_character_split_over_tokens_comes_with_its_last_one(
    fallback_tokenizer: Tokenizer, fallback_vocabulary: Vocabulary
) -> None:
    ids = ids_of(fallback_tokenizer, ["a", "<0xE4>", "<0xBD>", "<0xA0>", "b"])
    assert said(detokenizer(fallback_vocabulary), [[i] for i in ids]) == ["a", "", "", "你", "b"]


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


def test_a_decoder_of_any_other_kind_decodes_in_its_window(bytes_vocabulary: Vocabulary) -> None:
    joined = replace(bytes_vocabulary, tokens=("one", "two"), byte_level=False, join=" ".join)
    assert said(detokenizer(joined), [[0], [1, 0]]) == ["one", " two one"]


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
