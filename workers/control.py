"""The control worker: cancels requests wherever they are, passes replays on to those who can tell them, and takes in
what the broker itself has given up on."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.broker.ports import Broker, Delivery, Message, Unroutable
from headrace.protocol import jobs
from headrace.protocol.errors import Cancelled, DeadlineExceeded, Exhausted, NotFound
from headrace.protocol.jobs import Cancel, EnvelopeError, GenerateJob, Job, Replay
from headrace.workers.outcome import conclude, failed, tell
from headrace.workers.probe import probe
from headrace.workers.runtime import now, refuse, take
from headrace.workers.terms import DEFAULT_TERMS, Terms

PREFETCH: Final = 64


class ControlWorker:
    """Consumes ``control`` and ``intake``.

    A run that somebody holds hears of its cancellation from the store; else it ends here.
    """

    def __init__(self, broker: Broker, *, terms: Terms = DEFAULT_TERMS) -> None:
        self.name = "control"
        self._broker = broker
        self._terms = terms

    async def start(self) -> None:
        """Declares the queue."""
        await self._broker.queues.declare([jobs.CONTROL_QUEUE, jobs.INTAKE_QUEUE])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Takes messages until ``stop``; each is short, so all are finished."""
        async with asyncio.TaskGroup() as takers:
            takers.create_task(take(self._broker, jobs.CONTROL_QUEUE, PREFETCH, self._handle, stop, terms=self._terms))
            takers.create_task(take(self._broker, jobs.INTAKE_QUEUE, PREFETCH, self._take_in, stop, terms=self._terms))

    async def _handle(self, delivery: Delivery) -> None:
        probe("control.taken")
        match jobs.decode(delivery.body):
            case Cancel() as cancel:
                await self._cancel(cancel)
            case Replay() as replay:
                await self._pass_on(replay, delivery)
            case other:
                raise EnvelopeError(f"type: {type(other).__name__} is not for the control queue")
        probe("control.before_ack")
        await self._broker.queues.ack(delivery)

    async def _pass_on(self, replay: Replay, delivery: Delivery) -> None:
        again = Message(delivery.body, replay.request_id, delivery.headers)
        try:
            await self._broker.queues.publish(jobs.replays_of(replay.model), again)
        except Unroutable:
            raise NotFound(f"model: {replay.model!r} is not served here", param="model") from None

    async def _cancel(self, cancel: Cancel) -> None:
        """Where nobody holds the run, its outcome is written here, and told to whoever cancels and to whoever listens
        for it: those may be two. It is kept for as long as the job may still lie in a queue."""
        runs = self._broker.runs
        if not await runs.cancel(cancel.run, cancel.reason, jobs.DEFAULT_DEADLINE_S):
            stands = await runs.result(cancel.run)  # an earlier delivery of this message may have died before it told
            if stands is not None:
                await tell(self._broker, stands, to=cancel)
            return
        probe("control.cancelled")
        kept = await runs.job(cancel.run)
        job = None if kept is None else jobs.decode(kept)
        reason = Cancelled(cancel.reason)
        if isinstance(job, GenerateJob):
            left = max(0.0, (job.deadline or 0.0) - now())
            await conclude(self._broker, failed(job, reason), to=job, replay_ttl=left + job.replay_ttl)
            if (job.topic, job.via) == (cancel.topic, cancel.via):
                return
        await conclude(self._broker, failed(cancel, reason), to=cancel, replay_ttl=jobs.DEFAULT_DEADLINE_S)

    async def _take_in(self, delivery: Delivery) -> None:
        """A job that the broker gave up: its client is told. One that came back too often an operator finds."""
        probe("intake.taken")
        if delivery.gave_up == "expired" or (delivery.gave_up is None and _is_late(delivery.body)):
            late = DeadlineExceeded("deadline: it passed before a worker took the request", param="deadline")
            await refuse(self._broker, delivery, late, bury=False)
            return
        why = f"the broker gave the job up ({delivery.gave_up or 'no reason given'}): it came back too often unsettled"
        await refuse(self._broker, delivery, Exhausted(why), bury=True)


def _is_late(body: bytes) -> bool:
    """Of a job that is taken in for the second time the broker does not say any more why it gave it up."""
    try:
        job = jobs.decode(body)
    except EnvelopeError:
        return False
    return isinstance(job, Job) and job.deadline is not None and job.deadline <= now()
