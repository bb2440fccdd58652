"""Following a log: a whole one is followed, and any loss or change in it is seen."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.broker.entries import SEED, Begin, Entry, Kind, Position, advance
from headrace.protocol.errors import StreamLost
from headrace.protocol.wire import TokenChoice, TokenChunk
from headrace.workers.follow import Follower

STEPS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=3)), max_size=8)


def written(epochs: list[list[tuple[int, list[int]]]]) -> list[Entry]:
    """The log that these epochs leave: one entry a step, and the end."""
    entries: list[Entry] = []
    k, running = 0, SEED
    for number, steps in enumerate(epochs, start=1):
        begin = msgspec.json.encode(Begin("w", 0.0, k))
        entries.append(Entry(Position(number, 0), "begin", begin, SEED))
        for index, tokens in steps:
            k += 1
            payload = msgspec.json.encode(TokenChunk("r", [TokenChoice(index, token_ids=tokens)]))
            entries.append(Entry(Position(number, k), "chunk", payload, running))
            running = advance(running, index, tokens)
    entries.append(Entry(Position(len(epochs), k + 1), "end", b"{}", running))
    return entries


@given(st.lists(STEPS, min_size=1, max_size=3))
def test_a_whole_log_is_followed_to_its_end(epochs: list[list[tuple[int, list[int]]]]) -> None:
    follower = Follower()
    chunks = [chunk for entry in written(epochs) if (chunk := follower.follow(entry)) is not None]
    told = [(choice.index, choice.token_ids) for chunk in chunks for choice in chunk.choices]
    assert told == [step for steps in epochs for step in steps]
    assert follower.chunks == len(told)


@given(st.lists(STEPS, min_size=1, max_size=3), st.data())
def test_a_log_that_lost_an_entry_is_seen(epochs: list[list[tuple[int, list[int]]]], data: st.DataObject) -> None:
    entries = written(epochs)
    lost = data.draw(st.integers(0, len(entries) - 2))
    assume(entries[lost].kind == "chunk")
    with pytest.raises(StreamLost):
        follower = Follower()
        for entry in entries[:lost] + entries[lost + 1 :]:
            follower.follow(entry)


@given(STEPS, st.data())
def test_other_tokens_under_the_same_ids_are_seen(steps: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    assume(steps)
    entries = written([steps])
    other = data.draw(st.integers(1, len(entries) - 2))
    chunk = TokenChunk("r", [TokenChoice(0, token_ids=[77])])
    entries[other] = Entry(entries[other].position, "chunk", msgspec.json.encode(chunk), entries[other].before)
    with pytest.raises(StreamLost):
        follower = Follower()
        for entry in entries:
            follower.follow(entry)


@pytest.mark.parametrize("kind", ["chunk", "end", "begin"])
def test_an_entry_that_goes_back_is_seen(kind: Kind) -> None:
    follower = Follower(Position(2, 3), chunks=3)
    with pytest.raises(StreamLost, match="went back from 2-3 to 2-3"):
        follower.follow(Entry(Position(2, 3), kind, b"{}", SEED))
