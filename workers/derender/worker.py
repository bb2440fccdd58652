"""The derender worker: follows the logs of many runs at once and tells each to its client.

Every entry of a log becomes one chunk event under the entry's own number; what is told is a pure function of the
log, so a worker that takes over tells the same chunks again under the same numbers. The outcome is written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from headrace.broker.entries import Position
from headrace.broker.ports import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Delivery,
    MessageTooLarge,
    Release,
    TopicMessage,
)
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import Exhausted, NotFound, StreamLost
from headrace.protocol.jobs import DerenderJob, EnvelopeError, GenerateJob, ProgressEvent, Replay
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.outbox import Outbox, singly
from headrace.workers.derender.telling import ChunkEvents, telling_of
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower, read_all
from headrace.workers.holding import Holding
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import conclude, failed, tell, tell_only
from headrace.workers.runtime import BEATS_PER_LIFE, HEARTBEAT_S, counted, guarded, now, take, worker_name

log = get_logger()

PREFETCH: Final = 512
LOST_WAITS: Final = 3
"""Heartbeats that a lost final is waited for."""
_LOST: Final = "x-headrace-lost"
READ_WAIT_S: Final = 1.0
READ_COUNT: Final = 32
"""Entries of one run in one round: bounds how long a round keeps the event loop."""


class DerenderWorker:
    """Consumes ``derender.<model>``; one task reads all logs in rounds and publishes what they say."""

    def __init__(self, broker: Broker, spec: ModelSpec, *, heartbeat: float = HEARTBEAT_S) -> None:
        self.name = worker_name("derender")
        self._broker = broker
        self._spec = spec
        self._heartbeat = heartbeat
        self._queue = jobs.queue_of("derender", spec.name)
        self._told: Holding[Told] = Holding(broker, "derender", self.name)
        self._cursors: dict[str, Position] = {}
        self._claiming: set[str] = set()
        self._some = asyncio.Event()
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
            max_model_len=spec.model_len(),
        )
        await self._broker.queues.declare([self._queue])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Tells until ``stop``, then for ``grace`` seconds what is under way, and hands the rest over."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                reading = self._tasks.create_task(self._tell_on())
                beating = self._tasks.create_task(self._beat_on())
                progressing = self._tasks.create_task(self._progress_on())
                await take(self._broker, self._queue, PREFETCH, self._handle, stop)
                await self._told.finished(grace)
                reading.cancel()
                beating.cancel()
                progressing.cancel()
        finally:
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
                await self._replay(replay)
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
                await tell(self._broker, claim.outcome, topic=job.topic)
                await self._broker.queues.ack(delivery)
            case ClaimAnswer.EXHAUSTED:
                why = f"telling the request failed {claim.attempts} times and took down {claim.rescues} workers"
                await conclude(self._broker, failed(job, Exhausted(why)), topic=job.topic, replay_ttl=job.replay_ttl)
                await self._broker.queues.bury(delivery, why)
            case ClaimAnswer.ALIVE | ClaimAnswer.ENDED | ClaimAnswer.CONFLICT:
                await self._park(delivery)

    async def _begin(self, job: DerenderJob, delivery: Delivery, claim: Claim) -> None:
        stale = self._told.get(job.run)
        if stale is not None:  # others had the run meanwhile, its log may be another: it is told from the start
            self._forget(stale)
            await self._broker.queues.ack(stale.delivery)
        source = _source(claim.job)
        if source is None:
            await self._lost(job, delivery, chunks=0)
            return
        self._told.add(Told(job, delivery, claim.epoch, telling_of(self._derenderer, source)))
        self._cursors[job.run] = Position()
        self._some.set()
        self._broker.log.wake()

    async def _lost(self, job: DerenderJob, delivery: Delivery, *, chunks: int) -> None:
        """The stored output is gone. What was told cannot be told anew; of a final nothing was told, so it is given
        some time to be generated again from the job that its worker still holds."""
        waited = counted(delivery, _LOST)
        if job.delivery == "final" and waited < LOST_WAITS:
            await self._broker.queues.retry(delivery, self._heartbeat, {_LOST: waited + 1})
            return
        lost = StreamLost("stored output was lost; send the request again")
        await conclude(self._broker, failed(job, lost, chunks=chunks), topic=job.topic, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(delivery)

    async def _park(self, delivery: Delivery) -> None:
        await self._broker.queues.retry(delivery, self._heartbeat / BEATS_PER_LIFE)

    # ------------------------------------------------------------------------------------------ telling

    async def _tell_on(self) -> None:
        outbox = Outbox()
        while True:
            await self._some.wait()
            asked = dict(self._cursors)
            try:
                rounds = await self._broker.log.read(asked, wait=READ_WAIT_S, count=READ_COUNT)
            except BrokerUnavailable as away:
                log.warning("log.away", worker=self.name, error=str(away))
                await asyncio.sleep(self._heartbeat / BEATS_PER_LIFE)
                continue
            over: list[Told] = []
            for run, entries in rounds.items():
                told = self._told.get(run)
                if told is None or told.follower.position != asked[run]:
                    continue  # begun anew since: the next round reads it from its start
                told.take(entries, outbox)
                self._cursors[run] = told.follower.position
                if told.over:
                    over.append(told)
            await self._publish(outbox)
            for told in over:
                self._settle(told)

    async def _publish(self, outbox: Outbox) -> None:
        """Until the events are out: what is told later must not overtake them."""
        messages = outbox.take()
        while messages:
            try:
                await self._send(messages)
                return
            except MessageTooLarge as over:  # whoever misses the chunk asks for it, and is told why it does not come
                log.error("event.too_large", worker=self.name, error=str(over))
                return
            except BrokerUnavailable as away:
                log.warning("topics.away", worker=self.name, messages=len(messages), error=str(away))
                await asyncio.sleep(self._heartbeat / BEATS_PER_LIFE)

    async def _send(self, messages: Sequence[TopicMessage]) -> None:
        """Publishes; where a pack is too large, event by event. Raises MessageTooLarge once all that can be out are."""
        try:
            await self._broker.topics.publish(messages)
            return
        except MessageTooLarge:
            over: MessageTooLarge | None = None
        for message in singly(messages):
            try:
                await self._broker.topics.publish([message])
            except MessageTooLarge as error:
                over = error
        if over is not None:
            raise over

    def _settle(self, told: Told, outcome: bytes | None = None) -> None:
        """Tells the outcome of a run that is over, written here if there is none, beside the reading of the others."""
        self._forget(told)

        async def settle(_: Delivery) -> None:
            await (self._conclude(told) if outcome is None else self._pass_on(told, outcome))

        self._tasks.create_task(guarded(self._broker, told.delivery, settle))

    async def _conclude(self, told: Told) -> None:
        job = told.job
        if isinstance(told.lost, StreamLost):
            await self._broker.runs.release(job.run, "derender", told.epoch, Release.HANDOVER)
            await self._lost(job, told.delivery, chunks=told.follower.chunks)
            return
        try:
            outcome = told.outcome()
        except Exception:
            await self._broker.runs.release(job.run, "derender", told.epoch, Release.FAILED)
            raise
        await conclude(self._broker, outcome, topic=job.topic, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(told.delivery)

    async def _pass_on(self, told: Told, outcome: bytes) -> None:
        """The run's outcome was written elsewhere: nothing more comes of its log."""
        await tell(self._broker, outcome, topic=told.job.topic)
        await self._broker.queues.ack(told.delivery)

    def _forget(self, told: Told) -> None:
        if self._told.get(told.job.run) is told:
            self._told.drop(told)
            del self._cursors[told.job.run]
        if not self._told:
            self._some.clear()

    async def _replay(self, replay: Replay) -> None:
        """Tells the chunks from ``seq`` on again, and the outcome if there is one."""
        source = _source(await self._broker.runs.job(replay.run))
        outcome = await self._broker.runs.result(replay.run)
        if source is None and outcome is None:
            gone = NotFound("request_id: nothing is kept of this request any more", param="request_id")
            await tell_only(self._broker, replay, gone, topic=replay.topic)
            return
        if source is not None:
            await self._replay_chunks(replay, source)
        if outcome is not None:
            await tell(self._broker, outcome, topic=replay.topic)

    async def _replay_chunks(self, replay: Replay, source: GenerateJob) -> None:
        telling, told, events = telling_of(self._derenderer, source), ChunkEvents(source), []
        for entry, chunk in await read_all(self._broker.log, replay.run, Follower()):
            if chunk is None:
                continue
            body = telling.chunk(chunk, entry.payload)
            if body is not None and entry.seq >= replay.seq:
                events.append(told.event(entry.seq, body))
        outbox = Outbox()
        outbox.add(source, "chunk", events, replay.topic)
        await self._send(outbox.take())

    # ------------------------------------------------------------------------------------------ staying alive

    async def _beat_on(self) -> None:
        """Shows that this worker lives, and finds what never wakes a read: a log that is gone, and the outcome that
        another wrote for a run, because it was late, cancelled or given up while nobody generated it."""
        before: dict[str, Position] = {}
        while True:
            runs = self._told.runs()
            silent = [run for run in runs if before.get(run) == self._cursors[run]]
            before = dict(self._cursors)
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
                await self._broker.topics.publish(self._progress())
            except BrokerError as away:
                log.warning("topics.away", worker=self.name, error=str(away))

    def _progress(self) -> list[TopicMessage]:
        """Signs of life of the runs whose clients hear of no chunks."""
        outbox = Outbox()
        for told in self._told:
            job = told.job
            if job.delivery == "final":
                event = ProgressEvent(client=job.client, request_id=job.request_id, tokens=told.telling.tokens)
                outbox.add(job, "progress", [jobs.encode(event)], job.topic)
        return outbox.take()


def _source(body: bytes | None) -> GenerateJob | None:
    """The job that the run was generated for, as its claim stored it."""
    job = None if body is None else jobs.decode(body)
    return job if isinstance(job, GenerateJob) else None
