"""What the workers hold when a run comes back, ends elsewhere, or cannot be told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.entries import Position, advance
from headrace.broker.ports import (
    Append,
    Appended,
    Broker,
    ClaimAnswer,
    ClaimRequest,
    Message,
    MessageTooLarge,
    QueueFull,
    Release,
    Role,
    TopicMessage,
)
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.errors import Cancelled
from headrace.protocol.jobs import DerenderJob, ErrorEvent, FinalEvent, GenerateJob
from headrace.protocol.wire import TokenChoice, TokenChunk
from headrace.workers import runtime
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.follow import Follower, read_all
from headrace.workers.generate.engine import Admission
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.generate.writer import LogWriter, Writing
from headrace.workers.outcome import End, failed
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, listening, raw, roles, working
from tests.line import demo_spec as spec

GENERATE, DERENDER = "generate.demo", "derender.demo"
WANTED = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "ignore_eos": True, "seed": 3}}


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([GENERATE, DERENDER])
    yield home
    home.close()


def job_of(request_id: str) -> GenerateJob:
    job = GenerateJob(client=CLIENT, request_id=request_id, model="demo", delivery="tokens", request=raw(WANTED))
    return jobs.stamp(job, time.time())


def derender_job(job: GenerateJob) -> DerenderJob:
    return DerenderJob(**jobs.follow_on(job), endpoint=job.endpoint)


async def claimed(broker: Broker, job: GenerateJob, worker: str, *, role: Role = "generate") -> int:
    """The epoch under which a worker now has the job's run."""
    asked = job if role == "generate" else derender_job(job)
    claim = await broker.runs.claim(
        ClaimRequest(
            job.run,
            role,
            worker,
            jobs.digest_of(asked),
            deadline=job.deadline or 0.0,
            replay_ttl=60,
            heartbeat=60,
            job=jobs.encode(job),
        )
    )
    assert claim.answer is ClaimAnswer.NEW
    return claim.epoch


def chunk_of(token: int) -> TokenChunk:
    return TokenChunk(request_id="x", choices=[TokenChoice(index=0, token_ids=[token])])


def writing_of(job: GenerateJob, epoch: int, before: Sequence[int], tokens: Sequence[int]) -> Writing:
    """What a worker under this epoch writes after the tokens before."""
    running = Follower().running
    for token in before:
        running = advance(running, 0, [token])
    writing = Writing(job.run, after=Position(epoch, 0), chunks=len(before), running=running)
    writing.add([chunk_of(token) for token in tokens])
    return writing


async def undisturbed(job: GenerateJob) -> list[int]:
    engine = NullEngine(NullSettings())
    engine.admit(Admission(job.run, GenerateRequest.model_validate(WANTED)))
    tokens: list[int] = []
    while True:
        for output in await engine.step():
            tokens += [token for chunk in output.chunks for token in chunk.choices[0].token_ids or ()]
            if output.end is not None:
                return tokens


async def until_there(broker: Broker, run: str, position: Position) -> None:
    """Returns once the log has an entry at or after the position."""
    at = Position()
    async with asyncio.timeout(WAIT_S):
        while at < position:
            for entry in (await broker.log.read({run: at}, wait=1.0)).get(run, ()):
                at = entry.position


class Watched(NullEngine):
    """Says when a run is admitted the second time."""

    def __init__(self, again: asyncio.Event, held: Callable[[float], Awaitable[None]]) -> None:
        super().__init__(NullSettings(tokens_per_second=50), sleep=held)
        self._again = again
        self._admitted = 0

    def admit(self, admission: Admission) -> None:
        self._admitted += 1
        if self._admitted == 2:
            self._again.set()
        super().admit(admission)


async def test_a_run_that_left_and_came_back_goes_on_from_its_log_not_from_what_the_engine_still_had(
    home: Embedded,
) -> None:
    go_on, again = asyncio.Event(), asyncio.Event()

    async def held(seconds: float) -> None:
        await go_on.wait()

    job = job_of("r1")
    tokens = await undisturbed(job)
    message = Message(jobs.encode(job), "r1")
    async with home.connect() as broker:
        worker = GenerateWorker(broker, spec(), engine=Watched(again, held), terms=Terms(heartbeat=60))
        async with working([worker]):
            await home.broker.queues.publish(GENERATE, message)
            await until_there(broker, job.run, Position(1, 1))
            home.shelf.lapse(worker.name)
            epoch = await claimed(home.broker, job, "another")
            batch = writing_of(job, epoch, tokens[:1], tokens[1:4]).batch()
            assert [told.answer for told in await home.broker.log.append([batch])] == [Append.STORED]
            await home.broker.runs.release(job.run, "generate", epoch, Release.HANDOVER)
            await home.broker.queues.publish(GENERATE, message)
            async with asyncio.timeout(WAIT_S):
                await again.wait()
            go_on.set()
            await until_there(broker, job.run, Position(epoch + 1, len(tokens) + 1))
    written = [chunk for _, chunk in await read_all(home.broker.log, job.run, Follower()) if chunk is not None]
    assert [token for chunk in written for token in chunk.choices[0].token_ids or ()] == tokens
    assert await home.broker.queues.depth(GENERATE) == 0


async def test_a_run_that_could_not_be_passed_on_is_free_for_another_worker(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, parked = job_of("r1"), asyncio.Event()

    async def full(*_: object) -> None:
        raise QueueFull("no room")

    async def retry(*_: object) -> None:
        parked.set()

    async with home.connect() as broker:
        monkeypatch.setattr(broker.queues, "publish", full)
        monkeypatch.setattr(broker.queues, "retry", retry)
        async with working([GenerateWorker(broker, spec(), engine=NullEngine(), terms=Terms(heartbeat=60))]):
            await home.broker.queues.publish(GENERATE, Message(jobs.encode(job), "r1"))
            async with asyncio.timeout(WAIT_S):
                await parked.wait()
            assert await claimed(home.broker, job, "another") == 2


async def test_an_answer_is_that_of_the_epoch_that_wrote_and_of_no_later_one_of_the_run(home: Embedded) -> None:
    job = job_of("r1")
    first = await claimed(home.broker, job, "one")
    await home.broker.runs.release(job.run, "generate", first, Release.HANDOVER)
    second = await claimed(home.broker, job, "one")
    old, new = writing_of(job, first, [], []), writing_of(job, second, [], [])
    answers: dict[Writing, Append] = {}

    def answered(writing: Writing, appended: Appended, ended: bool) -> None:
        answers[writing] = appended.answer

    writer = LogWriter(home.broker.log, answered)
    for writing in (old, new):
        writer.add(writing, [chunk_of(1)])
    writer.close()
    await writer.run()
    assert answers == {old: Append.FENCED, new: Append.STORED}


async def derendering(home: Embedded, job: GenerateJob) -> None:
    """Publishes the run's derender job."""
    await home.broker.queues.publish(DERENDER, Message(jobs.encode(derender_job(job)), job.request_id))


async def test_a_run_whose_outcome_was_written_elsewhere_is_told_and_let_go(home: Embedded) -> None:
    job = job_of("r1")
    epoch = await claimed(home.broker, job, "gone")
    async with (
        listening(home.broker) as client,
        home.connect() as broker,
        working([DerenderWorker(broker, spec(), terms=Terms(heartbeat=0.06))]),
    ):
        await derendering(home, job)
        await home.broker.log.append([writing_of(job, epoch, [], [1]).batch()])
        await client.until(lambda: bool(client.chunks("r1")))
        await home.broker.runs.outcome(job.run, jobs.encode(failed(job, Cancelled("enough"))), 60)
        outcome = await client.outcome("r1")
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "cancelled"
    assert await home.broker.queues.depth(DERENDER) == 0


async def test_a_derender_job_that_comes_again_under_a_new_epoch_is_held_once(home: Embedded) -> None:
    job = job_of("r1")
    epoch = await claimed(home.broker, job, "gone")
    await home.broker.log.append([writing_of(job, epoch, [], [1]).batch()])
    async with listening(home.broker) as client, home.connect() as broker:
        worker = DerenderWorker(broker, spec(), terms=Terms(heartbeat=60))
        async with working([worker], grace=0.0):
            await derendering(home, job)
            await client.until(lambda: len(client.chunks("r1")) == 1)
            home.shelf.lapse(worker.name)
            epoch = await claimed(home.broker, job, "another", role="derender")
            await home.broker.runs.release(job.run, "derender", epoch, Release.HANDOVER)
            await derendering(home, job)
            await client.until(lambda: len(client.chunks("r1")) == 2)
        assert await home.broker.queues.depth(DERENDER) == 1  # handed over; nothing else is held
    assert await home.broker.queues.depth(DERENDER) == 1


async def test_a_run_that_cannot_be_told_is_given_up_and_its_neighbours_are_told(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "backoff", lambda tries: 0.0)
    bad = job_of("bad")
    epoch = await claimed(home.broker, bad, "gone")
    batch = writing_of(bad, epoch, [], [1])
    batch.pending = [type(entry)(entry.kind, b"[]", entry.before) for entry in batch.pending]
    await home.broker.log.append([batch.batch()])
    async with listening(home.broker) as client, working(roles(home.broker)):
        await derendering(home, bad)
        await client.generate("good")
        assert isinstance(await client.outcome("good"), FinalEvent)
        outcome = await client.outcome("bad")
        await client.generate("later")
        assert isinstance(await client.outcome("later"), FinalEvent)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "exhausted"


@pytest.mark.parametrize("wide", [1, 1000])
async def test_chunks_that_are_too_large_together_are_told_one_by_one_and_one_too_large_by_itself_in_parts(
    home: Embedded, monkeypatch: pytest.MonkeyPatch, wide: int
) -> None:
    publish = home.broker.topics.publish

    async def limited(messages: Sequence[TopicMessage]) -> None:
        if any(len(message.body) > 2500 for message in messages):
            raise MessageTooLarge("over 2500 bytes", 2500)
        await publish(messages)

    monkeypatch.setattr(home.broker.topics, "publish", limited)
    job = job_of("r1")
    writing = writing_of(job, await claimed(home.broker, job, "gone"), [], [1] * 20)
    writing.add([TokenChunk(request_id="x", choices=[TokenChoice(index=0, token_ids=[100] * wide)])])
    writing.add([chunk_of(1)], End())
    await home.broker.log.append([writing.batch()])
    async with listening(home.broker) as client, working(roles(home.broker)):
        await derendering(home, job)
        await client.outcome("r1")
    told = client.chunks("r1")
    assert [event.seq for event in told] == list(range(22))
    assert json.loads(bytes(told[20].chunk))["choices"][0]["token_ids"] == [100] * wide
    assert client.parted == (2 if wide == 1000 else 0)


async def test_a_run_that_took_down_its_tellers_is_given_up_and_told_so(home: Embedded) -> None:
    job = job_of("deadly")
    await claimed(home.broker, job, "generator")
    for teller in ("one", "two", "three", "four"):
        await claimed(home.broker, job, teller, role="derender")
        home.shelf.lapse(teller)
    await home.broker.queues.publish(DERENDER, Message(jobs.encode(derender_job(job))))
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, spec())]):
        outcome = await client.outcome("deadly")
        async with asyncio.timeout(WAIT_S), home.broker.queues.consume(jobs.DEAD_QUEUE, 1) as dead:
            assert jobs.decode((await anext(dead)).body) == derender_job(job)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "exhausted"
