"""Without a parser the reference is consistent, so we equal it: every chunk, every carried state, every final."""

from __future__ import annotations

import pytest

from headrace.protocol import DerenderStreamState
from tests.golden.vectors import cases, load, step, whole

FILES = ["qwen3__none", "llama3_1__none", "gemma3__none", "gptoss__none", "llama2__none"]


@pytest.mark.parametrize("name", FILES)
def test_every_chunk_and_every_carried_state_equals_the_recorded_one(name: str) -> None:
    derenderer = load(name)
    chunks = 0
    for case in cases(name):
        for stream in case.streams:
            carried: dict[int | None, DerenderStreamState] = {}
            for event in stream.events:
                done = step(derenderer, case, event.chunk, carried.get(event.index))
                where = f"{case.id}, {stream.chunking}, {event.chunk}"
                assert {"chunk": done.chunk.model_dump(mode="json")} == event.response, where
                assert done.stream_state.model_dump(mode="json") == event.state, where
                # What is carried on is the recorded state, so each chunk also continues the reference's own.
                carried[event.index] = DerenderStreamState.model_validate(event.state)
                chunks += 1
    assert chunks > 4000


@pytest.mark.parametrize("name", FILES)
def test_every_final_equals_the_recorded_one(name: str) -> None:
    derenderer = load(name)
    for case in cases(name):
        if case.kind == "empty-output":
            continue
        assert whole(derenderer, case) == case.nonstream["response"], case.id


@pytest.mark.parametrize("name", FILES)
def test_an_empty_output_is_answered_where_the_reference_refuses_it(name: str) -> None:
    derenderer = load(name)
    empty = [case for case in cases(name) if case.kind == "empty-output"]
    assert empty
    for case in empty:
        assert "empty or null token_ids" in case.nonstream["response"]["error"]["message"]
        choice = whole(derenderer, case)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", case.finish_reason)
