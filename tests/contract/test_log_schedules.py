"""Whatever three workers do to one run, and whatever is lost on the way, the log stays one dense story."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.contract.stores import Stores, a_run, a_worker, batch, claim, whole
from headrace.broker.entries import Entry, Position
from headrace.broker.ports import Append, ClaimAnswer, Release
from tests.contract.worlds import EmbeddedWorld, RedisWorld
from tests.servers import Redis


@dataclass(frozen=True, slots=True)
class Claiming:
    who: int
    twice: bool = False  # the reply to the first was lost


@dataclass(frozen=True, slots=True)
class Appending:
    who: int
    count: int
    ends: bool
    twice: bool


@dataclass(frozen=True, slots=True)
class Releasing:
    who: int
    how: Release


@dataclass(frozen=True, slots=True)
class Losing:
    who: int
    what: Literal["its life", "its heartbeat"]  # one that lost only its heartbeat goes on as if nothing had happened


@dataclass(frozen=True, slots=True)
class Concluding:
    who: int


@dataclass(frozen=True, slots=True)
class Reading:
    count: int


Step = Claiming | Appending | Releasing | Losing | Concluding | Reading

WHO = st.integers(0, 2)
CLAIMS = st.builds(Claiming, WHO, st.booleans())
APPENDS = st.builds(Appending, WHO, st.integers(1, 3), st.just(False), st.booleans())
LOSSES = st.builds(Losing, WHO, st.sampled_from(("its life", "its heartbeat")))
ENDINGS: st.SearchStrategy[Step] = st.builds(Concluding, WHO) | st.builds(
    Appending, WHO, st.integers(1, 3), st.just(True), st.booleans()
)
USUAL: st.SearchStrategy[Step] = st.one_of(
    CLAIMS,
    CLAIMS,
    APPENDS,
    APPENDS,
    LOSSES,
    st.builds(Releasing, WHO, st.sampled_from(Release)),
    st.builds(Reading, st.integers(1, 4)),
)
SCHEDULES = st.builds(
    lambda before, ending, after: [*before, ending, *after],
    st.lists(USUAL, min_size=10, max_size=60),
    ENDINGS,
    st.lists(USUAL | ENDINGS, max_size=8),
)
"""Mostly life, then an ending, then what comes too late."""


@dataclass(slots=True)
class Worker:
    """What a worker believes."""

    name: str = field(default_factory=a_worker)
    epoch: int = 0
    after: Position = field(default_factory=Position)
    k: int = 1


@dataclass(slots=True)
class Story:
    """One run, who does what to it, and what must be true of it."""

    stores: Stores
    run: str = field(default_factory=a_run)
    workers: list[Worker] = field(default_factory=lambda: [Worker() for _ in range(3)])
    epoch: int = 0
    living_holder: str | None = None
    ended: bool = False
    stored: list[tuple[Position, bytes]] = field(default_factory=list)
    outcomes: list[bytes] = field(default_factory=list)
    heard: list[Entry] = field(default_factory=list)
    serial: Iterator[int] = field(default_factory=itertools.count)

    async def go(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case Claiming():
                    await self.claim(self.workers[step.who], step.twice)
                case Appending():
                    await self.append(self.workers[step.who], step)
                case Releasing():
                    await self.release(self.workers[step.who], step.how)
                case Losing():
                    await self.lose(step)
                case Concluding():
                    event = b"outcome %d" % next(self.serial)
                    self.outcomes.append(await self.stores.runs.outcome(self.run, event, 60.0))
                case Reading():
                    await self.read(step.count)
        await self.check()

    async def claim(self, worker: Worker, twice: bool) -> None:
        answer = ClaimAnswer.NEW
        for _ in range(1 + twice):
            claimed = await claim(self.stores, self.run, worker.name, max_attempts=99, max_rescues=99)
            if claimed.answer is ClaimAnswer.NEW:
                assert answer is ClaimAnswer.NEW and not self.outcomes and not self.ended
                assert claimed.epoch == self.epoch + 1
                assert self.living_holder is None, "a holder is replaced only when it let go or died"
                self.epoch = worker.epoch = claimed.epoch
                worker.after, worker.k = Position(claimed.epoch, 0), claimed.chunks + 1
                self.living_holder = worker.name
            elif claimed.answer is ClaimAnswer.MINE:
                assert claimed.epoch == worker.epoch == self.epoch
                self.living_holder = worker.name
            elif claimed.answer is ClaimAnswer.DONE:
                assert claimed.outcome == self.outcomes[0]
            else:
                assert claimed.answer is (ClaimAnswer.ENDED if self.ended else ClaimAnswer.ALIVE)
            answer = claimed.answer

    async def append(self, worker: Worker, step: Appending) -> None:
        if not worker.epoch:
            return
        by = f"{worker.name} in {worker.epoch}, {next(self.serial)}"
        sent = batch(self.run, worker.after, worker.k, step.count, ends=step.ends, by=by)
        (first, *others) = await self.stores.log.append([sent] * (1 + step.twice))
        if worker.epoch != self.epoch or self.ended or self.outcomes:
            assert {first.answer, *(each.answer for each in others)} == {Append.FENCED}
            worker.epoch = 0
            return
        assert first.answer is Append.STORED
        assert all(each.answer is Append.ALREADY for each in others)
        ks = range(sent.k, sent.k + step.count)
        self.stored += [(Position(worker.epoch, k), entry.payload) for k, entry in zip(ks, sent.entries, strict=True)]
        self.ended = step.ends
        worker.after, worker.k = sent.last, sent.last.k + 1

    async def release(self, worker: Worker, how: Release) -> None:
        if worker.epoch:
            await self.stores.runs.release(self.run, "generate", worker.epoch, how)
            if self.living_holder == worker.name:
                self.living_holder = None
            worker.epoch = 0

    async def lose(self, step: Losing) -> None:
        lost = self.workers[step.who].name
        await self.stores.lapse(lost)
        if self.living_holder == lost:
            self.living_holder = None
        if step.what == "its life":
            self.workers[step.who] = Worker()

    async def read(self, count: int) -> None:
        cursor = self.heard[-1].position if self.heard else Position()
        found = await self.stores.log.read({self.run: cursor}, wait=0, count=count)
        self.heard += found.get(self.run, [])

    async def check(self) -> None:
        entries = await whole(self.stores, self.run)
        begins = [entry.position for entry in entries if entry.kind == "begin"]
        told = [entry for entry in entries if entry.kind != "begin"]
        assert begins == [Position(epoch, 0) for epoch in range(1, self.epoch + 1)]
        assert [entry.position.k for entry in told] == list(range(1, len(told) + 1))
        assert [(entry.position, entry.payload) for entry in told] == self.stored
        assert [entry.position for entry in entries] == sorted(entry.position for entry in entries)
        assert [entry.kind for entry in told if entry.kind == "end"] == ["end"] * self.ended
        assert self.heard == entries[: len(self.heard)]
        for n, entry in enumerate(entries, 1):
            assert await whole(self.stores, self.run, entry.position) == entries[n:]
        assert len(set(self.outcomes)) <= 1
        assert await self.stores.runs.result(self.run) == (self.outcomes[0] if self.outcomes else None)


Connect = Callable[[], AbstractAsyncContextManager[Stores]]


async def tell(connect: Connect, steps: list[Step]) -> None:
    async with connect() as stores:
        await Story(stores).go(steps)


@given(SCHEDULES)
@settings(max_examples=300, deadline=None)
def test_no_schedule_of_three_workers_spoils_an_embedded_log(steps: list[Step]) -> None:
    asyncio.run(tell(EmbeddedWorld.new().connect, steps))


@pytest.mark.servers
@given(SCHEDULES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_schedule_of_three_workers_spoils_a_log_on_redis(redis_db: Redis, steps: list[Step]) -> None:
    asyncio.run(tell(RedisWorld(redis_db.url).connect, steps))
