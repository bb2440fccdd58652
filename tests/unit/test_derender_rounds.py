"""Rounds are bounded and fair: a backlog holds up nobody, and everything is told once and in order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.embedded import Embedded
from headrace.broker.embedded.log import EmbeddedLog, entries_of
from headrace.broker.embedded.shelf import Shelf
from headrace.broker.entries import Entry, Position
from headrace.broker.ports import TopicMessage
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, DerenderJob, GenerateJob
from headrace.protocol.wire import TokenChoice, TokenChunk
from headrace.workers.derender import rounds
from headrace.workers.derender.checkpoint import Checkpoints
from headrace.workers.derender.rounds import Rounds
from headrace.workers.derender.telling import InTokens
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower
from headrace.workers.generate.writer import Writing
from headrace.workers.holding import Holding
from headrace.workers.outcome import End
from tests.line import CLIENT, WAIT_S, raw

PER_RUN, PER_ROUND, PER_TURN = 8, 64, 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PER_RUN", PER_RUN), ("PER_ROUND", PER_ROUND), ("PER_TURN", PER_TURN)):
        monkeypatch.setattr(rounds, name, value)


class Read(NamedTuple):
    runs: list[str]
    count: int
    found: int


class Log(EmbeddedLog):
    """A log of which a test says what is in it; it remembers how it was read."""

    def __init__(self) -> None:
        super().__init__(Shelf(lambda: 0.0, 0))
        self.left: dict[str, list[Entry]] = {}
        self.reads: list[Read] = []
        self.meanwhile: Callable[[], None] | None = None
        """Done once, while the next read is under way that finds something."""
        self._news = asyncio.Event()

    def put(self, run: str, entries: Sequence[Entry]) -> None:
        self.left.setdefault(run, []).extend(entries)
        self._news.set()

    async def read(self, cursors: Mapping[str, Position], *, wait: float, count: int = 64) -> dict[str, list[Entry]]:
        while True:
            found = {run: new[:count] for run in cursors if (new := self._after(run, cursors[run]))}
            self.reads.append(Read(list(cursors), count, sum(map(len, found.values()))))
            await asyncio.sleep(0)
            if found and self.meanwhile is not None:
                self.meanwhile()
                self.meanwhile = None
            if found or wait <= 0:
                return found
            self._news.clear()
            await self._news.wait()

    def _after(self, run: str, cursor: Position) -> list[Entry]:
        return [entry for entry in self.left.get(run, ()) if entry.position > cursor]

    def wake(self) -> None:
        self._news.set()


class Teller:
    """Rounds at work on such a log. ``heard`` has the seqs of each run in the order in which they came."""

    def __init__(self, home: Embedded) -> None:
        self.log = Log()
        self.broker = replace(home.broker, log=self.log)
        self.held: Holding[Told] = Holding(self.broker, "derender", "w")
        ticks = itertools.count()
        self.rounds = Rounds(
            self.broker, self.held, Checkpoints(self.broker), self._over, pause=0.0, clock=lambda: next(ticks) * 1e-3
        )
        self.heard: dict[str, list[int]] = {}
        self.over: dict[str, int] = {}
        self.changed = asyncio.Condition()

    def _over(self, told: Told) -> None:
        assert told.lost is None
        self.over[told.job.request_id] = len(self.log.reads)
        self.held.drop(told)
        self.rounds.leave(told.job.run)

    def begin(self, request_id: str) -> str:
        job = DerenderJob(client=CLIENT, request_id=request_id, model="demo", delivery="tokens", submitted_at=1.0)
        source = GenerateJob(**jobs.follow_on(job), request=raw({"token_ids": [1], "sampling_params": {}}))
        told = Told(job, None, 1, InTokens(source))  # type: ignore[arg-type]
        told.follower = Follower(Position(1, 0))
        self.held.add(told)
        self.rounds.follow(told)
        return job.run

    async def listen(self, messages: AsyncIterator[TopicMessage]) -> None:
        async for message in messages:
            async with self.changed:
                for event in jobs.decode_events(message.body):
                    assert isinstance(event, ChunkEvent)
                    self.heard.setdefault(event.request_id, []).append(event.seq)
                self.changed.notify_all()

    async def until_heard(self, **wanted: int) -> None:
        """Returns once so many chunks of each request were heard."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: all(len(self.heard.get(id, ())) >= n for id, n in wanted.items()))


@asynccontextmanager
async def telling() -> AsyncIterator[Teller]:
    home = Embedded()
    teller = Teller(home)
    async with home.broker.topics.subscribe(f"{CLIENT}.#") as messages:
        tasks = [asyncio.create_task(teller.listen(messages)), asyncio.create_task(teller.rounds.go_on())]
        try:
            yield teller
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    home.close()


def log_of(count: int, *, ends: bool = False) -> list[Entry]:
    writing = Writing("r", after=Position(1, 0), chunks=0, running=Follower().running)
    chunks = [TokenChunk("r", [TokenChoice(0, token_ids=[n])]) for n in range(count)]
    writing.add(chunks, End() if ends else None)
    return entries_of(writing.batch())


LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=40)


@given(lengths=LENGTHS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_everything_is_told_once_and_in_order_in_bounded_rounds(lengths: list[int]) -> None:
    async with telling() as teller:
        for n, length in enumerate(lengths):
            teller.log.put(teller.begin(f"r{n}"), log_of(length, ends=True))
        async with asyncio.timeout(WAIT_S):
            await teller.held.finished(WAIT_S)
            await teller.until_heard(**{f"r{n}": length for n, length in enumerate(lengths)})
        reads = teller.log.reads
    assert teller.heard == {f"r{n}": list(range(length)) for n, length in enumerate(lengths) if length}
    assert all(read.found <= max(PER_ROUND, len(read.runs)) for read in reads)
    assert all(read.count <= PER_RUN for read in reads)


async def test_a_run_with_news_is_told_between_the_turns_of_those_that_are_behind() -> None:
    async with telling() as teller:
        for n in range(30):
            teller.log.put(teller.begin(f"r{n}"), log_of(200))
        quick = teller.begin("quick")
        await teller.until_heard(r29=8)
        assert len(teller.heard["r0"]) < 200
        before = len(teller.log.reads)
        teller.log.put(quick, log_of(1, ends=True))
        await teller.until_heard(quick=1)
        assert teller.over["quick"] - before <= 3
        assert min(len(teller.heard[f"r{n}"]) for n in range(30)) < 200


async def test_those_that_are_behind_take_turns() -> None:
    async with telling() as teller:
        for n in range(20):
            teller.log.put(teller.begin(f"r{n}"), log_of(400))
        await teller.until_heard(r0=200)
        done = sorted(len(teller.heard.get(f"r{n}", ())) for n in range(20))
    assert done[-1] - done[0] <= 2 * PER_RUN


async def test_a_backlog_of_many_runs_is_read_some_runs_at_a_time() -> None:
    async with telling() as teller:
        for n in range(50):
            teller.log.put(teller.begin(f"r{n}"), log_of(100, ends=True))
        async with asyncio.timeout(WAIT_S):
            await teller.held.finished(WAIT_S)
        reads = [read for read in teller.log.reads if read.found]
    full = [read for read in reads if read.count == PER_RUN]
    assert len(full) > 0.9 * len(reads)
    assert all(len(read.runs) <= PER_ROUND // PER_RUN for read in full)


async def test_a_run_that_is_dropped_while_it_is_behind_is_not_read_any_more() -> None:
    async with telling() as teller:
        run = teller.begin("r0")
        teller.log.put(run, log_of(400))
        await teller.until_heard(r0=16)
        told = teller.held.get(run)
        assert told is not None
        teller.held.drop(told)
        teller.rounds.leave(run)
        teller.log.put(teller.begin("r1"), log_of(40))
        await teller.until_heard(r1=40)
        assert run not in teller.log.reads[-1].runs
    assert len(teller.heard["r0"]) < 400


async def test_what_was_read_for_a_run_that_has_begun_anew_meanwhile_is_not_taken_for_it() -> None:
    async with telling() as teller:
        run = teller.begin("r0")
        teller.log.put(run, log_of(4))
        await teller.until_heard(r0=4)

        def begin_anew() -> None:
            told = teller.held.get(run)
            assert told is not None
            teller.held.drop(told)
            teller.rounds.leave(run)
            teller.begin("r0")

        teller.log.meanwhile = begin_anew
        teller.log.put(run, log_of(7, ends=True)[4:])
        await teller.until_heard(r0=11)
    assert teller.heard["r0"] == [*range(4), *range(7)]


async def test_the_last_round_is_the_last() -> None:
    async with telling() as teller:
        run = teller.begin("r0")
        teller.log.put(run, log_of(8))
        await teller.until_heard(r0=8)
        teller.rounds.end()
        for _ in range(10):
            await asyncio.sleep(0)
        reads = len(teller.log.reads)
        teller.log.put(run, log_of(16)[8:])
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(teller.log.reads) == reads
        assert teller.rounds.unsent == ()
