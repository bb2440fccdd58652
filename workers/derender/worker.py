"""The derender worker: follows the logs of many runs at once and tells each to its client.

Every entry of a log becomes one chunk event under the entry's own number. What is told is a pure function of the log:
a worker that takes over goes on from the last checkpoint, or tells the same chunks again under the same numbers. The
outcome is written once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Final

from headrace.broker.ports import Broker, BrokerError, Claim, ClaimAnswer, ClaimRequest, Delivery, Release
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import Cancelled, HeadraceError
from headrace.protocol.jobs import DerenderJob, EnvelopeError, GenerateJob, ProgressEvent, Replay
from headrace.workers.derender import checkpoint
from headrace.workers.derender.beat import Beat, late
from headrace.workers.derender.checkpoint import Checkpoints
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.endings import Endings
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.replay import source_of, tell_again
from headrace.workers.derender.rounds import Rounds
from headrace.workers.derender.sending import Messages, send
from headrace.workers.derender.telling import telling_of
from headrace.workers.derender.told import Told
from headrace.workers.holding import Holding
from headrace.workers.models import ModelSpec
from headrace.workers.probe import probe
from headrace.workers.runtime import guarded, now, take, worker_name
from headrace.workers.terms import DEFAULT_TERMS, Terms

log = get_logger()

PREFETCH: Final = 4096
"""Runs that one worker tells at a time."""
REPLAYS: Final = 2
"""Replays that one worker tells at a time: each keeps the event loop about as long as a round does."""
LAST_ROUND_S: Final = 2.0
"""How long a worker that leaves waits for what it is just telling."""


class DerenderWorker:
    """Consumes ``derender.<model>``; one task reads all logs in rounds and publishes what they say. Replays have a
    queue of their own, so that no number of them keeps a run from being taken."""

    def __init__(self, broker: Broker, spec: ModelSpec, *, terms: Terms = DEFAULT_TERMS) -> None:
        self.name = worker_name("derender")
        self._broker = broker
        self._spec = spec
        self._terms = terms
        self._queue = jobs.queue_of("derender", spec.name)
        self._replays = jobs.replays_of(spec.name)
        self._told: Holding[Told] = Holding(broker, "derender", self.name, terms=terms)
        self._checkpoints = Checkpoints(broker)
        self._rounds = Rounds(broker, self._told, self._checkpoints, self._settle, pause=terms.beat)
        self._beat = Beat(broker, self.name, spec.name, self._told, self._rounds, self._settle, terms)
        self._endings = Endings(broker, terms)
        self._claiming: set[str] = set()
        self._trying: str | None = None
        """The one run of those here that may be what its last holders died of."""
        self._derenderer: Derenderer
        self._tasks: asyncio.TaskGroup
        self._stop: asyncio.Event

    async def start(self) -> None:
        """Loads the tokenizer and the formats."""
        spec = self._spec
        self._derenderer = await asyncio.to_thread(
            Derenderer.load,
            spec.path,
            tool_parser=spec.tool_parser,
            reasoning_parser=spec.reasoning_parser,
            formats=spec.formats,
            max_model_len=spec.model_len(),
        )
        await self._broker.queues.declare([self._queue, self._replays])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Tells until ``stop``, then for ``grace`` seconds what is under way, and hands the rest over."""
        self._stop = stop
        try:
            async with asyncio.TaskGroup() as self._tasks:
                reading = self._tasks.create_task(self._rounds.go_on())
                chores = (self._beat.go_on(), self._sign_on(), self._checkpoints.write_on(), self._let_go_at_stop())
                others = [self._tasks.create_task(chore) for chore in chores]
                async with asyncio.TaskGroup() as taking:
                    serve = partial(take, self._broker, stop=stop, terms=self._terms)
                    taking.create_task(serve(self._queue, PREFETCH, self._handle))
                    taking.create_task(serve(self._replays, REPLAYS, self._tell_again))
                await self._told.finished(grace)
                self._rounds.end()
                await asyncio.wait((reading,), timeout=LAST_ROUND_S)
                for task in (reading, *others):
                    task.cancel()
        finally:
            await self._hand_over()

    async def _hand_over(self) -> None:
        """Lets go of all runs, with a checkpoint of each that was told as far as its telling has come."""
        unsent, now = set(self._rounds.unsent), time.monotonic()
        for told in self._told:
            if told.resumable and told not in unsent:
                self._checkpoints.take(told, now)
        await self._checkpoints.write()
        await self._told.hand_over()

    # ------------------------------------------------------------------------------------------ taking a job

    async def _handle(self, delivery: Delivery) -> None:
        probe("derender.taken")
        match jobs.decode(delivery.body):
            case DerenderJob() as job:
                since = now()
                if not await self._room() or job.run in self._claiming:
                    await self._park(delivery)
                    return
                self._claiming.add(job.run)
                try:
                    await self._claim(jobs.stamp(job, since), delivery, since)
                finally:
                    self._claiming.discard(job.run)
                    self._end_trial(job.run)
            case Replay():
                await self._broker.queues.move(delivery, self._replays)
            case other:
                raise EnvelopeError(f"type: {type(other).__name__} is not for a derender queue")

    async def _room(self) -> bool:
        """Waits while the worker is too far behind to take more. False: it will not be soon, or is about to leave."""
        if self._stop.is_set() or self._beat.in_time.is_set():
            return not self._stop.is_set()
        try:
            async with asyncio.timeout(self._terms.consumer_timeout / 2):
                await self._beat.in_time.wait()
        except TimeoutError:
            return False
        return not self._stop.is_set()

    async def _let_go_at_stop(self) -> None:
        await self._stop.wait()
        self._beat.in_time.set()

    async def _claim(self, job: DerenderJob, delivery: Delivery, since: float) -> None:
        claim = await self._asked(job, delivery)
        match claim.answer:
            case ClaimAnswer.MINE if (told := self._told.get(job.run)) is not None:
                await self._told.adopt(told, delivery)
            case ClaimAnswer.NEW | ClaimAnswer.MINE:
                await self._begin(job, delivery, claim, since)
            case ClaimAnswer.DONE:
                assert claim.outcome is not None, "a run that is done has its outcome"
                await self._endings.pass_on(job, delivery, claim.outcome)
            case ClaimAnswer.CANCELLED:
                reason = Cancelled(claim.reason or "cancelled")
                await self._endings.fail(job, delivery, reason, chunks=claim.chunks)
            case ClaimAnswer.EXPIRED:
                await self._endings.fail(job, delivery, late(), chunks=claim.chunks)
            case ClaimAnswer.EXHAUSTED:
                await self._endings.give_up(job, delivery, claim)
            case ClaimAnswer.ALIVE | ClaimAnswer.SUSPECT:
                await self._park(delivery)
            case other:
                raise AssertionError(f"{other} is no answer for a derender worker")

    async def _asked(self, job: DerenderJob, delivery: Delivery) -> Claim:
        """The answer to a claim. A suspect is taken only while no other one is being tried here."""
        request = ClaimRequest(
            run=job.run,
            role="derender",
            worker=self.name,
            digest=jobs.digest_of(job),
            deadline=job.deadline or 0.0,
            replay_ttl=job.replay_ttl,
            heartbeat=self._terms.heartbeat,
            max_attempts=self._terms.max_attempts,
            max_rescues=self._terms.max_rescues,
            redelivered=delivery.redelivered,
            trial=False,
        )
        claim = await self._broker.runs.claim(request)
        if claim.answer is ClaimAnswer.SUSPECT and self._trying is None:
            self._trying = job.run
            claim = await self._broker.runs.claim(replace(request, trial=True))
        return claim

    async def _begin(self, job: DerenderJob, delivery: Delivery, claim: Claim, since: float) -> None:
        probe("derender.claimed")
        stale = self._told.get(job.run)
        if stale is not None:  # others had the run meanwhile: what this worker knows of it may not be so any more
            self._forget(stale)
            await self._broker.queues.ack(stale.delivery)
        try:
            source = source_of(claim.job)
            told = None if source is None else await self._opened(job, delivery, claim, source)
        except Exception as error:  # the job will be tried again by anyone: who gets it must find the run free
            ours = isinstance(error, BrokerError | EnvelopeError)  # not the run's fault: no attempt is used
            how = Release.HANDOVER if ours else Release.FAILED
            await self._broker.runs.release(job.run, "derender", claim.epoch, how)
            raise
        if told is None:
            await self._endings.lost(job, delivery, claim.epoch, chunks=0)
            return
        if claim.trial:
            self._trying = job.run
        self._told.add(told, since)
        self._rounds.follow(told)

    async def _opened(self, job: DerenderJob, delivery: Delivery, claim: Claim, source: GenerateJob) -> Told:
        """The run as the last checkpoint of whoever told it before has it; else from its start."""
        if claim.epoch > 1 or claim.answer is ClaimAnswer.MINE:
            state = await self._broker.runs.load(job.run)
            saved = None if state is None or claim.attempts else checkpoint.read(state, job.run)
            if saved is not None:
                try:
                    telling = telling_of(self._derenderer, source, bytes(saved.telling))
                    log.info("run.resumed", request_id=job.request_id, epoch=claim.epoch, chunks=saved.chunks)
                    return Told(job, delivery, claim.epoch, telling, saved.follower())
                except (ValueError, HeadraceError) as error:
                    log.warning("checkpoint.unusable", request_id=job.request_id, error=str(error))
        return Told(job, delivery, claim.epoch, telling_of(self._derenderer, source))

    async def _park(self, delivery: Delivery) -> None:
        await self._broker.queues.retry(delivery, self._terms.beat)

    async def _tell_again(self, delivery: Delivery) -> None:
        match jobs.decode(delivery.body):
            case Replay() as replay:
                await tell_again(self._broker, self._derenderer, replay)
                await self._broker.queues.ack(delivery)
            case other:
                raise EnvelopeError(f"type: {type(other).__name__} is not for a replay queue")

    # ------------------------------------------------------------------------------------------ letting go of a run

    def _settle(self, told: Told, outcome: bytes | None = None) -> None:
        """Tells the outcome of a run that is over, written here if there is none, beside the reading of the others."""
        if self._told.get(told.job.run) is not told:
            return  # its end was found in its log and by a beat: once is enough
        self._forget(told)

        async def settle(delivery: Delivery) -> None:
            if outcome is None:
                await self._endings.conclude(told)
            else:
                await self._endings.pass_on(told.job, delivery, outcome)

        self._tasks.create_task(guarded(self._broker, told.delivery, settle))

    def _forget(self, told: Told) -> None:
        self._told.drop(told)
        self._rounds.leave(told.job.run)
        self._end_trial(told.job.run)

    def _end_trial(self, run: str) -> None:
        if self._trying == run and self._told.get(run) is None:
            self._trying = None

    # ------------------------------------------------------------------------------------------ signs of life

    async def _sign_on(self) -> None:
        """What needs RabbitMQ once a beat, apart from the beat itself, which must not wait for it."""
        while True:
            await asyncio.sleep(self._terms.beat)
            try:
                await self._told.renew(now())
                await send(self._broker, self._progress())
            except BrokerError as away:
                log.warning("topics.away", worker=self.name, error=str(away))

    def _progress(self) -> Messages:
        """Signs of life of the runs whose clients hear of no chunks."""
        outbox = Outbox()
        for told in self._told:
            job = told.job
            if job.delivery == "final":
                event = ProgressEvent(client=job.client, request_id=job.request_id, tokens=told.telling.tokens)
                outbox.add(job, "progress", [jobs.encode(event)], job)
        return outbox.take()
