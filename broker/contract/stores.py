"""What the contract tests of TokenLog and RunStore need besides the two ports: a clock, and ways to lose things."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from headrace.broker.entries import SEED, Entry, NewEntry, Position
from headrace.broker.ports import (
    Append,
    Appended,
    Batch,
    Checkpoint,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Role,
    RunStore,
    TokenLog,
)
from headrace.protocol.jobs import run_of

BEFORE_ALL: Final = Position()


class Stores(Protocol):
    """One process's connection to the two ports, and what a test may do to the store behind them."""

    @property
    def log(self) -> TokenLog: ...

    @property
    def runs(self) -> RunStore: ...

    async def now(self) -> float:
        """The store's own clock, Unix seconds."""

    async def elapse(self, seconds: float) -> None:
        """Returns when the store's clock has gone on by that much."""

    async def lapse(self, worker: str) -> None:
        """The worker's heartbeat runs out now: it counts as dead."""

    async def lose_log(self, run: str) -> None:
        """The run's log is gone, and nothing else."""

    async def lose_all(self, run: str) -> None:
        """Everything of the run is gone, as after the loss of acknowledged writes."""


class StoresContract(ABC):
    """Each call of ``connect`` is one more process on the same store."""

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[Stores]:
        """Connects; leaving the context closes the connection."""


def a_run() -> str:
    """A run that no other test knows."""
    return run_of("contract", uuid.uuid4().hex)


def a_worker() -> str:
    """A worker that no other test knows."""
    return f"worker-{uuid.uuid4().hex[:12]}"


async def claim(
    stores: Stores,
    run: str,
    worker: str,
    role: Role = "generate",
    *,
    digest: str = "digest",
    lifetime: float = 60.0,
    replay_ttl: float = 60.0,
    heartbeat: float = 30.0,
    redelivered: bool = False,
    job: bytes | None = None,
    max_attempts: int = 5,
    max_rescues: int = 3,
    suspect_after: int = 2,
    trial: bool = True,
) -> Claim:
    """Claims a run whose deadline is ``lifetime`` seconds from now."""
    return await stores.runs.claim(
        ClaimRequest(
            run,
            role,
            worker,
            digest,
            deadline=await stores.now() + lifetime,
            replay_ttl=replay_ttl,
            heartbeat=heartbeat,
            redelivered=redelivered,
            job=job,
            max_attempts=max_attempts,
            max_rescues=max_rescues,
            suspect_after=suspect_after,
            trial=trial,
        )
    )


async def taken(stores: Stores, run: str, worker: str, role: Role = "generate") -> Claim:
    """The claim of a run that is free."""
    claimed = await claim(stores, run, worker, role)
    assert claimed.answer is ClaimAnswer.NEW, claimed
    return claimed


async def save(stores: Stores, run: str, epoch: int, state: bytes) -> list[bool]:
    """What became of one checkpoint."""
    return await stores.runs.save([Checkpoint(run, epoch, state)])


def payload(k: int, by: str = "") -> bytes:
    return b'{"k":%d,"by":"%s"}' % (k, by.encode())


def batch(run: str, after: Position, k: int, count: int = 1, *, ends: bool = False, by: str = "") -> Batch:
    """``count`` entries from k on, each with its own payload; with ``ends`` the last is the end."""
    entries = [NewEntry("chunk", payload(n, by), SEED ^ n) for n in range(k, k + count)]
    if ends:
        entries[-1] = NewEntry("end", entries[-1].payload, entries[-1].before)
    return Batch(run, after, k, entries)


async def append(stores: Stores, one: Batch) -> Append:
    """What became of one batch."""
    (appended,) = await stores.log.append([one])
    return appended.answer


async def whole(stores: Stores, run: str, after: Position = BEFORE_ALL) -> list[Entry]:
    """Everything in the log after a position."""
    found: list[Entry] = []
    while more := (await stores.log.read({run: found[-1].position if found else after}, wait=0)).get(run):
        found += more
    return found


def places(entries: Iterable[Entry]) -> list[str]:
    """Kind and id of each entry, such as ``chunk 1-2``."""
    return [f"{entry.kind} {entry.position}" for entry in entries]


def answers(appended: Iterable[Appended]) -> list[Append]:
    return [each.answer for each in appended]
