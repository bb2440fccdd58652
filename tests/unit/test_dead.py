"""Dead letters that are sent again: what may be, where it goes, and what is left behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from headrace.broker.claim_check import ClaimCheck
from headrace.broker.contract.queues import take
from headrace.broker.embedded import Embedded
from headrace.broker.ports import Broker, Message
from headrace.dead import DeadLetter, NotRedrivable, Wanted, each, letters, purge, redrive
from headrace.protocol import jobs
from headrace.protocol.errors import Exhausted
from headrace.protocol.jobs import DEAD_QUEUE, DerenderJob, GenerateJob, Job
from headrace.workers.outcome import answered, failed
from headrace.workers.runtime import UNVOUCHED
from tests.line import CLIENT, raw, render_job

QUEUES = jobs.queues_of("demo")
ASKED = raw({"token_ids": [1, 2, 3], "sampling_params": {}})


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    home = Embedded()
    bare = home.broker
    broker = replace(bare, queues=ClaimCheck(bare.queues, bare.runs, inline=2_000))
    await broker.queues.declare(QUEUES)
    yield broker
    home.close()


async def bury(broker: Broker, job: Job, queue: str, **headers: str | int | bool) -> None:
    await broker.queues.publish(queue, Message(jobs.encode(job), job.request_id, {"traceparent": "00-ab"}))
    async with broker.queues.consume(queue, 1) as deliveries:
        (delivery,) = await take(deliveries, 1)
        await broker.queues.bury(delivery, "it failed", {"x-headrace-failures": 5, **headers})


async def sent_again(broker: Broker, queue: str, **terms: float) -> Job:
    """Sends the one dead letter again, and takes it from the queue that it should be in."""
    assert await each(broker, Wanted(), lambda letter: redrive(broker, letter, **terms)) == 1
    assert await broker.queues.depth(DEAD_QUEUE) == 0
    async with broker.queues.consume(queue, 1) as deliveries:
        (delivery,) = await take(deliveries, 1)
        assert dict(delivery.headers) == {"traceparent": "00-ab"}
        await broker.queues.ack(delivery)
        job = jobs.decode(delivery.body)
    assert isinstance(job, Job)
    return job


def generate_job(**rest: object) -> GenerateJob:
    return changed(GenerateJob(client=CLIENT, request_id="r1", model="demo", request=ASKED), **rest)


@pytest.mark.parametrize(
    ("job", "origin", "queue"),
    [
        (render_job("r1", {}), "render-low.demo", "render-low.demo"),
        (generate_job(), "generate-high.demo", "generate-high.demo"),
        (generate_job(), "generate-backlog2.demo", "generate.demo"),
        (DerenderJob(client=CLIENT, request_id="r1", model="demo"), "derender.demo", "derender.demo"),
        (generate_job(), "render.demo", "generate.demo"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_a_request_goes_back_to_its_lane(broker: Broker, job: Job, origin: str, queue: str) -> None:
    await bury(broker, job, origin)
    again = await sent_again(broker, queue)
    assert (type(again), again.redrive, again.run) == (type(job), 1, job.run)


async def test_each_time_it_has_as_long_as_it_first_had(broker: Broker) -> None:
    job: Job = generate_job(submitted_at=1_000.0, deadline=1_060.0)
    for n in range(1, 4):
        await bury(broker, job, "generate.demo")
        before = time.time()
        job = await sent_again(broker, "generate.demo")
        assert job.redrive == n
        assert job.deadline is not None
        assert 60 <= job.deadline - before < 61 + (time.time() - before)


async def test_a_run_that_is_only_to_be_told_keeps_the_time_that_stands_in_its_chunks(broker: Broker) -> None:
    job = DerenderJob(client=CLIENT, request_id="r1", model="demo", submitted_at=1_000.0, deadline=1_060.0)
    await bury(broker, job, "derender.demo")
    again = await sent_again(broker, "derender.demo", deadline=30.0)
    assert (again.created, again.submitted_at) == (1_000, 1_000.0)
    assert again.deadline is not None
    assert again.deadline <= time.time() + 30


async def test_what_was_kept_for_a_large_one_goes_with_it(broker: Broker) -> None:
    job = render_job("r1", {"messages": [{"role": "user", "content": "x" * 50_000}]})
    name = jobs.body_name(jobs.encode(job))
    await bury(broker, job, "render.demo")
    assert await broker.runs.get_body(job.run, name) == jobs.encode(job)
    again = await sent_again(broker, "render.demo")
    assert again.redrive == 1
    assert await broker.runs.get_body(job.run, name) is None

    await bury(broker, job, "render.demo")
    assert await each(broker, Wanted(), lambda letter: purge(broker, letter)) == 1
    assert await broker.runs.get_body(job.run, name) is None


async def only(broker: Broker) -> DeadLetter:
    (letter,) = [letter async for letter in letters(broker)]
    return letter


async def refused(broker: Broker, why: str) -> None:
    """The one dead letter cannot be sent again, and stays."""

    async def try_(letter: DeadLetter) -> None:
        with pytest.raises(NotRedrivable, match=why):
            await redrive(broker, letter)

    assert await each(broker, Wanted(), try_) == 1
    assert await broker.queues.depth(DEAD_QUEUE) == 1
    assert [await broker.queues.depth(queue) for queue in QUEUES] == [0] * len(QUEUES)


async def test_one_whose_body_is_gone_is_told_and_stays(broker: Broker) -> None:
    job = render_job("r1", {"messages": [{"role": "user", "content": "x" * 50_000}]})
    await bury(broker, job, "render.demo")
    await broker.runs.drop_body(job.run, jobs.body_name(jobs.encode(job)))
    await refused(broker, "not stored any more")
    told = (await only(broker)).told()
    assert (told["client"], told["model"], told["request_id"]) == (CLIENT, "demo", "r1")


async def test_one_that_another_has_sent_in_a_clients_name_stays(broker: Broker) -> None:
    await bury(broker, generate_job(), "generate.demo", **{UNVOUCHED: True})
    await refused(broker, "another user")


async def test_a_request_that_was_answered_is_not_answered_again(broker: Broker) -> None:
    job = generate_job()
    await broker.runs.outcome(job.run, jobs.encode(answered(job, b"{}", chunks=1)), 60.0)
    await bury(broker, job, "generate.demo")
    await refused(broker, "it has been answered")


async def test_where_nobody_serves_its_model_its_outcome_stands(broker: Broker) -> None:
    await broker.queues.declare(["generate.gone"])
    job = generate_job(model="gone")
    outcome = jobs.encode(failed(job, Exhausted("it failed")))
    await broker.runs.outcome(job.run, outcome, 60.0)
    await bury(broker, changed(job, model="nobody"), "generate.gone")
    await refused(broker, "not served here")
    assert await broker.runs.result(job.run) == outcome


async def test_looking_at_dead_letters_keeps_them_in_order(broker: Broker) -> None:
    for n in range(5):
        await bury(broker, changed(generate_job(), request_id=f"r{n}"), "generate.demo")

    async def nothing(_: DeadLetter) -> None:
        pass

    assert await each(broker, Wanted(), nothing, limit=2) == 2
    assert [letter.request_id async for letter in letters(broker)] == [f"r{n}" for n in range(5)]
    assert [letter.request_id async for letter in letters(broker)] == [f"r{n}" for n in range(5)]
