"""Every run that a derender worker is given has one outcome, whatever its claim is answered and whatever is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import Append, BrokerUnavailable, Claim, ClaimAnswer, ClaimRequest, TopicMessage
from headrace.protocol import jobs
from headrace.protocol.errors import Cancelled
from headrace.protocol.jobs import Delivery, DerenderJob, ErrorEvent, FinalEvent, GenerateJob
from headrace.workers import runtime
from headrace.workers.derender import beat
from headrace.workers.derender.beat import Facts, verdict
from headrace.workers.derender.telling import InTokens
from headrace.workers.derender.told import Told
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.outcome import End, failed
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, demo_spec, listening, raw, working
from tests.unit.told_runs import IDS, QUEUE, QUICK, SLOW, SUBMITTED_AT, Run, one_outcome, told_as_one, until

DELIVERIES = pytest.mark.parametrize("delivery", ["stream", "tokens", "final"])


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    yield home
    assert await home.broker.queues.depth(QUEUE) == 0
    home.close()


# -------------------------------------------------------------------------------------- what a claim is answered


@DELIVERIES
async def test_a_run_that_was_cancelled_before_anybody_told_it_is_ended_though_nobody_generates_it(
    delivery: Delivery, home: Embedded
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:5])
    await home.broker.runs.cancel(run.name, "enough", 60)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.chunks) == ("cancelled", 5)
    assert await run.append(IDS[5:]) is Append.FENCED


@DELIVERIES
async def test_a_run_whose_deadline_has_passed_is_ended_though_nobody_generates_it(
    delivery: Delivery, home: Embedded
) -> None:
    run = Run(home, "r1", delivery=delivery, deadline=SUBMITTED_AT + 3600)
    await run.begin()
    await run.write(IDS[:5])
    run.record.deadline = SUBMITTED_AT - 1
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.chunks) == ("expired", 5)
    assert await run.append(IDS[5:]) is Append.FENCED


async def test_a_job_of_which_the_store_knows_nothing_is_ended_once_its_deadline_has_passed(home: Embedded) -> None:
    run = Run(home, "r1", deadline=SUBMITTED_AT - 1)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "expired"


async def test_a_run_that_has_its_outcome_is_told_it_again(home: Embedded) -> None:
    run = Run(home, "r1")
    await run.begin()
    await run.write(IDS, ends=True)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        for times in (1, 2, 3):
            await run.submit()
            await client.until(lambda times=times: len(client.outcomes("r1")) == times)  # type: ignore[misc]
        assert isinstance(await one_outcome(client, run), FinalEvent)
    assert len(client.chunks("r1")) == len(IDS)


async def test_a_run_that_another_worker_tells_waits_and_is_told_when_that_one_is_gone(home: Embedded) -> None:
    run, parked = Run(home, "r1"), asyncio.Event()
    await run.begin()
    await run.write(IDS, ends=True)
    assert await run.claimed("another") is ClaimAnswer.NEW
    async with (
        listening(home.broker) as client,
        home.connect() as broker,
        working([DerenderWorker(broker, demo_spec(), terms=QUICK)]),
    ):
        with pytest.MonkeyPatch.context() as patched:
            retry = broker.queues.retry

            async def watched(*args: Any) -> None:
                await retry(*args)
                parked.set()

            patched.setattr(broker.queues, "retry", watched)
            await run.submit()
            async with asyncio.timeout(WAIT_S):
                await parked.wait()
        assert client.heard == {}
        home.shelf.lapse("another")
        assert isinstance(await one_outcome(client, run), FinalEvent)
    assert run.record.holds["derender"].rescues == 1


async def test_a_worker_that_did_not_hear_that_it_has_a_run_takes_it_all_the_same(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_AWAY_S", 0.0)
    run = Run(home, "r1")
    await run.begin()
    await run.write(IDS, ends=True)
    claim, answers = home.broker.runs.claim, list[ClaimAnswer]()

    async def lossy(request: ClaimRequest) -> Claim:
        answer = await claim(request)
        answers.append(answer.answer)
        if len(answers) == 1:
            raise BrokerUnavailable("the answer was lost")
        return answer

    monkeypatch.setattr(home.broker.runs, "claim", lossy)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        assert isinstance(await one_outcome(client, run), FinalEvent)
    assert answers == [ClaimAnswer.NEW, ClaimAnswer.MINE]
    assert len(told_as_one(client)) == len(IDS)


async def test_an_answer_that_is_none_for_a_teller_is_given_up_in_bounded_time(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "backoff", lambda tries: 0.0)
    run = Run(home, "r1")

    async def conflict(request: ClaimRequest) -> Claim:
        return Claim(ClaimAnswer.CONFLICT)

    monkeypatch.setattr(home.broker.runs, "claim", conflict)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "exhausted"


# -------------------------------------------------------------------------------------- while it is told


def told_of(*, deadline: float | None = 100.0, end: bool = False) -> Told:
    job = DerenderJob(client=CLIENT, request_id="r", model="demo", submitted_at=1.0, deadline=deadline)
    source = GenerateJob(**jobs.follow_on(job), request=raw({"token_ids": [1], "sampling_params": {}}))
    told = Told(job, None, 1, InTokens(source))  # type: ignore[arg-type]
    told.end = End() if end else None
    return told


@pytest.mark.parametrize(
    ("told", "facts", "moment", "code"),
    [
        (told_of(), Facts(), 99.9, None),
        (told_of(), Facts(), 100.0, "expired"),
        (told_of(deadline=None), Facts(), 1e12, None),
        (told_of(), Facts(cancelled="enough"), 0.0, "cancelled"),
        (told_of(), Facts(cancelled="enough", there=False), 100.0, "cancelled"),
        (told_of(), Facts(there=False), 0.0, "stream_lost"),
        (told_of(end=True), Facts(there=False), 0.0, None),
        (told_of(end=True), Facts(), 100.0, "expired"),
        (told_of(end=True), Facts(cancelled="enough"), 0.0, "cancelled"),
    ],
)
def test_what_ends_a_run_besides_its_log(told: Told, facts: Facts, moment: float, code: str | None) -> None:
    error = verdict(told, facts, moment)
    assert (None if error is None else failed(told.job, error).code) == code


@DELIVERIES
@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_a_run_nobody_generates_any_more_is_told_until_it_is_cancelled_or_late(
    why: str, delivery: Delivery, home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:5])
    home.shelf.lapse("generator-0")
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=QUICK)]):
        await run.submit()
        await client.until(lambda: len(client.heard.get("r1", [])) >= (1 if delivery == "final" else 5))
        assert run.record.outcome is None
        if why == "cancelled":
            assert not await home.broker.runs.cancel(run.name, "enough", 60)
        else:
            monkeypatch.setattr(beat, "now", lambda: (run.job.deadline or 0.0) + 1)
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.chunks) == (why, 5)
    assert await run.append(IDS[5:]) is Append.FENCED


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_a_run_is_ended_though_its_chunks_cannot_be_sent(
    why: str, home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stuck, go_on = Run(home, "r1"), asyncio.Event(), asyncio.Event()
    await run.begin()
    await run.write(IDS, ends=True)
    publish = home.broker.topics.publish

    async def slow(messages: Sequence[TopicMessage]) -> None:
        if not messages[0].durable:
            stuck.set()
            await go_on.wait()
        await publish(messages)

    monkeypatch.setattr(home.broker.topics, "publish", slow)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=QUICK)]):
        await run.submit()
        async with asyncio.timeout(WAIT_S):
            await stuck.wait()
        if why == "cancelled":
            await home.broker.runs.cancel(run.name, "enough", 60)
        else:
            monkeypatch.setattr(beat, "now", lambda: (run.job.deadline or 0.0) + 1)
        outcome = await one_outcome(client, run)
        go_on.set()
        await client.until(lambda: len(client.chunks("r1")) == len(IDS))
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.chunks) == (why, len(IDS))
    assert len(client.outcomes("r1")) == 1


async def test_the_outcome_that_is_first_stands_also_where_a_teller_finds_its_run_cancelled(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(home, "r1")
    await run.begin()
    await run.write(IDS[:5])
    first = jobs.encode(failed(run.job, Cancelled("by another"), chunks=5))
    outcome = home.broker.runs.outcome

    async def second(name: str, event: bytes, replay_ttl: float) -> bytes:
        await outcome(name, first, replay_ttl)
        return await outcome(name, event, replay_ttl)

    monkeypatch.setattr(home.broker.runs, "outcome", second)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=QUICK)]):
        await run.submit()
        await client.until(lambda: len(client.chunks("r1")) == 5)
        await home.broker.runs.cancel(run.name, "enough", 60)
        await one_outcome(client, run)
    assert run.record.outcome == first


async def test_a_delivery_held_too_long_is_delivered_anew_and_its_run_goes_on(home: Embedded) -> None:
    terms = Terms(heartbeat=0.06, consumer_timeout=0.01)
    run = Run(home, "r1")
    await run.begin()
    async with (
        listening(home.broker) as client,
        home.connect() as broker,
        working([worker := DerenderWorker(broker, demo_spec(), terms=terms)]),
    ):
        await run.submit()
        for start in range(0, 15, 5):
            await run.write(IDS[start : start + 5])
            await client.until(lambda start=start: len(client.chunks("r1")) >= start + 5)  # type: ignore[misc]
            told = worker._told.get(run.name)
            assert told is not None
            old = told.delivery

            async def renewed(old: object = old, told: Told = told) -> bool:
                return told.delivery is not old

            await until(renewed)
        await run.write(IDS[15:], ends=True)
        assert isinstance(await one_outcome(client, run), FinalEvent)
    assert [event.seq for event in client.chunks("r1")] == list(range(len(IDS)))
    assert (run.record.holds["derender"].epoch, run.record.holds["derender"].attempts) == (1, 0)
