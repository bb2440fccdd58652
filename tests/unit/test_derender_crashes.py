"""Wherever a derender worker dies, another ends its run: the same chunks under the same numbers, and one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import Broker
from headrace.protocol import jobs
from headrace.protocol.jobs import Delivery, FinalEvent
from headrace.workers.derender import checkpoint
from headrace.workers.derender.worker import DerenderWorker
from tests.line import WAIT_S, demo_spec, listening, working
from tests.unit.told_runs import IDS, QUEUE, SLOW, Run, killed_after, told_as_one, undisturbed


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    yield home
    home.close()


@dataclass(frozen=True)
class Point:
    """Where a worker dies: before a call, or when it is done and the worker has not heard of it."""

    port: str
    verb: str
    done: bool
    late: bool = False
    """Whether the log has its end by then."""

    def halt(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
        """The worker of this connection comes no further; the event says that it is there."""
        port, there = getattr(broker, self.port), asyncio.Event()
        real = getattr(port, self.verb)

        async def call(*args: Any, **named: Any) -> None:
            if self.done:
                await real(*args, **named)
            there.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(port, self.verb, call)
        return there


POINTS = {
    "before the claim": Point("runs", "claim", done=False),
    "after the claim": Point("runs", "claim", done=True),
    "with chunks that are not sent": Point("topics", "publish", done=False),
    "with chunks that are sent": Point("topics", "publish", done=True),
    "with its checkpoint on the way": Point("runs", "save", done=False),
    "with its checkpoint written": Point("runs", "save", done=True),
    "before the outcome": Point("runs", "outcome", done=False, late=True),
    "with an outcome that is not told": Point("runs", "outcome", done=True, late=True),
    "with an outcome that is told": Point("queues", "ack", done=False, late=True),
}


OF_CHUNKS = [where for where, point in POINTS.items() if point.verb in ("publish", "save")]
DELIVERIES: tuple[Delivery, ...] = ("stream", "tokens", "final")
CASES = [
    (delivery, where) for delivery in DELIVERIES for where in POINTS if delivery != "final" or where not in OF_CHUNKS
]
"""Of a final no chunks are told, and no checkpoint is written."""


@pytest.mark.parametrize(("delivery", "where"), CASES)
async def test_another_worker_ends_the_run_of_one_that_died(
    delivery: Delivery, where: str, home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = POINTS[where]
    monkeypatch.setattr(checkpoint, "EVERY_CHUNKS", 1)
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:10])
    async with listening(home.broker) as client:
        async with killed_after(home) as doomed:
            there = point.halt(doomed, monkeypatch)
            if point.late:
                await run.write(IDS[10:], ends=True)
            await run.submit()
            async with asyncio.timeout(WAIT_S):
                await there.wait()
        if not point.late:
            await run.write(IDS[10:], ends=True)
        async with home.connect() as broker, working([DerenderWorker(broker, demo_spec(), terms=SLOW)]):
            outcome = await client.outcome("r1")
        assert await home.broker.queues.depth(QUEUE) == 0
        chunks, response = await undisturbed(delivery)
    assert told_as_one(client) == chunks
    assert isinstance(outcome, FinalEvent)
    assert bytes(outcome.response) == response
    assert {jobs.encode(event) for event in client.outcomes("r1")} == {run.record.outcome}
