"""What a worker holds: finished in time, or handed over as a whole, the store away or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import BrokerUnavailable, ClaimAnswer, ClaimRequest, Delivery, HeaderValue, Message
from headrace.protocol import jobs
from headrace.protocol.jobs import DerenderJob
from headrace.workers.holding import BEGUN, Holding
from headrace.workers.terms import Terms
from tests.line import CLIENT

QUEUE = "derender.demo"
RUNS = 5


@dataclass
class Held:
    job: DerenderJob
    delivery: Delivery
    epoch: int


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    yield home
    home.close()


def claim(run: str, worker: str) -> ClaimRequest:
    return ClaimRequest(run, "derender", worker, "digest", deadline=2e9, replay_ttl=60, heartbeat=60)


async def held_by(home: Embedded, worker: str) -> Holding[Held]:
    holding: Holding[Held] = Holding(home.broker, "derender", worker)
    async with home.broker.queues.consume(QUEUE, RUNS) as deliveries:
        for number in range(RUNS):
            job = DerenderJob(client=CLIENT, request_id=f"r{number}", model="demo")
            await home.broker.queues.publish(QUEUE, Message(jobs.encode(job)))
            taken = await home.broker.runs.claim(claim(job.run, worker))
            holding.add(Held(job, await anext(deliveries), taken.epoch))
    return holding


async def test_what_is_handed_over_is_free_for_another_at_once(home: Embedded) -> None:
    holding = await held_by(home, "one")
    runs = holding.runs()
    await holding.hand_over()
    assert len(holding) == 0
    assert await home.broker.queues.depth(QUEUE) == RUNS
    answers = [(await home.broker.runs.claim(claim(run, "two"))) for run in runs]
    assert {(answer.answer, answer.attempts, answer.rescues) for answer in answers} == {(ClaimAnswer.NEW, 0, 0)}


async def test_without_the_store_the_deliveries_go_back_all_the_same_and_together(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = await held_by(home, "one")
    everybody = asyncio.Barrier(RUNS)

    async def away(*_: object) -> None:
        await everybody.wait()  # passes only if all of them are asked for at once
        raise BrokerUnavailable("away")

    monkeypatch.setattr(home.broker.runs, "release", away)
    async with asyncio.timeout(5):
        await holding.hand_over()
    assert await home.broker.queues.depth(QUEUE) == RUNS


async def test_waiting_ends_with_the_last_run_or_with_the_grace(home: Embedded) -> None:
    holding = await held_by(home, "one")
    await holding.finished(0.0)
    assert len(holding) == RUNS
    waiting = asyncio.create_task(holding.finished(60.0))
    for held in holding:
        assert not waiting.done()
        holding.drop(held)
        holding.drop(held)
    async with asyncio.timeout(5):
        await waiting


async def test_a_delivery_that_came_again_stands_for_the_run(home: Embedded) -> None:
    holding = await held_by(home, "one")
    (held, *_) = holding
    old = held.delivery
    await home.broker.queues.publish(QUEUE, Message(old.body))
    async with home.broker.queues.consume(QUEUE, 1) as deliveries:
        again = await anext(deliveries)
    await holding.adopt(held, again)
    assert held.delivery is again
    await holding.hand_over()
    assert await home.broker.queues.depth(QUEUE) == RUNS


async def test_a_delivery_is_renewed_after_half_of_the_time_that_it_was_held_and_once_for_each_half(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[str] = []

    async def retry(delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue]) -> None:
        assert headers[BEGUN]
        renewed.append(delivery.request_id)

    monkeypatch.setattr(home.broker.queues, "retry", retry)
    holding: Holding[Held] = Holding(
        home.broker, "derender", "one", terms=Terms(consumer_timeout=100.0), clock=lambda: 1000.0
    )
    for name, since in (("long", 970.0), ("new", None)):
        job = DerenderJob(client=CLIENT, request_id=name, model="demo")
        holding.add(Held(job, Delivery(QUEUE, b"", name, {}, redelivered=False, token=name), 1), since)
    heard = []
    for moment in (1019.0, 1020.0, 1049.0, 1050.0, 1069.0, 1070.0):
        await holding.renew(moment)
        heard.append(list(renewed))
        renewed.clear()
    assert heard == [[], ["long"], [], ["new"], [], ["long"]]


async def test_a_worker_that_ends_while_a_copy_is_on_its_way_loses_nothing(home: Embedded) -> None:
    holding = await held_by(home, "one")
    runs = holding.runs()
    await holding.renew(2e9)
    await holding.hand_over()
    async with asyncio.timeout(20), home.broker.queues.consume(QUEUE, RUNS) as deliveries:
        found = [jobs.decode((await anext(deliveries)).body) for _ in range(RUNS)]
    assert sorted(job.run for job in found) == sorted(runs)
    assert await home.broker.queues.depth(QUEUE) == 0
    answers = {(await home.broker.runs.claim(claim(run, "two"))).answer for run in runs}
    assert answers == {ClaimAnswer.NEW}


async def test_what_cannot_be_renewed_now_is_at_the_next_look(home: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    holding = await held_by(home, "one")
    retry, away = home.broker.queues.retry, True

    async def sometimes(delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue]) -> None:
        if away:
            raise BrokerUnavailable("away")
        await retry(delivery, 0.0, headers)

    monkeypatch.setattr(home.broker.queues, "retry", sometimes)
    await holding.renew(2e9)
    away = False
    await holding.renew(2e9)
    async with asyncio.timeout(20), home.broker.queues.consume(QUEUE, RUNS) as deliveries:
        for _ in range(RUNS):
            again = await anext(deliveries)
            (held,) = [each for each in holding if each.job == jobs.decode(again.body)]
            await holding.adopt(held, again)
    assert len(holding) == RUNS
    assert await home.broker.queues.depth(QUEUE) == 0
