"""Streams that change hands: ours to the reference and back, at any chunk.

`vectors/handover.jsonl.gz` holds what the reference made of our states, and states of its own (`record_handover`). A
state to be replayed does not say how much of the replayed text its maker has given out. Between tool calls both give
out everything at once, so the whole message comes, to the letter; within a call, where implementations hold back
differently, only the format that both stream alike is held to that.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from headrace.protocol import DerenderStreamState
from headrace.workers.derender import Derenderer
from headrace.workers.derender.derenderer import StateMode
from tests.golden.messages import Message, added, mended
from tests.golden.vectors import Case, cases, load, step

ALIKE = "hermes"
"""The format whose calls both stream at the same tokens."""


class Turn(msgspec.Struct):
    """A change of hands behind chunk `at`: our state and how the reference goes on from it, and its own state."""

    at: int
    ours: dict[str, Any]
    going_on: list[dict[str, Any]]
    theirs: dict[str, Any]


class Handover(msgspec.Struct):
    file: str
    id: str
    chunks: list[dict[str, Any]]
    told: list[dict[str, Any]]
    """What the reference tells of these chunks all by itself."""
    turns: list[Turn]


class Told(NamedTuple):
    """What we tell of a chunk, and the state that we give."""

    choice: dict[str, Any]
    state: dict[str, Any]


@cache
def handovers() -> list[Handover]:
    with gzip.open(Path(__file__).parent / "vectors" / "handover.jsonl.gz", "rb") as lines:
        return [msgspec.json.decode(line, type=Handover) for line in lines]


@cache
def known(file: str) -> dict[str, Case]:
    return {case.id: case for case in cases(file)}


@cache
def door(file: str, mode: StateMode) -> Derenderer:
    return Derenderer(load(file).core, state_mode=mode)


def told(derenderer: Derenderer, case: Case, chunks: list[dict[str, Any]], state: Any = None) -> Iterator[Told]:
    """Ours, chunk by chunk, the state through JSON each time."""
    for chunk in chunks:
        before = None if state is None else DerenderStreamState.model_validate_json(json.dumps(state))
        done = step(derenderer, case, chunk, before)
        state = json.loads(done.stream_state.model_dump_json())
        yield Told(done.chunk.model_dump(mode="json")["choices"][0], state)


def message(case: Case, choices: list[dict[str, Any]]) -> Message:
    """What the choices add up to, less the reference's known defects; it also gives out blanks that lead to a call."""
    whole = mended(case, added(choices))
    return whole._replace(content=whole.content and (whole.content.strip() or None))


def ids(choices: list[dict[str, Any]]) -> dict[int, set[str]]:
    """Every id that was told, by index of the call."""
    found: dict[int, set[str]] = {}
    for call in (call for choice in choices for call in choice["delta"].get("tool_calls") or ()):
        if call.get("id"):
            found.setdefault(call["index"], set()).add(call["id"])
    return found


every_case = pytest.mark.parametrize("handover", handovers(), ids=lambda handover: handover.id)


@every_case
def test_the_reference_goes_on_from_our_states(handover: Handover) -> None:
    case = known(handover.file)[handover.id]
    ours = list(told(door(handover.file, "replay"), case, handover.chunks))
    right = message(case, [one.choice for one in ours])
    assert right == message(case, handover.told)
    for turn in handover.turns:
        before, state = ours[: turn.at], dict(ours[turn.at - 1].state)
        scan = state.pop("scan")
        assert state == turn.ours, "the state is another than the reference was given: record it anew"
        choices = [one.choice for one in before] + turn.going_on
        assert not any(choice["delta"].get("role") for choice in turn.going_on)
        assert all(len(same) == 1 for same in ids(choices).values())
        whole = message(case, choices)
        if scan.get("phase") != "call" or handover.file.endswith(ALIKE):
            assert whole == right, turn.at
        assert (whole.reasoning, len(whole.calls)) == (right.reasoning, len(right.calls))
        assert whole.finish_reason == right.finish_reason


@every_case
@pytest.mark.parametrize("mode", ["compact", "replay"])
def test_we_go_on_from_the_reference_s_states(handover: Handover, mode: StateMode) -> None:
    case = known(handover.file)[handover.id]
    ours = list(told(door(handover.file, "compact"), case, handover.chunks))
    right = message(case, [one.choice for one in ours])
    for turn in handover.turns:
        after = list(told(door(handover.file, mode), case, handover.chunks[turn.at :], turn.theirs))
        choices = handover.told[: turn.at] + [one.choice for one in after]
        assert not any(one.choice["delta"].get("role") for one in after)
        whole = message(case, choices)
        if ours[turn.at - 1].state["scan"].get("phase") != "call" or handover.file.endswith(ALIKE):
            assert whole == right, turn.at
        assert [name for name, _ in whole.calls] == [name for name, _ in right.calls], "each call is told once"
        assert (whole.reasoning, whole.finish_reason) == (right.reasoning, right.finish_reason)
        assert all(len(same) == 1 for same in ids(choices).values())
        for number, one in enumerate(after, turn.at + 1):
            sent = handover.chunks[:number] if mode == "replay" else []
            lengths = [len(chunk["choices"][0]["token_ids"]) for chunk in sent]
            assert one.state["output_chunk_lens"] == lengths
            assert len(one.state["output_token_ids"]) == sum(lengths)
        if mode == "replay":
            settled = after[-1].state["last_tool_call_ids"]
            assert settled[: len(turn.theirs["last_tool_call_ids"])] == turn.theirs["last_tool_call_ids"]
            assert len(settled) == len(right.calls)
