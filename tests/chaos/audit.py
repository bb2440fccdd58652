"""The auditor: from what clients heard of a round, every promise that was broken. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, ErrorEvent, Event, FinalEvent, Terminal
from tests.chaos.asks import SUBMITTED_AT, Ask
from tests.chaos.schedules.answers import Answer, by_choice, timeless


@dataclass(slots=True)
class Received:
    """What the SDK handed over for a request: chunks by their numbers, and its end."""

    submitted_at: set[int] = field(default_factory=set)
    """The seconds at which it was sent: more than one where a server was away."""
    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    final: FinalEvent | None = None
    error: str | None = None
    """The code of the error that ended it."""


@dataclass(frozen=True, slots=True)
class Told:
    """All that a round brought for one request.

    ``events`` is what a plain consumer heard, in order; ``stands`` the outcome in the run store. ``complete`` says that
    the plain consumer lost nothing by itself: its own server was never away.
    """

    ask: Ask
    client: str
    events: Sequence[Event]
    received: Received | None
    stands: Terminal | None
    complete: bool = True

    @property
    def outcomes(self) -> list[Terminal]:
        return [event for event in self.events if isinstance(event, FinalEvent | ErrorEvent)]

    @property
    def chunks(self) -> list[ChunkEvent]:
        return [event for event in self.events if isinstance(event, ChunkEvent)]


def kind_of(outcome: Terminal) -> str:
    """``answered``, or the error's code."""
    return "answered" if isinstance(outcome, FinalEvent) else outcome.code


def broken_promises(told: Told, answer: Answer, *, allowed: frozenset[str] = frozenset()) -> list[str]:
    """One sentence for each promise that was broken; ``allowed`` are outcomes that may be besides the request's own."""
    said = f"{told.client}/{told.ask.request_id}"
    return [f"{said}: {what}" for what in _broken(told, answer, told.ask.kind.outcomes | allowed)]


def _broken(told: Told, answer: Answer, may_be: frozenset[str]) -> Iterator[str]:
    outcome = told.stands
    if outcome is None:
        yield "it has no outcome"
        return
    yield from _one_outcome(told, outcome, may_be)
    numbered: dict[int, bytes] = {}
    for event in told.chunks:
        body = bytes(event.chunk)
        if numbered.setdefault(event.seq, body) != body:
            yield f"two chunks under seq {event.seq}: {numbered[event.seq]!r} and {body!r}"
    if told.complete:
        yield from _dense(sorted(numbered), outcome, told, by="a plain consumer")
    if told.received is not None:
        yield from _received(told, told.received, outcome, numbered)
        numbered |= dict(told.received.chunks)
    yield from _content(told, [numbered[seq] for seq in sorted(numbered)], outcome, answer)


def _one_outcome(told: Told, outcome: Terminal, may_be: frozenset[str]) -> Iterator[str]:
    run = jobs.run_of(told.client, told.ask.request_id)
    if kind_of(outcome) not in may_be:
        yield f"it ended as {kind_of(outcome)}, not as {' or '.join(sorted(may_be))}: {_words(outcome)}"
    if outcome.event_id != run:
        yield f"its outcome has the event_id {outcome.event_id}, not {run}"
    if told.complete and not told.outcomes:
        yield "its outcome was never told"
    for other in told.outcomes:
        if jobs.encode(other) != jobs.encode(outcome):
            yield f"it was told {_words(other)} while {_words(outcome)} stands"


def _dense(seqs: Sequence[int], outcome: Terminal, told: Told, *, by: str) -> Iterator[str]:
    """An answer's chunks are all there. What ended otherwise has told a beginning of them."""
    if told.ask.kind.wish.delivery == "final":
        if seqs:
            yield f"{len(seqs)} chunks of a final were told"
        return
    whole = outcome.chunks if isinstance(outcome, FinalEvent) else len(seqs)
    if list(seqs) != list(range(whole)):
        missing = sorted(set(range(whole)) - set(seqs))
        yield f"{by} heard {len(seqs)} of {whole} chunks, {missing[:10]} missing"


def _received(told: Told, received: Received, outcome: Terminal, numbered: Mapping[int, bytes]) -> Iterator[str]:
    got = "answered" if received.final is not None else received.error
    if got != kind_of(outcome):
        yield f"the SDK said {got}, {kind_of(outcome)} stands"
    if received.final is not None and jobs.encode(received.final) != jobs.encode(outcome):
        yield "the SDK handed over another response than the one that stands"
    seqs = [seq for seq, _ in received.chunks]
    if seqs != list(range(len(seqs))):
        yield f"the SDK handed over the chunks {seqs[:20]}..."
    if isinstance(outcome, FinalEvent) and told.ask.kind.wish.delivery != "final" and len(seqs) != outcome.chunks:
        yield f"the SDK handed over {len(seqs)} of {outcome.chunks} chunks"
    for seq, body in received.chunks:
        if numbered.get(seq, body) != body:
            yield f"the SDK and a plain consumer heard different chunks under seq {seq}"


def _content(told: Told, chunks: Sequence[bytes], outcome: Terminal, answer: Answer) -> Iterator[str]:
    """It is what an undisturbed line says; of what ended otherwise, what was told is a beginning of that."""
    sent = {int(SUBMITTED_AT)} if told.received is None else told.received.submitted_at
    response = bytes(outcome.response) if isinstance(outcome, FinalEvent) else None
    for body in (*chunks, *([] if response is None else [response])):
        said: dict[str, Any] = msgspec.json.decode(body)
        if "created" in said and said["created"] not in sent:
            yield f"created is {said['created']}, the request was sent at {sent}"
            break
    if response is not None and timeless(response) != answer.response:
        yield f"the response is {response.decode()}, an undisturbed line says {answer.response}"
    if told.ask.kind.wish.delivery == "final":
        return
    for index, told_chunks in by_choice(chunks).items():
        wanted = answer.chunks.get(index, [])
        if response is None:
            wanted = wanted[: len(told_chunks)]
        elif told.received is None and not told.complete:
            continue
        if told_chunks != wanted:
            yield f"the chunks of choice {index} are not those of an undisturbed line"


def _words(outcome: Terminal) -> str:
    return kind_of(outcome) if isinstance(outcome, FinalEvent) else f"{outcome.code} ({bytes(outcome.error).decode()})"
