"""An event that is too large for a message goes in parts, and comes out whole."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from headrace.client.parts import AT_A_TIME, Parts
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, FinalEvent, PartEvent
from headrace.workers.outcome import parts_of

EVENTS = st.builds(
    lambda text, final: jobs.encode(
        FinalEvent(client="c", request_id="é", event_id="run", response=Raw(json.dumps(text).encode()))
        if final
        else ChunkEvent(client="c", request_id="é", seq=7, chunk=Raw(json.dumps(text, ensure_ascii=False).encode()))
    ),
    st.text(st.characters(codec="utf-8"), max_size=400),
    st.booleans(),
)


def read(part: bytes) -> PartEvent:
    (event,) = jobs.decode_events(part)
    assert isinstance(event, PartEvent)
    return event


@given(EVENTS, st.integers(1, 600), st.randoms())
def test_any_event_at_any_limit_in_any_order_and_often_comes_out_as_it_was(
    event: bytes, limit: int, dice: random.Random
) -> None:
    parts = parts_of(event, limit)
    shuffled = [read(part) for part in parts] + [read(part) for part in parts[:-1]]
    dice.shuffle(shuffled)
    together = Parts()
    found = [whole for part in shuffled if (whole := together.add(part)) is not None]
    assert event in found
    assert set(found) == {event}


@given(EVENTS, st.integers(300, 600))
def test_no_part_is_over_the_limit(event: bytes, limit: int) -> None:
    assert all(len(part) <= limit for part in parts_of(event, limit))


def test_events_that_never_come_whole_take_no_more_room_than_a_few() -> None:
    parts = Parts()
    for number in range(50):
        assert parts.add(PartEvent(client="c", request_id="r", of=f"{number}", part=0, parts=2, text="x")) is None
    last = [PartEvent(client="c", request_id="r", of=f"{number}", part=1, parts=2, text="y") for number in range(50)]
    assert [parts.add(part) for part in last[-AT_A_TIME:]] == [b"xy"] * AT_A_TIME
    assert parts.add(last[0]) is None


def test_a_part_beyond_its_event_is_dropped() -> None:
    parts = Parts()
    assert parts.add(PartEvent(client="c", request_id="r", of="a", part=5, parts=2, text="x")) is None
    assert parts.add(PartEvent(client="c", request_id="r", of="a", part=0, parts=10**9, text="x")) is None
