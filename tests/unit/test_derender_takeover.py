"""What a derender worker has told is not told again by whoever takes its runs over, and nothing is left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import BrokerUnavailable, Checkpoint, TopicMessage
from headrace.protocol import jobs
from headrace.protocol.jobs import Delivery, DerenderJob, ErrorEvent, FinalEvent, GenerateJob
from headrace.workers.derender import checkpoint
from headrace.workers.derender import worker as worker_module
from headrace.workers.derender.checkpoint import Checkpoints
from headrace.workers.derender.telling import InTokens
from headrace.workers.derender.told import Told
from headrace.workers.derender.worker import DerenderWorker
from tests.line import CLIENT, WAIT_S, demo_spec, listening, raw, working
from tests.unit.told_runs import IDS, QUEUE, QUICK, Run, killed_after, seqs, told_as_one, undisturbed


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
    assert seqs(client) == list(range(len(IDS)))
    assert told_as_one(client) == chunks
    assert bytes(outcome.response) == response


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
    assert seqs(client) == [*range(14), *range(10, len(IDS))]
    assert told_as_one(client) == (await undisturbed("stream"))[0]


def changed(**fields: object) -> Callable[[bytes], bytes]:
    return lambda state: json.dumps(json.loads(state) | fields).encode()


BROKEN: dict[str, Callable[[bytes], bytes | None]] = {
    "of another core": changed(core="older", k=3, chunks=3),
    "of another run": changed(run="0" * 32),
    "that is no state of a chat": changed(telling={"choices": {"0": 1}}),
    "that is truncated": lambda state: state[: len(state) // 2],
    "that is no JSON": lambda state: b"\x00",
    "that is lost": lambda state: None,
}


@pytest.mark.parametrize("why", BROKEN)
@pytest.mark.parametrize("delivery", ["stream", "tokens"])
async def test_a_checkpoint_of_no_use_has_the_log_told_from_its_start_with_the_same_chunks(
    why: str, delivery: Delivery, home: Embedded, at_once: None
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    async with listening(home.broker) as client:
        async with killed_after(home):
            await run.submit()
            await run.write(IDS[:10])
            await run.saved(10)
            await client.until(lambda: len(client.chunks("r1")) == 10)
        assert run.record.state is not None
        run.record.state = BROKEN[why](run.record.state)
        await run.write(IDS[10:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            outcome = await client.outcome("r1")
    chunks, response = await undisturbed(delivery)
    in_tokens = (
        delivery == "tokens" and why == "that is no state of a chat"
    )  # tokens pass as they are: no state is used
    assert seqs(client) == [*range(10), *range(10 if in_tokens else 0, len(IDS))]
    assert told_as_one(client) == chunks
    assert isinstance(outcome, FinalEvent)
    assert bytes(outcome.response) == response


async def test_a_worker_of_another_version_tells_what_one_of_this_version_would_have_told(
    home: Embedded, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(home, "r1")
    await run.begin()
    async with listening(home.broker) as client:
        for start, core in ((0, "older"), (7, "newer"), (14, "older")):
            monkeypatch.setattr(checkpoint, "CORE", core)
            async with killed_after(home):
                if not start:
                    await run.submit()
                await run.write(IDS[start : start + 7], ends=start == 14)
                if start < 14:
                    await run.saved(start + 7)
                else:
                    outcome = await client.outcome("r1")
    chunks, response = await undisturbed("stream")
    assert seqs(client) == [*range(7), *range(14), *range(len(IDS))]
    assert told_as_one(client) == chunks
    assert isinstance(outcome, FinalEvent)
    assert bytes(outcome.response) == response


async def test_a_telling_that_failed_is_tried_again_without_the_checkpoint(home: Embedded, at_once: None) -> None:
    run = Run(home, "r1")
    await run.begin()
    async with listening(home.broker) as client:
        async with killed_after(home):
            await run.submit()
            await run.write(IDS[:10])
            await run.saved(10)
        run.record.holds["derender"].attempts = 1
        await run.write(IDS[10:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec())]):
            await client.outcome("r1")
    assert seqs(client)[-len(IDS) :] == list(range(len(IDS)))


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
        if lost == ["log"]:
            run.record.log = None
        else:
            await run.write(IDS[10:], ends=True)
            assert run.record.log is not None
            del run.record.log[3:5]
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec(), terms=QUICK)]):
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
