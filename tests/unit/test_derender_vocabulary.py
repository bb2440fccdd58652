"""Loading the decode side of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.workers.derender.vocabulary import Vocabulary
from tests.unit.derender_tokenizer import END, byte_fallback, byte_level


def test_every_token_is_found_by_id_and_unknown_ids_by_none(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    vocabulary = Vocabulary.load(tmp_path)
    size = tokenizer.get_vocab_size()
    assert [vocabulary.token(i) for i in range(size)] == [tokenizer.id_to_token(i) for i in range(size)]
    assert (vocabulary.token(size), vocabulary.token(-1), vocabulary.token(10**9)) == (None, None, None)
    assert vocabulary.find(END) == tokenizer.token_to_id(END)
    assert vocabulary.find("no such token") is None


def test_special_tokens_are_those_that_the_configuration_names(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    named = {
        "eos_token": {"content": END},
        "pad_token": None,
        "unk_token": "not in the vocabulary",
        "additional_special_tokens": ["<think>", {"content": "</think>"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.special == {tokenizer.token_to_id(token) for token in (END, "<think>", "</think>")}
    assert vocabulary.eos == {tokenizer.token_to_id(END)}


def test_extra_special_tokens_may_have_names_of_their_own(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    extra = {"extra_special_tokens": {"image_token": "<think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(extra))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    vocabulary = Vocabulary.load(tmp_path)
    assert vocabulary.special == {tokenizer.token_to_id(END), tokenizer.token_to_id("<think>")}


@pytest.mark.parametrize(("eos", "more"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_the_generation_configuration_adds_end_tokens(tmp_path: Path, eos: object, more: set[int]) -> None:
    tokenizer = byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 0.6}))
    assert Vocabulary.load(tmp_path).eos == more | {tokenizer.token_to_id(END)}


def test_a_tokenizer_file_alone_is_enough(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    vocabulary = Vocabulary.load(tmp_path / "tokenizer.json")
    assert (vocabulary.byte_level, vocabulary.special, vocabulary.eos) == (True, frozenset(), frozenset())


def test_a_vocabulary_may_be_a_list_and_have_holes(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    added = [{"id": 4, "content": "<x>", "special": False}]
    file.write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.5]]}, "added_tokens": added}))
    vocabulary = Vocabulary.load(file)
    assert vocabulary.tokens == ("a", "b", None, None, "<x>")
    assert vocabulary.join(["a", "b"]) == "a b"


def test_only_byte_level_decoders_count_as_byte_level(tmp_path: Path) -> None:
    byte_fallback(tmp_path)
    vocabulary = Vocabulary.load(tmp_path)
    assert not vocabulary.byte_level
    assert vocabulary.join(["\u2581the", "<0xE4>", "<0xBD>", "<0xA0>"]) == "the你"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        Vocabulary.load(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Vocabulary.load(tmp_path)
