"""The derender worker: follows the logs of many runs at once and tells each to its client.

Every entry of a log becomes one chunk event under the entry's own number. What is told is a pure function of the log:
a worker that takes over goes on from the last checkpoint, or tells the same chunks again under the same numbers. The
outcome is written once.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.broker.entries import Position
from headrace.broker.ports import (
    Broker,
    BrokerError,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Delivery,
    Release,
)
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import Exhausted, HeadraceError, StreamLost
from headrace.protocol.jobs import DerenderJob, EnvelopeError, GenerateJob, ProgressEvent, Replay
from headrace.workers.derender import checkpoint
from headrace.workers.derender.checkpoint import Checkpoints
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.replay import source_of, tell_again
from headrace.workers.derender.rounds import Rounds
from headrace.workers.derender.sending import Messages, send
from headrace.workers.derender.telling import telling_of
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower, read_all
from headrace.workers.holding import Holding
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import conclude, failed, tell
from headrace.workers.runtime import BEATS_PER_LIFE, HEARTBEAT_S, counted, guarded, now, take, worker_name

log = get_logger()

PREFETCH: Final = 4096
"""Runs that one worker tells at a time."""
LOST_WAITS: Final = 3
"""Heartbeats that a lost final is waited for."""
_LOST: Final = "x-headrace-lost"
LAST_ROUND_S: Final = 2.0
"""How long a worker that leaves waits for what it is just telling."""


class DerenderWorker:
    """Consumes ``derender.<model>``; one task reads all logs in rounds and publishes what they say."""

    def __init__(self, broker: Broker, spec: ModelSpec, *, heartbeat: float = HEARTBEAT_S) -> None:
        self.name = worker_name("derender")
        self._broker = broker
        self._spec = spec
        self._heartbeat = heartbeat
        self._queue = jobs.queue_of("derender", spec.name)
        self._told: Holding[Told] = Holding(broker, "derender", self.name)
        self._checkpoints = Checkpoints(broker)
        pause = heartbeat / BEATS_PER_LIFE
        self._rounds = Rounds(broker, self._told, self._checkpoints, self._settle, pause=pause)
        self._claiming: set[str] = set()
        self._derenderer: Derenderer
        self._tasks: asyncio.TaskGroup

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
        await self._broker.queues.declare([self._queue])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Tells until ``stop``, then for ``grace`` seconds what is under way, and hands the rest over."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                reading = self._tasks.create_task(self._rounds.go_on())
                chores = (self._beat_on(), self._progress_on(), self._checkpoints.write_on())
                others = [self._tasks.create_task(chore) for chore in chores]
                await take(self._broker, self._queue, PREFETCH, self._handle, stop)
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
        match jobs.decode(delivery.body):
            case DerenderJob() as job if job.run not in self._claiming:
                self._claiming.add(job.run)
                try:
                    await self._claim(jobs.stamp(job, now()), delivery)
                finally:
                    self._claiming.discard(job.run)
            case DerenderJob():
                await self._park(delivery)
            case Replay() as replay:
                await tell_again(self._broker, self._derenderer, replay)
                await self._broker.queues.ack(delivery)
            case other:
                raise EnvelopeError(f"type: {type(other).__name__} is not for a derender queue")

    async def _claim(self, job: DerenderJob, delivery: Delivery) -> None:
        claim = await self._broker.runs.claim(
            ClaimRequest(
                run=job.run,
                role="derender",
                worker=self.name,
                digest=jobs.digest_of(job),
                deadline=job.deadline or 0.0,
                replay_ttl=job.replay_ttl,
                heartbeat=self._heartbeat,
                redelivered=delivery.redelivered,
            )
        )
        match claim.answer:
            case ClaimAnswer.NEW | ClaimAnswer.EXPIRED | ClaimAnswer.CANCELLED:
                # The generate worker ends a run that is late or cancelled; the log says so.
                await self._begin(job, delivery, claim)
            case ClaimAnswer.MINE if (told := self._told.get(job.run)) is not None:
                await self._told.adopt(told, delivery)
            case ClaimAnswer.MINE:
                await self._begin(job, delivery, claim)
            case ClaimAnswer.DONE:
                assert claim.outcome is not None, "a run that is done has its outcome"
                await tell(self._broker, claim.outcome, to=job)
                await self._broker.queues.ack(delivery)
            case ClaimAnswer.EXHAUSTED:
                why = f"telling the request failed {claim.attempts} times and took down {claim.rescues} workers"
                await conclude(self._broker, failed(job, Exhausted(why)), to=job, replay_ttl=job.replay_ttl)
                await self._broker.queues.bury(delivery, why)
            case ClaimAnswer.ALIVE | ClaimAnswer.ENDED | ClaimAnswer.CONFLICT:
                await self._park(delivery)

    async def _begin(self, job: DerenderJob, delivery: Delivery, claim: Claim) -> None:
        stale = self._told.get(job.run)
        if stale is not None:  # others had the run meanwhile: what this worker knows of it may not be so any more
            self._forget(stale)
            await self._broker.queues.ack(stale.delivery)
        source = source_of(claim.job)
        if source is None:
            await self._lost(job, delivery, chunks=0)
            return
        told = await self._resumed(job, delivery, claim, source)
        if told is None:
            told = Told(job, delivery, claim.epoch, telling_of(self._derenderer, source))
        self._told.add(told)
        self._rounds.follow(told)

    async def _resumed(self, job: DerenderJob, delivery: Delivery, claim: Claim, source: GenerateJob) -> Told | None:
        """The run as the last checkpoint of whoever told it before has it; None if there is none that is of use."""
        if claim.epoch == 1 and claim.answer is ClaimAnswer.NEW:
            return None
        state = await self._broker.runs.load(job.run)
        saved = None if state is None else checkpoint.read(state)
        if saved is None:
            return None
        try:
            telling = telling_of(self._derenderer, source, bytes(saved.telling))
        except (ValueError, HeadraceError) as error:
            log.warning("checkpoint.unusable", request_id=job.request_id, error=str(error))
            return None
        log.info("run.resumed", request_id=job.request_id, epoch=claim.epoch, chunks=saved.chunks)
        return Told(job, delivery, claim.epoch, telling, saved.follower())

    async def _lost(self, job: DerenderJob, delivery: Delivery, *, chunks: int) -> None:
        """The stored output is gone. What was told cannot be told anew; of a final nothing was told, so it is given
        some time to be generated again from the job that its worker still holds."""
        waited = counted(delivery, _LOST)
        if job.delivery == "final" and waited < LOST_WAITS:
            await self._broker.queues.retry(delivery, self._heartbeat, {_LOST: waited + 1})
            return
        lost = StreamLost("stored output was lost; send the request again")
        await conclude(self._broker, failed(job, lost, chunks=chunks), to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(delivery)

    async def _park(self, delivery: Delivery) -> None:
        await self._broker.queues.retry(delivery, self._heartbeat / BEATS_PER_LIFE)

    # ------------------------------------------------------------------------------------------ telling

    def _settle(self, told: Told, outcome: bytes | None = None) -> None:
        """Tells the outcome of a run that is over, written here if there is none, beside the reading of the others."""
        self._forget(told)

        async def settle(_: Delivery) -> None:
            await (self._conclude(told) if outcome is None else self._pass_on(told, outcome))

        self._tasks.create_task(guarded(self._broker, told.delivery, settle))

    async def _conclude(self, told: Told) -> None:
        job = told.job
        if told.partial and told.lost is None:
            await self._recall(told)
        if isinstance(told.lost, StreamLost):
            await self._broker.runs.release(job.run, "derender", told.epoch, Release.HANDOVER)
            await self._lost(job, told.delivery, chunks=told.follower.chunks)
            return
        try:
            outcome = told.outcome()
        except Exception:
            await self._broker.runs.release(job.run, "derender", told.epoch, Release.FAILED)
            raise
        await conclude(self._broker, outcome, to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(told.delivery)

    async def _recall(self, told: Told) -> None:
        """Reads the beginning of the log, which a run that was resumed has not seen: the response is that of all."""
        follower = Follower()
        try:
            whole = await read_all(self._broker.log, told.job.run, follower)
        except StreamLost as lost:
            told.lost = lost
            return
        if follower.chunks != told.follower.chunks:
            told.lost = StreamLost(f"{follower.chunks} chunks of {told.follower.chunks} are left of the log")
            return
        told.recall(chunk for _, chunk in whole if chunk is not None)

    async def _pass_on(self, told: Told, outcome: bytes) -> None:
        """The run's outcome was written elsewhere: nothing more comes of its log."""
        await tell(self._broker, outcome, to=told.job)
        await self._broker.queues.ack(told.delivery)

    def _forget(self, told: Told) -> None:
        if self._told.get(told.job.run) is told:
            self._told.drop(told)
            self._rounds.leave(told.job.run)

    # ------------------------------------------------------------------------------------------ staying alive

    async def _beat_on(self) -> None:
        """Shows that this worker lives, and finds what never wakes a read: a log that is gone, and the outcome that
        another wrote for a run, because it was late, cancelled or given up while nobody generated it."""
        before: dict[str, Position] = {}
        while True:
            runs = self._told.runs()
            at = {told.job.run: told.follower.position for told in self._told}
            silent = [run for run in runs if before.get(run) == at[run]]
            before = at
            outcomes: list[bytes | None] = [None] * len(silent)
            try:
                await self._broker.runs.beat(self.name, runs, self._heartbeat)
                there = await self._broker.log.exists(runs)
                outcomes = await asyncio.gather(*(self._broker.runs.result(run) for run in silent))
            except BrokerError as away:
                log.warning("worker.beat_failed", worker=self.name, error=str(away))
                there = [True] * len(runs)
            for run, exists in zip(runs, there, strict=True):
                told = self._told.get(run)
                if told is not None and not told.over and not exists:
                    told.lost = StreamLost("stored output was lost; send the request again")
                    self._settle(told)
            for run, outcome in zip(silent, outcomes, strict=True):
                told = self._told.get(run)
                if told is not None and not told.over and outcome is not None:
                    self._settle(told, outcome)
            await asyncio.sleep(self._heartbeat / BEATS_PER_LIFE)

    async def _progress_on(self) -> None:
        """Apart from the beat, which must not wait for RabbitMQ."""
        while True:
            await asyncio.sleep(self._heartbeat / BEATS_PER_LIFE)
            try:
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
