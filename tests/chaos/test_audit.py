"""The auditor sees what it is there for: each broken promise is named, and a kept one is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from msgspec import Raw

from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, ErrorEvent, Event, FinalEvent
from tests.chaos.asks import ASKS, SUBMITTED_AT
from tests.chaos.audit import Told, broken_promises

ASK = next(ask for ask in ASKS if ask.kind.name == "plain-chat")


async def _kept() -> Told:
    """What a plain consumer hears of a request that goes well."""
    answer = await ASK.answer()

    def timed(said: object) -> Raw:
        assert isinstance(said, dict)
        return Raw(json.dumps(said | {"created": int(SUBMITTED_AT)}).encode())

    chunks: list[Event] = [_chunk(seq, timed(said)) for seq, said in enumerate(answer.chunks[0])]
    final = FinalEvent(
        client="tester",
        request_id=ASK.request_id,
        event_id=jobs.run_of("tester", ASK.request_id),
        response=timed(answer.response),
        chunks=len(chunks),
        finished_at=SUBMITTED_AT,
    )
    return Told(ASK, "tester", [*chunks, final], None, final)


def _chunk(seq: int, chunk: Raw) -> ChunkEvent:
    return ChunkEvent(client="tester", request_id=ASK.request_id, seq=seq, chunk=chunk)


def _error(told: Told) -> ErrorEvent:
    assert told.stands is not None
    return ErrorEvent(
        client="tester",
        request_id=ASK.request_id,
        event_id=told.stands.event_id,
        code="stream_lost",
        status=500,
        error=Raw(b"{}"),
    )


def _other_chunk(told: Told, seq: int) -> ChunkEvent:
    return msgspec.structs.replace(told.chunks[seq], chunk=told.chunks[seq + 1].chunk)


def _with(told: Told, *more: Event) -> Told:
    return replace(told, events=[*told.events, *more])


BREACHES: dict[str, tuple[Callable[[Told], Told], str]] = {
    "nothing stands": (lambda told: replace(told, stands=None), "no outcome"),
    "never told": (lambda told: replace(told, events=told.events[:-1]), "never told"),
    "a chunk is missing": (lambda told: replace(told, events=[*told.events[:3], *told.events[4:]]), "[3] missing"),
    "the last chunk is missing": (lambda told: replace(told, events=[*told.events[:-2], told.events[-1]]), "missing"),
    "two chunks under a seq": (lambda told: _with(told, _other_chunk(told, 3)), "two chunks under seq 3"),
    "a wrong chunk": (
        lambda told: replace(told, events=[*told.events[:3], _other_chunk(told, 3), *told.events[4:]]),
        "not those of an undisturbed line",
    ),
    "two outcomes": (lambda told: _with(told, _error(told)), "it was told stream_lost"),
    "the wrong outcome": (lambda told: replace(told, stands=_error(told), events=[_error(told)]), "ended as stream"),
    "another second": (
        lambda told: replace(told, events=[_later(told), *told.events[1:]]),
        "created is",
    ),
}


def _later(told: Told) -> ChunkEvent:
    said = json.loads(bytes(told.chunks[0].chunk)) | {"created": 5}
    return msgspec.structs.replace(told.chunks[0], chunk=Raw(json.dumps(said).encode()))


async def test_a_promise_that_was_kept_is_not_named() -> None:
    told = await _kept()
    assert broken_promises(told, await ASK.answer()) == []
    assert broken_promises(_with(told, *told.events), await ASK.answer()) == []  # at least once


@pytest.mark.parametrize("breach", BREACHES)
async def test_a_promise_that_was_broken_is_named(breach: str) -> None:
    spoil, words = BREACHES[breach]
    assert any(words in said for said in broken_promises(spoil(await _kept()), await ASK.answer()))
