"""The generate worker: takes jobs as the engine has room, writes what it makes into the logs, hands over when it must.

A job stays unacked until its log has its end. One task owns the engine; appends for all runs go out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET
from pydantic import ValidationError

from headrace.broker.entries import Position
from headrace.broker.ports import (
    Append,
    Appended,
    Broker,
    BrokerError,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Delivery,
    Message,
    Release,
)
from headrace.logs import get_logger
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    HeadraceError,
    Interrupted,
    NotFound,
    StreamLost,
    bad_request,
)
from headrace.protocol.jobs import DerenderJob, EnvelopeError, GenerateJob
from headrace.protocol.wire import Usage
from headrace.workers.follow import Follower, read_all
from headrace.workers.generate.engine import Admission, ChoiceSoFar, Engine
from headrace.workers.generate.engines import build
from headrace.workers.generate.writer import LogWriter, Writing
from headrace.workers.holding import Holding
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import End, Failure, conclude, failed, tell, tell_only
from headrace.workers.runtime import BEATS_PER_LIFE, HEARTBEAT_S, guarded, now, take, worker_name

log = get_logger()


@dataclass(slots=True)
class Held:
    """A run that this worker generates."""

    job: GenerateJob
    delivery: Delivery
    epoch: int
    writing: Writing
    deadline: float


class GenerateWorker:
    """Consumes ``generate.<model>``, writes the logs, publishes one ``derender.<model>`` job for each claim."""

    def __init__(
        self, broker: Broker, spec: ModelSpec, *, engine: Engine | None = None, heartbeat: float = HEARTBEAT_S
    ) -> None:
        self.name = worker_name("generate")
        self._broker = broker
        self._spec = spec
        self._engine = build(spec) if engine is None else engine
        self._heartbeat = heartbeat
        self._queue = jobs.queue_of("generate", spec.name)
        self._next = jobs.queue_of("derender", spec.name)
        self._held: Holding[Held] = Holding(broker, "generate", self.name)
        self._claiming: set[str] = set()
        self._writer = LogWriter(broker.log, self._appended)
        self._tasks: asyncio.TaskGroup

    async def start(self) -> None:
        """Loads the model."""
        await self._engine.start()
        await self._broker.queues.declare([self._queue, self._next])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Generates until ``stop``, then finishes what ``grace`` seconds allow and hands the rest over."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                stepping = self._tasks.create_task(self._step_on())
                beating = self._tasks.create_task(self._beat_on())
                writing = self._tasks.create_task(self._writer.run())
                await take(self._broker, self._queue, self._prefetch(), self._handle, stop)
                await self._held.finished(grace)
                stepping.cancel()
                self._writer.close()
                await asyncio.wait((writing,), timeout=self._heartbeat)
                writing.cancel()
                beating.cancel()
        finally:
            await self._held.hand_over()
            await self._engine.stop()

    def _prefetch(self) -> int:
        """The engine's rows, and a few more so that a row never waits for the broker."""
        rows = self._engine.capacity().rows
        return rows + max(2, rows // 4)

    # ------------------------------------------------------------------------------------------ taking a job

    async def _handle(self, delivery: Delivery) -> None:
        job = jobs.decode(delivery.body)
        if not isinstance(job, GenerateJob):
            raise EnvelopeError(f"type: {type(job).__name__} is not for a generate queue")
        job = jobs.stamp(job, now())
        request = self._checked(job)
        if job.run in self._claiming:
            await self._park(delivery)
            return
        self._claiming.add(job.run)
        try:
            claim = await self._claim(job, delivery)
            await self._answer(claim, job, request, delivery)
        finally:
            self._claiming.discard(job.run)

    def _checked(self, job: GenerateJob) -> GenerateRequest:
        try:
            request = GenerateRequest.model_validate_json(bytes(job.request))
        except ValidationError as error:
            raise bad_request(error) from None
        request.request_id = job.request_id
        if request.model is not None and request.model != self._spec.name:
            raise NotFound(f"model: {request.model!r} is not served here, {self._spec.name!r} is", param="model")
        try:
            self._engine.check(request)
        except BadRequest as error:
            raise error if job.source is UNSET else _in_words_of_chat(error, bytes(job.source)) from None
        return request

    async def _claim(self, job: GenerateJob, delivery: Delivery) -> Claim:
        return await self._broker.runs.claim(
            ClaimRequest(
                run=job.run,
                role="generate",
                worker=self.name,
                digest=jobs.digest_of(job),
                deadline=job.deadline or 0.0,
                replay_ttl=job.replay_ttl,
                heartbeat=self._heartbeat,
                redelivered=delivery.redelivered,
                job=jobs.encode(job),
            )
        )

    async def _answer(self, claim: Claim, job: GenerateJob, request: GenerateRequest, delivery: Delivery) -> None:
        queues = self._broker.queues
        match claim.answer:
            case ClaimAnswer.NEW:
                await self._admit(claim, job, request, delivery)
            case ClaimAnswer.MINE:
                held = self._held.get(job.run)
                if held is None:
                    await self._admit(claim, job, request, delivery)
                elif held.job.topic != job.topic:
                    await self._park(delivery)  # the same request sent again by another listener: told at the end
                else:
                    await self._held.adopt(held, delivery)
            case ClaimAnswer.ALIVE | ClaimAnswer.ENDED:
                await self._park(delivery)
            case ClaimAnswer.DONE:
                assert claim.outcome is not None, "a run that is done has its outcome"
                await tell(self._broker, claim.outcome, to=job)
                await queues.ack(delivery)
            case ClaimAnswer.CONFLICT:
                taken = Conflict("request_id: it was used before with another body", param="request_id")
                await tell_only(self._broker, job, taken, to=job)
                await queues.ack(delivery)
            case ClaimAnswer.CANCELLED:
                await self._refuse(job, Cancelled(claim.reason or "cancelled"), delivery)
            case ClaimAnswer.EXPIRED:
                late = DeadlineExceeded("deadline: it passed before the request was generated", param="deadline")
                await self._refuse(job, late, delivery)
            case ClaimAnswer.EXHAUSTED:
                why = f"the request failed {claim.attempts} times and took down {claim.rescues} workers"
                await conclude(self._broker, failed(job, Exhausted(why)), to=job, replay_ttl=job.replay_ttl)
                await queues.bury(delivery, why)

    async def _refuse(self, job: GenerateJob, error: HeadraceError, delivery: Delivery) -> None:
        await conclude(self._broker, failed(job, error), to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(delivery)

    async def _park(self, delivery: Delivery) -> None:
        """Another holder lives, or was alive a moment ago: look again soon."""
        await self._broker.queues.retry(delivery, self._heartbeat / BEATS_PER_LIFE)

    async def _admit(self, claim: Claim, job: GenerateJob, request: GenerateRequest, delivery: Delivery) -> None:
        """From here on the run is ours: from the durable tokens, if an earlier epoch left some."""
        stale = self._held.get(job.run)
        if stale is not None:  # others had the run meanwhile: what the engine still has of it is not what is durable
            self._let_go(stale)
            await self._broker.queues.ack(stale.delivery)
        follower = Follower(Position(claim.epoch, 0), claim.chunks)
        resume: tuple[ChoiceSoFar, ...] = ()
        try:
            if claim.chunks or claim.answer is ClaimAnswer.MINE:
                follower = Follower()
                resume = await self._durable(job.run, follower)
            await self._broker.queues.publish(self._next, self._derender_job(job, delivery))
        except BrokerError:  # the job will be tried again by anyone: who gets it must find the run free
            await self._broker.runs.release(job.run, "generate", claim.epoch, Release.HANDOVER)
            raise
        writing = Writing(job.run, after=follower.position, chunks=follower.chunks, running=follower.running)
        held = Held(job, delivery, claim.epoch, writing, job.deadline or 0.0)
        self._held.add(held)
        if resume and self._engine.resume == "refuse":
            lost = Interrupted("the worker was lost, and this engine cannot go on from what it had sent")
            self._end(held, lost)
            return
        self._engine.admit(Admission(job.run, request, resume, job.client))

    async def _durable(self, run: str, follower: Follower) -> tuple[ChoiceSoFar, ...]:
        """What earlier epochs wrote, by choice."""
        tokens: dict[int, list[int]] = {}
        finished: dict[int, str] = {}
        for _, chunk in await read_all(self._broker.log, run, follower):
            for choice in chunk.choices if chunk is not None else ():
                tokens.setdefault(choice.index, []).extend(choice.token_ids or ())
                if choice.finish_reason is not None:
                    finished[choice.index] = choice.finish_reason
        return tuple(ChoiceSoFar(index, tuple(ids), finished.get(index)) for index, ids in sorted(tokens.items()))

    @staticmethod
    def _derender_job(job: GenerateJob, delivery: Delivery) -> Message:
        told = DerenderJob(
            **jobs.follow_on(job),
            endpoint=job.endpoint,
        )
        return Message(jobs.encode(told), job.request_id, delivery.headers)

    # ------------------------------------------------------------------------------------------ generating

    async def _step_on(self) -> None:
        while True:
            await self._writer.room()
            for output in await self._engine.step():
                held = self._held.get(output.run)
                if held is None or held.writing.ended:
                    continue
                end = None if output.end is None else _end(output.end.usage, output.end.error, output.end.extra)
                self._writer.add(held.writing, output.chunks, end)

    def _end(self, held: Held, error: HeadraceError) -> None:
        """Ends a run that the engine has not ended."""
        if not held.writing.ended:
            self._engine.cancel(held.job.run)
            self._writer.add(held.writing, (), End(failure=Failure.of(error)))

    def _appended(self, writing: Writing, appended: Appended, ended: bool) -> None:
        held = self._held.get(writing.run)
        if held is None or held.writing is not writing:
            return
        match appended.answer:
            case Append.STORED | Append.ALREADY if ended:
                self._let_go(held)
                self._settle(held, self._broker.queues.ack)
            case Append.STORED | Append.ALREADY:
                if appended.cancelled is not None:
                    self._end(held, Cancelled(appended.cancelled))
            case Append.FENCED:
                log.warning("run.fenced", request_id=held.job.request_id, epoch=held.epoch, worker=self.name)
                self._let_go(held)
                self._settle(held, self._park)
            case Append.LOST:
                log.error("run.lost", request_id=held.job.request_id, epoch=held.epoch, worker=self.name)
                self._let_go(held)
                self._settle(held, lambda _: self._lost(held))

    async def _lost(self, held: Held) -> None:
        """The log lost acknowledged entries. What was told cannot be untold; what was not is generated again."""
        if held.job.delivery == "final":
            await self._broker.runs.release(held.job.run, "generate", held.epoch, Release.FAILED)
            await self._broker.queues.retry(held.delivery, 1.0)
        else:
            await self._refuse(held.job, StreamLost("stored output was lost; send the request again"), held.delivery)

    def _let_go(self, held: Held) -> None:
        self._engine.cancel(held.job.run)
        self._held.drop(held)

    def _settle(self, held: Held, how: Callable[[Delivery], Awaitable[None]]) -> None:
        self._tasks.create_task(guarded(self._broker, held.delivery, how))

    async def _beat_on(self) -> None:
        """Shows that this worker lives, hears who was cancelled, and ends what is past its deadline."""
        while True:
            try:
                cancelled = await self._broker.runs.beat(self.name, self._held.runs(), self._heartbeat)
            except BrokerError as away:
                log.warning("worker.beat_failed", worker=self.name, error=str(away))
                cancelled = {}
            moment = now()
            for held in self._held:
                reason = cancelled.get(held.job.run)
                if reason is not None:
                    self._end(held, Cancelled(reason))
                elif held.deadline <= moment:
                    self._end(held, DeadlineExceeded("deadline: it passed while generating", param="deadline"))
            await asyncio.sleep(self._heartbeat / BEATS_PER_LIFE)


_CHAT_NAMES: Final = {
    "structured_outputs": ("response_format",),
    "max_tokens": ("max_completion_tokens",),
    "logprobs": ("top_logprobs",),
}
"""Sampling parameters that a chat or completion request may have asked for under another name."""


def _in_words_of_chat(error: BadRequest, source: bytes) -> BadRequest:
    """What the engine says of a sampling parameter, by the name that the client used."""
    prefix = "sampling_params."
    if error.param is None or not error.param.startswith(prefix):
        return error
    name = error.param.removeprefix(prefix)
    sent = msgspec.json.decode(source, type=dict[str, msgspec.Raw])
    used = next((other for other in _CHAT_NAMES.get(name, ()) if other in sent), name)
    return BadRequest(error.message.replace(prefix + name, used), param=used)


def _end(usage: Usage | None, error: HeadraceError | None, extra: dict[str, object]) -> End:
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in extra.items()}
    return End(usage, None if error is None else Failure.of(error), raw)
