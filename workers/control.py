"""The control worker: cancels requests wherever they are, passes replays on to those who can tell them, and takes in
what the broker itself has given up on."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.broker.ports import Broker, Delivery, Message, Unroutable
from headrace.protocol import jobs
from headrace.protocol.errors import Cancelled, Exhausted, NotFound
from headrace.protocol.jobs import Cancel, EnvelopeError, Replay
from headrace.workers.outcome import conclude, failed
from headrace.workers.runtime import refuse, take

PREFETCH: Final = 64


class ControlWorker:
    """Consumes ``control`` and ``intake``.

    A run that somebody holds hears of its cancellation from the store; else it ends here.
    """

    def __init__(self, broker: Broker) -> None:
        self.name = "control"
        self._broker = broker

    async def start(self) -> None:
        """Declares the queue."""
        await self._broker.queues.declare([jobs.CONTROL_QUEUE, jobs.INTAKE_QUEUE])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Takes messages until ``stop``; each is short, so all are finished."""
        async with asyncio.TaskGroup() as takers:
            takers.create_task(take(self._broker, jobs.CONTROL_QUEUE, PREFETCH, self._handle, stop))
            takers.create_task(take(self._broker, jobs.INTAKE_QUEUE, PREFETCH, self._take_in, stop))

    async def _handle(self, delivery: Delivery) -> None:
        match jobs.decode(delivery.body):
            case Cancel() as cancel:
                await self._cancel(cancel)
            case Replay() as replay:
                await self._pass_on(replay, delivery)
            case other:
                raise EnvelopeError(f"type: {type(other).__name__} is not for the control queue")
        await self._broker.queues.ack(delivery)

    async def _pass_on(self, replay: Replay, delivery: Delivery) -> None:
        again = Message(delivery.body, replay.request_id, delivery.headers)
        try:
            await self._broker.queues.publish(jobs.queue_of("derender", replay.model), again)
        except Unroutable:
            raise NotFound(f"model: {replay.model!r} is not served here", param="model") from None

    async def _cancel(self, cancel: Cancel) -> None:
        if await self._broker.runs.cancel(cancel.run, cancel.reason, jobs.DEFAULT_DEADLINE_S):
            await conclude(self._broker, failed(cancel, Cancelled(cancel.reason)), to=cancel)

    async def _take_in(self, delivery: Delivery) -> None:
        """A job that came back more often than the broker allows: its client is told, an operator finds it."""
        why = "the broker gave the job up: it came back too often without being settled"
        await refuse(self._broker, delivery, Exhausted(why), bury=True)
