"""What a soak owes: every request's one outcome, and what was heard of it. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, ErrorEvent, Event, FinalEvent, Terminal

SHOWN: Final = 20
"""Broken promises that are kept in words; all are counted."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What an undisturbed line answers: of one choice the chunks by seq, where chunks are told; and the response."""

    chunks: Sequence[object]
    response: object


@dataclass(slots=True)
class Account:
    """One request. ``seen`` has bit s set where the chunk s was told to a plain consumer."""

    expected: Expected
    outcome: int = 0
    """Fingerprint of its outcome's JSON, 0 while there is none."""
    told: bool = False
    """Whether a plain consumer heard of the outcome."""
    seen: int = 0
    handed_over: bool = False


@dataclass(slots=True)
class Counts:
    requests: int = 0
    outcomes: int = 0
    told_again: int = 0
    """Outcomes that a plain consumer heard of once more: at least once is what it is promised."""
    chunks: int = 0
    chunks_again: int = 0
    doubled: int = 0
    """Second outcomes that are others than the first, and requests that the SDK handed over twice."""
    wrong: int = 0


@dataclass(slots=True)
class Book:
    """Accounts by run. ``broken`` is the first of the broken promises in words."""

    accounts: dict[str, Account] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    broken: list[str] = field(default_factory=list)

    def owe(self, client: str, request_id: str, expected: Expected) -> None:
        """From now on this request is owed its outcome."""
        self.accounts[jobs.run_of(client, request_id)] = Account(expected)
        self.counts.requests += 1

    def heard(self, event: Event) -> bool:
        """Takes in what a plain consumer heard. True for the first outcome of a request."""
        account = self.accounts.get(event.run)
        if account is None:
            self._wrong(event.request_id, "it was never sent, and there is an event of it")
            return False
        match event:
            case ChunkEvent():
                self._chunk(account, event)
            case FinalEvent() | ErrorEvent():
                first, account.told = not account.told, True
                self._outcome(account, event)
                self.counts.told_again += not first
                return first
        return False

    def handed_over(self, client: str, request_id: str, final: FinalEvent | None, error: Exception | None) -> None:
        """Takes in what the SDK handed to its user."""
        account = self.accounts[jobs.run_of(client, request_id)]
        if account.handed_over:
            self._doubled(request_id, "the SDK handed it over twice")
        account.handed_over = True
        if final is None:
            self._wrong(request_id, f"it ended as {type(error).__name__}: {error}")
        else:
            self._outcome(account, final)

    def lost(self) -> list[str]:
        """Requests whose outcome, or one of whose chunks, a plain consumer has not heard."""
        return [
            run
            for run, account in self.accounts.items()
            if not account.told or account.seen != (1 << len(account.expected.chunks)) - 1
        ]

    def _chunk(self, account: Account, event: ChunkEvent) -> None:
        self.counts.chunks += 1
        bit = 1 << event.seq
        if account.seen & bit:
            self.counts.chunks_again += 1
        account.seen |= bit
        expected = account.expected.chunks
        if event.seq >= len(expected) or bare(bytes(event.chunk)) != expected[event.seq]:
            self._wrong(event.request_id, f"chunk {event.seq} is {bytes(event.chunk).decode()}")

    def _outcome(self, account: Account, event: Terminal) -> None:
        """The first stands; any other must be the same."""
        fingerprint = hash(jobs.encode(event)) or 1
        if account.outcome:
            if fingerprint != account.outcome:
                self._doubled(event.request_id, f"another outcome came: {jobs.encode(event).decode()[:300]}")
            return
        account.outcome = fingerprint
        self.counts.outcomes += 1
        if event.event_id != event.run:
            self._wrong(event.request_id, f"its outcome has the event_id {event.event_id}")
        if isinstance(event, ErrorEvent):
            self._wrong(event.request_id, f"it ended as {event.code}: {bytes(event.error).decode()[:300]}")
        elif bare(bytes(event.response)) != account.expected.response:
            self._wrong(event.request_id, f"the response is {bytes(event.response).decode()[:300]}")

    def _wrong(self, request_id: str, what: str) -> None:
        self.counts.wrong += 1
        self._say(request_id, what)

    def _doubled(self, request_id: str, what: str) -> None:
        self.counts.doubled += 1
        self._say(request_id, what)

    def _say(self, request_id: str, what: str) -> None:
        if len(self.broken) < SHOWN:
            self.broken.append(f"{request_id}: {what}")


def bare(body: bytes) -> object:
    """A chunk or a response without what names the request and the second in which it was sent."""
    said = msgspec.json.decode(body)
    if isinstance(said, dict):
        for name in ("id", "created", "request_id"):
            said.pop(name, None)
    return said


def in_order(chunks: Mapping[int, Sequence[object]]) -> Iterator[object]:
    """The chunks of a request with one choice."""
    (only,) = chunks.values()
    for chunk in only:
        yield bare(msgspec.json.encode(chunk))
