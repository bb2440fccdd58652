"""Where the embedded log and run store keep their runs, until their time is over."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.broker.embedded.lapsing import Lapsing
from headrace.broker.entries import Entry, Position
from headrace.broker.ports import Role
from headrace.protocol.jobs import partition_of

WIDTH_S: Final = 16.0
_PER_ENTRY: Final = 200
_PER_RUN: Final = 2000
"""About how many bytes an entry and a run take besides what is in them."""


@dataclass(slots=True)
class Hold:
    """What is known of one role of a run. No owner: never claimed, or let go of."""

    owner: str = ""
    epoch: int = 0
    attempts: int = 0
    rescues: int = 0


@dataclass(slots=True)
class Run:
    """Everything that is kept of one run. Times are Unix seconds."""

    expires_at: float
    deadline: float | None = None
    digest: str = ""
    holds: dict[Role, Hold] = field(default_factory=dict)
    log: list[Entry] | None = None
    chunks: int = 0
    ended: bool = False
    cancel: str | None = None
    outcome: bytes | None = None
    job: bytes | None = None
    state: bytes | None = None

    def hold(self, role: Role) -> Hold:
        return self.holds.setdefault(role, Hold())

    @property
    def bytes(self) -> int:
        """About how much memory it takes."""
        entries = sum(len(entry.payload) + _PER_ENTRY for entry in self.log or ())
        return _PER_RUN + entries + sum(len(part) for part in (self.outcome, self.job, self.state) if part)


@dataclass(slots=True, eq=False)
class Watch:
    """A reader that waits for something to be added to one of its runs."""

    cursors: Mapping[str, Position]
    rung: asyncio.Future[None]

    def ring(self) -> None:
        if not self.rung.done():
            self.rung.set_result(None)


class Shelf:
    """The runs by name, and when each worker of a partition was last alive.

    Nobody finds a run whose time is over. Its memory is freed within WIDTH_S after that: runs lie in bins by the time
    when that is, so that a call looks at no more than what is due. Finished runs share ``replay_bytes``: the oldest
    go early when there are too many.
    """

    def __init__(self, clock: Callable[[], float], replay_bytes: int) -> None:
        self.clock = clock
        self._room = replay_bytes
        self._finished: dict[str, int] = {}
        self.watches: dict[Watch, None] = {}
        self._runs: dict[str, Run] = {}
        self._alive: dict[int, dict[str, float]] = {}
        self._due: dict[int, set[str]] = {}
        self._bins: list[int] = []
        self.bodies: Lapsing[bytes] = Lapsing(clock)
        self.under_way: Lapsing[int] = Lapsing(clock)
        self.reports: Lapsing[bytes] = Lapsing(clock)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def workers(self) -> int:
        """How many signs of life are kept."""
        return sum(map(len, self._alive.values()))

    def find(self, run: str) -> Run | None:
        """The run, if there is one whose time is not over."""
        record = self._runs.get(run)
        return None if record is None or record.expires_at <= self.clock() else record

    def put(self, run: str, expires_at: float) -> Run:
        """The run, kept until then; made if there is none."""
        self._sweep()
        old = self._runs.get(run)
        if old is not None:
            self._due[_bin(old.expires_at)].discard(run)
        record = self.find(run)
        if record is None:
            self._room += self._finished.pop(run, 0)
            record = self._runs[run] = Run(expires_at)
        record.expires_at = expires_at
        due = _bin(expires_at)
        if due not in self._due:
            self._due[due] = set()
            heapq.heappush(self._bins, due)
        self._due[due].add(run)
        return record

    def finish(self, run: str) -> None:
        """The run has its outcome. The oldest finished ones make room for it."""
        self._finished[run] = self._runs[run].bytes
        self._room -= self._finished[run]
        while self._room < 0 and len(self._finished) > 1:
            self.forget(next(iter(self._finished)))

    def resume(self, run: str) -> None:
        """The run is not finished after all."""
        self._room += self._finished.pop(run, 0)

    def forget(self, run: str) -> None:
        """Forgets all about the run."""
        record = self._runs.pop(run, None)
        if record is not None:
            self._due[_bin(record.expires_at)].discard(run)
            self._room += self._finished.pop(run, 0)

    def show_life(self, run: str, worker: str, heartbeat: float) -> None:
        """The worker is alive, for the runs of this one's partition."""
        now = self.clock()
        alive = self._alive.setdefault(partition_of(run), {})
        for gone in [other for other, till in alive.items() if till <= now]:
            del alive[gone]
        alive[worker] = now + heartbeat

    def lives(self, run: str, worker: str) -> bool:
        """Whether the worker is alive, for the runs of this one's partition."""
        return self._alive.get(partition_of(run), {}).get(worker, 0.0) > self.clock()

    def lapse(self, worker: str) -> None:
        """The worker counts as dead from now on."""
        for alive in self._alive.values():
            alive.pop(worker, None)

    def added(self, run: str) -> None:
        """Rings for every reader of this run."""
        for watch in self.watches:
            if run in watch.cursors:
                watch.ring()

    def _sweep(self) -> None:
        present = _bin(self.clock())
        while self._bins and self._bins[0] < present:
            for run in self._due.pop(heapq.heappop(self._bins)):
                del self._runs[run]
                self._room += self._finished.pop(run, 0)


def _bin(at: float) -> int:
    return int(at // WIDTH_S)
