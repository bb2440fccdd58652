"""What a derender worker has told is not told again by whoever takes its runs over, and nothing is left out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.entries import Position, advance
from headrace.broker.ports import (
    Append,
    Broker,
    BrokerUnavailable,
    Checkpoint,
    ClaimAnswer,
    ClaimRequest,
    Message,
    TopicMessage,
)
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, Delivery, DerenderJob, ErrorEvent, FinalEvent, GenerateJob
from headrace.protocol.wire import TokenChoice, TokenChunk, Usage
from headrace.workers.derender import checkpoint
from headrace.workers.derender import worker as worker_module
from headrace.workers.derender.checkpoint import Checkpoints
from headrace.workers.derender.telling import InTokens
from headrace.workers.derender.told import Told
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.follow import Follower
from headrace.workers.generate.writer import Writing
from headrace.workers.outcome import End
from headrace.workers.runtime import serve
from tests.line import CLIENT, WAIT_S, Listener, demo_spec, listening, raw, working

QUEUE = "derender.demo"
IDS = [31, 5, 2, 77, 1500, 12, 300, 301, 302, 9, 9, 410, 33, 35, 36, 37, 38, 39, 40, 41]


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    yield home
    home.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round is followed by a checkpoint of each run that it told something of."""
    monkeypatch.setattr(checkpoint, "EVERY_CHUNKS", 1)


class Run:
    """A run whose log a test writes, as its generate worker would."""

    def __init__(self, home: Embedded, request_id: str, *, delivery: Delivery = "stream") -> None:
        who: dict[str, Any] = {"client": CLIENT, "request_id": request_id, "model": "demo", "delivery": delivery}
        request = raw({"token_ids": [5, 6, 7], "sampling_params": {}})
        asked = raw({"messages": [{"role": "user", "content": "Hi"}]})
        job = GenerateJob(**who, request=request, endpoint="/v1/chat/completions", source=asked)
        self.job = jobs.stamp(job, time.time())
        self.home = home
        self._position = Position()
        self._tokens: list[int] = []

    async def begin(self) -> None:
        """Claims the run under a new epoch; whoever had it before is dead."""
        self.home.shelf.lapse(f"generator-{self._position.epoch - 1}")
        claim = await self.home.broker.runs.claim(
            ClaimRequest(
                self.job.run,
                "generate",
                f"generator-{self._position.epoch}",
                jobs.digest_of(self.job),
                deadline=self.job.deadline or 0.0,
                replay_ttl=60,
                heartbeat=60,
                job=jobs.encode(self.job),
            )
        )
        assert claim.answer is ClaimAnswer.NEW
        self._position = Position(claim.epoch, 0)

    async def submit(self) -> None:
        derender = DerenderJob(**jobs.follow_on(self.job), endpoint=self.job.endpoint)
        await self.home.broker.queues.publish(QUEUE, Message(jobs.encode(derender), self.job.request_id))

    async def write(self, ids: Sequence[int], *, ends: bool = False) -> None:
        running = Follower().running
        for token in self._tokens:
            running = advance(running, 0, [token])
        writing = Writing(self.job.run, after=self._position, chunks=len(self._tokens), running=running)
        chunks = [TokenChunk("r", [TokenChoice(0, token_ids=[token])]) for token in ids]
        writing.add(chunks, End(Usage(3, 3 + len(IDS), len(IDS))) if ends else None)
        batch = writing.batch()
        (appended,) = await self.home.broker.log.append([batch])
        assert appended.answer is Append.STORED
        self._position = batch.last
        self._tokens += ids

    async def saved(self, chunks: int) -> None:
        """Returns once a checkpoint says that so many chunks were told."""
        async with asyncio.timeout(WAIT_S):
            while True:
                state = await self.home.broker.runs.load(self.job.run)
                if state is not None and json.loads(state)["chunks"] == chunks:
                    return
                await asyncio.sleep(0)


class Mortal(DerenderWorker):
    """A worker that may be killed: it hands nothing over."""

    async def _hand_over(self) -> None:
        pass


@asynccontextmanager
async def killed_after(home: Embedded) -> AsyncIterator[Broker]:
    """A worker at work, until it is killed; yields its connection."""
    async with home.connect() as broker:
        worker, ready = Mortal(broker, demo_spec(), heartbeat=60), asyncio.Event()
        working = asyncio.create_task(serve([worker], stop=asyncio.Event(), ready=ready, grace=0.0))
        await ready.wait()
        try:
            yield broker
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    home.shelf.lapse(worker.name)


def seqs(client: Listener, request_id: str) -> list[int]:
    return [event.seq for event in client.chunks(request_id)]


async def undisturbed(delivery: Delivery) -> tuple[list[bytes], bytes]:
    """The chunks and the response of the run if one worker tells it."""
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    run = Run(home, "r1", delivery=delivery)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec())]):
        await run.begin()
        await run.write(IDS, ends=True)
        await run.submit()
        outcome = await client.outcome("r1")
        assert isinstance(outcome, FinalEvent)
    home.close()
    return [bytes(event.chunk) for event in client.chunks("r1")], without_time(bytes(outcome.response))


def without_time(response: bytes) -> bytes:
    return json.dumps(json.loads(response) | {"created": 0}).encode()


def chunks_without_time(events: Sequence[ChunkEvent]) -> list[dict[str, Any]]:
    return [json.loads(bytes(event.chunk)) | {"created": 0} for event in events]


@pytest.mark.parametrize("delivery", ["stream", "tokens"])
async def test_a_run_of_a_killed_worker_goes_on_from_its_checkpoint(
    delivery: Delivery, home: Embedded, at_once: None
) -> None:
    chunks, response = await undisturbed(delivery)
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    async with listening(home.broker) as client:
        for start in (0, 6, 13):
            async with killed_after(home):
                if not start:
                    await run.submit()
                await run.write(IDS[start : start + 6])
                await client.until(lambda start=start: len(client.chunks("r1")) >= start + 6)  # type: ignore[misc]
                await run.saved(start + 6)
            if start == 6:
                await run.begin()  # the generate worker was replaced, too
                await run.write(IDS[12:13])
        await run.write(IDS[19:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            outcome = await client.outcome("r1")
    assert isinstance(outcome, FinalEvent)
    assert seqs(client, "r1") == list(range(len(IDS)))
    assert chunks_without_time(client.chunks("r1")) == [json.loads(chunk) | {"created": 0} for chunk in chunks]
    assert without_time(bytes(outcome.response)) == response


async def test_chunks_after_the_checkpoint_are_told_again_as_they_were(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "EVERY_CHUNKS", 5)
    run = Run(home, "r1")
    await run.begin()
    async with listening(home.broker) as client:
        async with killed_after(home):
            await run.submit()
            for start in (0, 5):
                await run.write(IDS[start : start + 5])
                await run.saved(start + 5)
            await run.write(IDS[10:14])
            await client.until(lambda: len(client.chunks("r1")) == 14)
        await run.write(IDS[14:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            await client.outcome("r1")
    assert seqs(client, "r1") == [*range(14), *range(10, len(IDS))]
    told = {event.seq: bytes(event.chunk) for event in client.chunks("r1")}
    assert all(told[event.seq] == bytes(event.chunk) for event in client.chunks("r1"))


@pytest.mark.parametrize("why", ["another core", "unreadable", "not of this request"])
async def test_a_checkpoint_that_is_of_no_use_has_the_log_told_from_its_start(
    why: str, home: Embedded, at_once: None
) -> None:
    run = Run(home, "r1")
    await run.begin()
    async with listening(home.broker) as client:
        async with killed_after(home):
            await run.submit()
            await run.write(IDS[:10])
            await client.until(lambda: len(client.chunks("r1")) == 10)
            await run.saved(10)
            state = json.loads(await home.broker.runs.load(run.job.run) or b"")
            changes = {"another core": {"core": "older"}, "not of this request": {"telling": {"choices": {"0": 1}}}}
            changed = b"\x00" if why == "unreadable" else json.dumps(state | changes[why]).encode()
            assert await home.broker.runs.save([Checkpoint(run.job.run, 1, changed)]) == [True]
        await run.write(IDS[10:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            assert isinstance(await client.outcome("r1"), FinalEvent)
    assert seqs(client, "r1") == [*range(10), *range(len(IDS))]


@pytest.mark.parametrize("lost", [["log"], ["some of the log"]])
async def test_a_log_that_is_not_the_one_that_was_told_is_a_lost_stream(
    lost: list[str], home: Embedded, at_once: None
) -> None:
    run = Run(home, "r1")
    await run.begin()
    async with listening(home.broker) as client:
        async with killed_after(home):
            await run.submit()
            await run.write(IDS[:10])
            await run.saved(10)
        record = home.shelf.find(run.job.run)
        assert record is not None and record.log is not None
        if lost == ["log"]:
            record.log = None
        else:
            await run.write(IDS[10:], ends=True)
            del record.log[3:5]
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec(), heartbeat=0.06)]):
            outcome = await client.outcome("r1")
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "stream_lost"
    assert outcome.retryable


async def test_a_worker_that_drains_leaves_a_checkpoint_of_all_that_it_told(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "EVERY_S", 1e9)
    tellings = [Run(home, f"r{n}") for n in range(5)]
    async with listening(home.broker) as client:
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())], grace=0.0):
            for run in tellings:
                await run.begin()
                await run.write(IDS[:8])
                await run.submit()
            await client.until(lambda: all(len(seqs(client, f"r{n}")) == 8 for n in range(5)))
        for run in tellings:
            await run.write(IDS[8:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            for n in range(5):
                await client.outcome(f"r{n}")
    assert [seqs(client, f"r{n}") for n in range(5)] == [list(range(len(IDS)))] * 5


async def test_what_could_not_be_sent_before_the_end_is_in_no_checkpoint(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LAST_ROUND_S", 0.01)
    run, stuck = Run(home, "r1"), asyncio.Event()
    await run.begin()

    async def away(messages: Sequence[TopicMessage]) -> None:
        stuck.set()
        raise BrokerUnavailable("away")

    async with listening(home.broker) as client:
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())], grace=0.0):
            await run.submit()
            await run.write(IDS[:4])
            await client.until(lambda: len(client.chunks("r1")) == 4)
            monkeypatch.setattr(broker.topics, "publish", away)
            await run.write(IDS[4:8])
            await stuck.wait()
        await run.write(IDS[8:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            await client.outcome("r1")
    assert set(seqs(client, "r1")) == set(range(len(IDS)))


async def test_a_final_needs_no_checkpoint(home: Embedded, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Told] = []
    monkeypatch.setattr(Checkpoints, "take", lambda self, told, now: taken.append(told))
    run = Run(home, "r1", delivery="final")
    await run.begin()
    await run.write(IDS[:8])
    async with (
        listening(home.broker) as client,
        home.connect() as broker,
        working([DerenderWorker(broker, demo_spec())], grace=0.0),
    ):
        await run.submit()
        await run.write(IDS[8:], ends=True)
        await client.outcome("r1")
    assert taken == []


class Unflushed:
    """Topics whose flush waits to be let go, and a run store that says what is saved."""

    def __init__(self) -> None:
        self.go_on, self.flushing = asyncio.Event(), asyncio.Event()
        self.written: list[list[Checkpoint]] = []
        self.twice = asyncio.Event()

    def via(self, way: str) -> Unflushed:
        return self

    @property
    def runs(self) -> Unflushed:
        return self

    async def flush(self) -> None:
        self.flushing.set()
        await self.go_on.wait()

    async def save(self, checkpoints: Sequence[Checkpoint]) -> list[bool]:
        self.written.append(list(checkpoints))
        if len(self.written) == 2:
            self.twice.set()
        return [True] * len(checkpoints)


async def test_a_checkpoint_is_written_only_once_the_broker_has_what_it_covers() -> None:
    broker, told = Unflushed(), told_of(7)
    checkpoints = Checkpoints(broker)  # type: ignore[arg-type]
    writing = asyncio.create_task(checkpoints.write_on())
    checkpoints.take(told, 0.0)
    async with asyncio.timeout(WAIT_S):
        await broker.flushing.wait()
        for _ in range(3):
            told.follower.chunks += 1
            checkpoints.take(told, 0.0)
        await asyncio.wait((writing,), timeout=0.01)
        assert broker.written == []
        broker.go_on.set()
        await broker.twice.wait()
    writing.cancel()
    assert [[json.loads(one.state)["chunks"] for one in written] for written in broker.written] == [[7], [10]]


def told_of(chunks: int, request_id: str = "r") -> Told:
    job = jobs.stamp(DerenderJob(client=CLIENT, request_id=request_id, model="demo", delivery="tokens"), 1.0)
    source = GenerateJob(**jobs.follow_on(job), request=raw({"token_ids": [1], "sampling_params": {}}))
    told = Told(job, None, 1, InTokens(source))  # type: ignore[arg-type]
    told.follower.chunks = chunks
    return told


def test_a_run_is_saved_every_so_many_chunks() -> None:
    checkpoints, told = Checkpoints(Unflushed()), told_of(0)  # type: ignore[arg-type]
    saved = []
    for _ in range(100):
        told.follower.chunks += 30
        checkpoints.told([told], 0.0)
        saved.append(told.kept_chunks)
    assert sorted(set(saved)) == list(range(0, 3000, 270))
    assert saved == sorted(saved)


def test_a_run_that_goes_on_slowly_is_saved_every_so_many_seconds_and_an_idle_one_is_not() -> None:
    checkpoints, told = Checkpoints(Unflushed()), told_of(0)  # type: ignore[arg-type]
    due: list[float] = []
    for step in range(200):
        now = step * checkpoint.LOOK_S
        told.follower.chunks += step < 100
        before = told.kept_chunks
        checkpoints.look([told], now)
        if told.kept_chunks != before:
            due.append(now)
    assert all(later - earlier == checkpoint.EVERY_S for earlier, later in pairwise(due))
    assert due[0] == checkpoint.EVERY_S
    assert len(due) == 10
    assert told.kept_chunks == told.follower.chunks


def test_one_look_takes_a_bounded_number_and_the_next_ones_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "AT_ONCE", 10)
    tellings = [told_of(0, f"r{n}") for n in range(25)]
    checkpoints = Checkpoints(Unflushed())  # type: ignore[arg-type]
    for told in tellings:
        told.follower.chunks = 1
    checkpoints.look(tellings, 1.0)
    taken = []
    for look in range(5):
        checkpoints.look(tellings, 1.0 + checkpoint.EVERY_S + look * 1e-6)
        taken.append(sum(told.kept_chunks > 0 for told in tellings))
    assert taken == [10, 20, 25, 25, 25]


def test_a_run_whose_state_cannot_be_taken_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(telling: InTokens) -> bytes:
        raise ZeroDivisionError

    checkpoints, told = Checkpoints(Unflushed()), told_of(1000)  # type: ignore[arg-type]
    told.kept_chunks = 0
    monkeypatch.setattr(InTokens, "checkpoint", broken)
    for _ in range(3):
        checkpoints.told([told], 0.0)
    assert told.kept_chunks == 1000
