"""Without a parser the reference is consistent, so we equal it: every chunk, every carried state, every final.

Mistral's own tokenizer is the exception. Its tokens are bytes, and where a character is split over tokens the reference
breaks off the stream or, where special tokens are kept, loses it; an id outside the vocabulary makes it say `<unk>`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.protocol import DerenderStreamState
from headrace.workers.derender import Derenderer
from tests.golden.vectors import Case, cases, load, step, whole
from tests.shared import tokenizer_folder

MISTRAL = "mistral_tekken_v3__none"
FILES = ["qwen3__none", "llama3_1__none", "gemma3__none", "gptoss__none", "llama2__none", MISTRAL]
BROKEN_OFF = ("bytes is not JSON serializable", "invalid stream_state", "unable to parse raw data as a unicode string")


@pytest.mark.parametrize("name", FILES)
def test_every_chunk_and_every_carried_state_equals_the_recorded_one(name: str) -> None:
    derenderer = load(name)
    chunks = 0
    for case in filter(sound, cases(name)):
        for stream in case.streams:
            carried: dict[int | None, DerenderStreamState] = {}
            for event in stream.events:
                done = step(derenderer, case, event.chunk, carried.get(event.index))
                if broken_off(event.response):
                    break
                where = f"{case.id}, {stream.chunking}, {event.chunk}"
                assert {"chunk": done.chunk.model_dump(mode="json")} == event.response, where
                assert done.stream_state.model_dump(mode="json") == event.state, where
                # What is carried on is the recorded state, so each chunk also continues the reference's own.
                carried[event.index] = DerenderStreamState.model_validate(event.state)
                chunks += 1
    assert chunks > 3500


@pytest.mark.parametrize("name", FILES)
def test_from_every_recorded_state_the_rest_comes_the_same_in_one_piece(name: str) -> None:
    derenderer = load(name)
    resumed = 0
    for case in filter(sound, cases(name)):
        for stream in (stream for stream in case.streams if stream.chunking == "random"):
            events = [event for event in stream.events if event.chunk["choices"]]
            if len(case.token_ids) > 1 or any(broken_off(event.response) for event in events):
                continue
            for k, event in enumerate(events[:-1]):
                ids = [i for later in events[k + 1 :] for i in later.chunk["choices"][0].get("token_ids") or ()]
                state = DerenderStreamState.model_validate(event.state)
                rest = "".join(text_of(case, later.response["chunk"]) for later in events[k + 1 :])
                assert chunk_texts(derenderer, case, [ids], state) == [rest], (case.id, k)
                resumed += 1
    assert resumed > 300


@pytest.mark.parametrize("name", FILES)
def test_every_final_equals_the_recorded_one(name: str) -> None:
    derenderer = load(name)
    finals = 0
    for case in filter(sound, cases(name)):
        recorded = case.nonstream["response"]
        if case.kind == "empty-output" or broken_off(recorded):
            continue
        assert whole(derenderer, case) == recorded, case.id
        finals += 1
    assert finals > 130


@pytest.mark.parametrize("name", FILES)
def test_an_empty_output_is_answered_where_the_reference_refuses_it(name: str) -> None:
    derenderer = load(name)
    empty = [case for case in cases(name) if case.kind == "empty-output"]
    assert empty
    for case in empty:
        assert "empty or null token_ids" in case.nonstream["response"]["error"]["message"]
        choice = whole(derenderer, case)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", case.finish_reason)


def test_byte_tokens_say_their_bytes_even_where_the_reference_breaks_off() -> None:
    derenderer, said = load(MISTRAL), bytes_of_tekken()
    broken = 0
    for case in cases(MISTRAL):
        if case.kind == "prompt-mid-char":
            continue
        broken += not sound(case) or any(broken_off(event.response) for s in case.streams for event in s.events)
        for ids in case.token_ids:
            expected = b"".join(map(said, ids)).decode("utf-8", "replace")
            text = "".join(chunk_texts(derenderer, case, [[i] for i in ids]))
            assert expected.startswith(text), case.id
            # Bytes at the end that make no character are not given out.
            assert expected == text or expected.endswith("\ufffd"), case.id
    assert broken > 80


def sound(case: Case) -> bool:
    """False where the reference loses what was said: Mistral's byte tokens, with special tokens kept or unknown ids."""
    keeps_special = case.request is not None and case.request.get("skip_special_tokens") is False
    return case.tokenizer != "mistral_tekken_v3" or not (keeps_special or case.kind == "out-of-vocab")


def broken_off(response: dict[str, Any]) -> bool:
    """True where the reference could not put a byte token into JSON."""
    message = response.get("error", {}).get("message", "")
    return any(known in message for known in BROKEN_OFF)


def chunk_texts(
    derenderer: Derenderer, case: Case, chunks: list[list[int]], state: DerenderStreamState | None = None
) -> list[str]:
    """The texts of one choice's chunks, each with the state of the chunk before."""
    texts = []
    for ids in chunks:
        chunk = {"request_id": case.id, "choices": [{"index": 0, "token_ids": ids}]}
        done = step(derenderer, case, chunk, state)
        texts.append(text_of(case, done.chunk.model_dump()))
        state = done.stream_state
    return texts


def text_of(case: Case, chunk: dict[str, Any]) -> str:
    """The text of a chunk's one choice."""
    (choice,) = chunk["choices"]
    return (choice["delta"]["content"] if case.endpoint == "chat" else choice["text"]) or ""


def bytes_of_tekken() -> Callable[[int], bytes]:
    """Each token's bytes, read from the file by the shortest way."""
    file = json.loads((tokenizer_folder("mistral_tekken_v3") / "tekken.json").read_bytes())
    special = file["config"]["default_num_special_tokens"]
    size = file["config"]["default_vocab_size"]
    table = [base64.b64decode(token["token_bytes"]) for token in file["vocab"][: size - special]]
    calls = 9

    def said(token_id: int) -> bytes:
        if token_id < special:
            return b"[TOOL_CALLS]" if token_id == calls else b""
        return table[token_id - special] if token_id < size else b""

    return said
