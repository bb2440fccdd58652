"""Loading the decode side of a tokenizer, of whatever kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.workers.derender.detokenize import detokenizer
from headrace.workers.derender.vocabulary import InBytes, InContext, Tokens, Vocabulary, load_vocabulary
from headrace.workers.derender.vocabulary.decoder import in_context
from headrace.workers.derender.vocabulary.spelling import from_text, in_text
from headrace.workers.derender.vocabulary.table import MAX_IDS
from tests.unit.derender_tokenizer import END, byte_fallback, byte_level
from tests.unit.derender_vocabularies import (
    BYTE,
    BYTES,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    WORDS,
    sentencepiece,
    tekken,
    tiktoken,
)


def spellings(vocabulary: Vocabulary) -> list[str | None]:
    return [vocabulary.token(i) for i in range(len(vocabulary.tokens))]


def joined(vocabulary: Vocabulary, *spellings: str) -> str:
    assert isinstance(vocabulary.decoding, InContext)
    return vocabulary.decoding.join(list(spellings))


class TestTable:
    @given(pairs=st.lists(st.tuples(st.integers(0, 60), st.text(min_size=1, max_size=4)), max_size=40))
    def test_it_has_the_last_spelling_of_every_id_and_holes_elsewhere(self, pairs: list[tuple[int, str]]) -> None:
        table = Tokens((token_id, spelling.encode()) for token_id, spelling in pairs)
        expected = dict(pairs)
        assert [table[i] for i in range(-2, 70)] == [expected.get(i) for i in range(-2, 70)]
        assert len(table) == max(expected, default=-1) + 1
        for spelling in expected.values():
            found = table.find(spelling)
            assert found == min(i for i, other in expected.items() if other == spelling)
        assert table.find("longer than any") is None

    def test_a_token_is_not_found_across_its_neighbours(self) -> None:
        table = Tokens(enumerate([b"ab", b"ca", b"bc", b""]))
        assert [table.find(token) for token in ("ab", "bc", "abc", "a", "b", "")] == [0, 2, None, None, None, None]

    @pytest.mark.parametrize("token_id", [-1, MAX_IDS, 2**63])
    def test_an_id_that_no_vocabulary_has_is_refused(self, token_id: int) -> None:
        with pytest.raises(ValueError, match=f"has the id {token_id}"):
            Tokens([(token_id, b"x")])


class TestTokenizerJson:
    def test_every_token_is_found_by_id_and_unknown_ids_by_none(self, tmp_path: Path) -> None:
        tokenizer = byte_level(tmp_path)
        vocabulary = load_vocabulary(tmp_path)
        size = tokenizer.get_vocab_size()
        assert [vocabulary.token(i) for i in range(size)] == [tokenizer.id_to_token(i) for i in range(size)]
        assert (vocabulary.token(size), vocabulary.token(-1), vocabulary.token(10**9)) == (None, None, None)
        assert vocabulary.find(END) == tokenizer.token_to_id(END)
        assert vocabulary.find("no such token") is None

    @pytest.mark.parametrize("indent", [None, 2])
    @pytest.mark.parametrize("ascii_only", [True, False])
    def test_spellings_may_be_written_in_any_way_that_json_has(
        self, tmp_path: Path, indent: int | None, ascii_only: bool
    ) -> None:
        tokens = ['"', "\\", '\\"', '":1,', "{", "]}", "\u0120the", "\x00\n", "你", "👩", "a" * 300, "\u2581"]
        for vocab in ({token: i for i, token in enumerate(tokens)}, [[token, -1e-05] for token in tokens]):
            text = json.dumps({"model": {"vocab": vocab}}, indent=indent, ensure_ascii=ascii_only)
            (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
            assert spellings(load_vocabulary(tmp_path)) == tokens

    @pytest.mark.parametrize("indent", [None, 1])
    def test_a_long_vocabulary_is_read_in_parts_that_end_between_its_tokens(
        self, tmp_path: Path, indent: int | None
    ) -> None:
        tokens = [token for i in range(9000) for token in (f",{i}", f'",{i}', f'{i},"', f'\\":{i},\\"', f"],[{i}")]
        for vocab in ({token: i for i, token in enumerate(tokens)}, [[token, -1.5] for token in tokens]):
            text = json.dumps({"model": {"vocab": vocab}}, indent=indent)
            (tmp_path / "tokenizer.json").write_text(text)
            assert spellings(load_vocabulary(tmp_path)) == tokens

    def test_a_vocabulary_may_be_in_any_order_and_have_holes(self, tmp_path: Path) -> None:
        file = tmp_path / "tokenizer.json"
        added = [{"id": 6, "content": "<x>", "special": False}, {"id": 1, "content": "B", "special": False}]
        file.write_text(json.dumps({"model": {"vocab": {"c": 2, "a": 0, "b": 1}}, "added_tokens": added}))
        vocabulary = load_vocabulary(file)
        assert spellings(vocabulary) == ["a", "B", "c", None, None, None, "<x>"]
        assert joined(vocabulary, "a", "b") == "a b"

    def test_special_tokens_are_those_that_the_configuration_names(self, tmp_path: Path) -> None:
        tokenizer = byte_level(tmp_path)
        named = {
            "eos_token": {"content": END},
            "pad_token": None,
            "unk_token": "not in the vocabulary",
            "bos_token": "t",
            "additional_special_tokens": ["<think>", {"content": "</think>"}],
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
        vocabulary = load_vocabulary(tmp_path)
        assert vocabulary.special == {tokenizer.token_to_id(token) for token in (END, "t", "<think>", "</think>")}
        assert vocabulary.eos == {tokenizer.token_to_id(END)}

    def test_extra_special_tokens_may_have_names_of_their_own(self, tmp_path: Path) -> None:
        tokenizer = byte_level(tmp_path)
        extra = {"extra_special_tokens": {"image_token": "<think>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(extra))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
        vocabulary = load_vocabulary(tmp_path)
        assert vocabulary.special == {tokenizer.token_to_id(END), tokenizer.token_to_id("<think>")}

    def test_control_tokens_are_the_special_ones_and_those_that_the_tokenizer_marks(self, tmp_path: Path) -> None:
        tokenizer = byte_level(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<think>"}))
        vocabulary = load_vocabulary(tmp_path)
        assert vocabulary.control == {tokenizer.token_to_id(END), tokenizer.token_to_id("<think>")}

    @pytest.mark.parametrize(("eos", "more"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
    def test_the_generation_configuration_adds_end_tokens(self, tmp_path: Path, eos: object, more: set[int]) -> None:
        tokenizer = byte_level(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 0.6}))
        assert load_vocabulary(tmp_path).eos == more | {tokenizer.token_to_id(END)}

    def test_the_file_alone_is_enough(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        vocabulary = load_vocabulary(tmp_path / "tokenizer.json")
        assert (vocabulary.special, vocabulary.eos) == (frozenset(), frozenset())
        assert isinstance(vocabulary.decoding, InBytes)

    def test_tokens_of_other_decoders_are_no_bytes(self, tmp_path: Path) -> None:
        byte_fallback(tmp_path)
        vocabulary = load_vocabulary(tmp_path)
        assert joined(vocabulary, "\u2581the", "<0xE4>", "<0xBD>", "<0xA0>") == "the你"

    @pytest.mark.parametrize(
        ("decoder", "marker"),
        [
            ({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}, "_"),
            ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, None),
            ({"type": "WordPiece", "prefix": "##", "cleanup": True}, None),
            ({"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, "\u2581"),
            ({"type": "Replace", "pattern": {"String": "\u2581"}, "content": "-"}, None),
            ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, None),
        ],
    )
    def test_the_marker_of_a_space_is_the_decoders(
        self, tmp_path: Path, decoder: dict[str, object], marker: str | None
    ) -> None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "decoder": decoder}))
        decoding = load_vocabulary(tmp_path).decoding
        assert (decoding.marker if isinstance(decoding, InContext) else None) == marker

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            '{"model": {}}',
            '{"model": {"vocab": 3}}',
            '{"model": {"vocab": {"a": "b"}}}',
            '{"model": {"vocab": {"a": 1.5}}}',
            '{"model": {"vocab": {"a": -1}}}',
            '{"model": {"vocab": {"a": 0, "b": null, "c": 1}}}',
            '{"model": {"vocab": {"a": 99999999999999999999}}}',
            '{"model": {"vocab": ["a", "b"]}}',
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 99999999, "content": "b"}]}',
            '{"model": {"vocab": {"a": 0}}, "decoder": {"type": "no such"}}',
        ],
    )
    def test_a_file_that_is_no_tokenizer_is_named(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
            load_vocabulary(tmp_path)

    def test_a_configuration_that_is_none_is_named(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
            load_vocabulary(tmp_path)


SPACE_TO_MARKER = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
PIECES = st.sampled_from(
    ["\u2581", "\u2581a", " ", "", "b", "<0x", "41>", "<0x41>", "<0xe4>", "<0xBD>", "<0xA0>", "<0x+1>", "<0xé>"]
)


class TestDecoder:
    @pytest.mark.parametrize("ends", [[], [STRIP]])
    @given(spellings=st.lists(PIECES | st.text(max_size=6), max_size=8))
    def test_byte_fallback_joins_as_the_library_does(self, ends: list[dict[str, object]], spellings: list[str]) -> None:
        decoder = {"type": "Sequence", "decoders": [SPACE_TO_MARKER, {"type": "ByteFallback"}, {"type": "Fuse"}, *ends]}
        bare = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": decoder}
        library = Tokenizer.from_str(json.dumps(bare | {"added_tokens": []})).decoder
        assert in_context(decoder).join(spellings) == library.decode(spellings)


class TestTekken:
    def test_special_tokens_come_first_and_then_the_bytes_by_rank(self, tmp_path: Path) -> None:
        names = ["<unk>", "<s>", "</s>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
        vocabulary = load_vocabulary(tekken(tmp_path, special=names, count=8))
        assert spellings(vocabulary)[:8] == [*names, "<SPECIAL_6>", "<SPECIAL_7>"]
        assert spellings(vocabulary)[8:] == [in_text(token) for token in (*BYTES, *WORDS)]
        assert (vocabulary.eos, vocabulary.control) == ({2}, set(range(8)))
        assert vocabulary.special == {0, 1, 2, 4, 6, 7}

    def test_the_markup_of_calls_and_thoughts_is_text_and_other_special_tokens_are_not(self, tmp_path: Path) -> None:
        names = ["</s>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]"]
        vocabulary = load_vocabulary(tekken(tmp_path, special=names))
        ids = [found for name in names if (found := vocabulary.find(name)) is not None]
        for skip, text in (
            (True, "[TOOL_CALLS][ARGS][THINK][/THINK]"),
            (False, "[TOOL_CALLS][CALL_ID][ARGS][THINK][/THINK]"),
        ):
            one = detokenizer(vocabulary)
            assert one.feed(one.open(None, skip_special=skip), ids, skip_special=skip) == text
        assert one.text(ids) == "".join(names)

    def test_a_file_of_before_version_8_has_the_names_of_its_time(self, tmp_path: Path) -> None:
        vocabulary = load_vocabulary(tekken(tmp_path))
        assert [vocabulary.find(token) for token in ("<unk>", "</s>", "[TOOL_CALLS]", "<pad>")] == [0, 2, 9, 11]
        assert vocabulary.token(20) == "<SPECIAL_20>"

    @pytest.mark.parametrize(
        ("special", "count", "reason"),
        [([f"<{i}>" for i in range(3)], 2, "has rank 2 of 2"), (None, -1, "-1 special tokens")],
    )
    def test_a_file_that_contradicts_itself_is_named(
        self, tmp_path: Path, special: list[str] | None, count: int, reason: str
    ) -> None:
        file = tekken(tmp_path, special=special, count=count)
        with pytest.raises(ValueError, match=rf"tekken\.json cannot be read: .*{reason}"):
            load_vocabulary(file)

    def test_a_file_with_fewer_tokens_than_it_says_is_named(self, tmp_path: Path) -> None:
        file = tekken(tmp_path)
        parsed = json.loads(file.read_bytes())
        file.write_text(json.dumps(parsed | {"vocab": parsed["vocab"][:100]}))
        with pytest.raises(ValueError, match="has 124 tokens where it says 288"):
            load_vocabulary(file)


class TestTiktoken:
    @pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
    def test_the_configuration_names_what_comes_after_the_ranks(self, tmp_path: Path, name: str) -> None:
        added = {"264": {"content": "[BOS]"}, "265": {"content": "[EOS]"}, "268": {"content": "<|tool|>"}}
        tiktoken(tmp_path, name=name, added_tokens_decoder=added, eos_token="[EOS]", bos_token="[BOS]")
        vocabulary = load_vocabulary(tmp_path)
        assert spellings(vocabulary)[255:257] == ["ÿ", "Ġthe"]
        reserved = ["<|reserved_token_266|>", "<|reserved_token_267|>"]
        assert spellings(vocabulary)[264:] == ["[BOS]", "[EOS]", *reserved, "<|tool|>"]
        assert (vocabulary.special, vocabulary.eos) == ({264, 265}, {265})

    def test_the_first_qwen_names_its_special_tokens_in_code_alone(self, tmp_path: Path) -> None:
        vocabulary = load_vocabulary(tiktoken(tmp_path, name="qwen.tiktoken").parent)
        assert [vocabulary.token(i) for i in (264, 265, 266, 267, 471, 472)] == [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|extra_0|>",
            "<|extra_204|>",
            None,
        ]
        assert vocabulary.special == set(range(264, 472))

    def test_older_configurations_add_tokens_in_a_file_of_their_own(self, tmp_path: Path) -> None:
        tiktoken(tmp_path)
        (tmp_path / "added_tokens.json").write_text('{"<x>": 264}')
        assert load_vocabulary(tmp_path).find("<x>") == 264

    @pytest.mark.parametrize("line", [b"QQ==", b"QQ== x", b"QQ== 1 2", b"Q 1", b"QQ== -7", b"QQ== 99999999999"])
    def test_a_line_that_is_none_is_refused_with_the_files_name(self, tmp_path: Path, line: bytes) -> None:
        file = tiktoken(tmp_path)
        file.write_bytes(file.read_bytes() + line)
        with pytest.raises(ValueError, match=r"tiktoken\.model cannot be read"):
            load_vocabulary(file)


class TestSentencePiece:
    PIECES = (
        ("<unk>", UNKNOWN),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
        ("\u2581the", None),
        ("\u2581\u2581", USER_DEFINED),
        ("long" * 50, None),
    )

    def test_pieces_are_tokens_and_control_pieces_are_special(self, tmp_path: Path) -> None:
        vocabulary = load_vocabulary(sentencepiece(tmp_path, self.PIECES).parent)
        assert spellings(vocabulary) == [text for text, _ in self.PIECES]
        assert (vocabulary.special, vocabulary.eos) == ({0, 1, 2}, {2})
        assert isinstance(vocabulary.decoding, InContext)
        assert vocabulary.decoding.marker == "\u2581"

    @pytest.mark.parametrize(("adds_space", "text"), [(None, "the the你"), (True, "the the你"), (False, " the the你")])
    def test_a_space_that_encoding_adds_is_dropped(self, tmp_path: Path, adds_space: bool | None, text: str) -> None:
        vocabulary = load_vocabulary(sentencepiece(tmp_path, self.PIECES, adds_space=adds_space))
        assert joined(vocabulary, "\u2581the", "\u2581the", "<0xE4>", "<0xBD>", "<0xA0>") == text

    def test_the_configuration_adds_tokens_and_names_special_ones(self, tmp_path: Path) -> None:
        size = len(self.PIECES)
        added = {str(size): {"content": "<call>"}, str(size + 1): {"content": "<end>"}, "x": {"content": "no id"}}
        sentencepiece(tmp_path, self.PIECES, added_tokens_decoder=added, eos_token="<end>")
        vocabulary = load_vocabulary(tmp_path)
        assert spellings(vocabulary)[size:] == ["<call>", "<end>"]
        assert (vocabulary.special, vocabulary.eos) == ({0, 1, 2, size + 1}, {size + 1})

    @given(data=st.data())
    def test_bytes_that_are_no_model_are_refused_with_the_files_name(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        file = sentencepiece(tmp_path_factory.getbasetemp() / "broken", self.PIECES)
        model = file.read_bytes()
        cut = data.draw(st.integers(0, len(model)))
        file.write_bytes(model[:cut] + data.draw(st.binary(max_size=20)))
        try:
            vocabulary = load_vocabulary(file)
        except ValueError as error:
            assert "tokenizer.model cannot be read: " in str(error)
        else:
            assert spellings(vocabulary)[0] in ("<unk>", None)


class TestFolder:
    def test_the_tokenizer_of_several_is_tokenizer_json(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        tekken(tmp_path)
        assert load_vocabulary(tmp_path).find("</s>") is None

    def test_next_to_weights_in_mistrals_format_it_is_mistrals(self, tmp_path: Path) -> None:
        byte_level(tmp_path)
        tekken(tmp_path)
        (tmp_path / "consolidated-00001-of-00002.safetensors").touch()
        assert load_vocabulary(tmp_path).find("</s>") == 2

    def test_a_folder_without_a_tokenizer_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"has no tokenizer: .* tokenizer\.json, tekken\.json"):
            load_vocabulary(tmp_path)


@given(token=st.binary(max_size=12))
def test_bytes_come_back_from_their_plain_spelling(token: bytes) -> None:
    spelling = in_text(token)
    assert from_text(spelling) == token
    assert spelling.encode() == token or spelling.startswith("\ufffd")


@given(one=st.binary(max_size=6), other=st.binary(max_size=6))
def test_no_two_tokens_have_the_same_plain_spelling(one: bytes, other: bytes) -> None:
    assert (in_text(one) == in_text(other)) == (one == other)
