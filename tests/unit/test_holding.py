"""What a worker holds: finished in time, or handed over as a whole, the store away or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import BrokerUnavailable, ClaimAnswer, ClaimRequest, Delivery, Message
from headrace.protocol import jobs
from headrace.protocol.jobs import DerenderJob
from headrace.workers.holding import Holding
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
