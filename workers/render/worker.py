"""The render worker: takes chat and completion requests, hands on token ids."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Raw

from headrace.broker.ports import (
    Broker,
    BrokerError,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Delivery,
    Message,
    MessageTooLarge,
    Release,
)
from headrace.logs import get_logger
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.errors import BadRequest, Cancelled, Conflict, DeadlineExceeded, Exhausted
from headrace.protocol.jobs import EnvelopeError, GenerateJob, RenderJob, lane_of
from headrace.workers.limits import count, tokens_of, uncount
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import tell
from headrace.workers.probe import probe
from headrace.workers.render.renderer import Renderer
from headrace.workers.runtime import RESCUES, now, passed_on, refuse, take, worker_name
from headrace.workers.terms import DEFAULT_TERMS, Terms

log = get_logger()

PREFETCH: Final = 64
_INLINE_BYTES: Final = 8192
"""Up to this size a request is rendered on the event loop: a thread costs more than the work."""


class RenderWorker:
    """Consumes ``render.<model>`` in its lanes, publishes to ``generate.<model>``. Rendering twice gives the same job
    twice.

    A job that comes for the first time is rendered without further ado. One that was held before is claimed: if it
    takes worker after worker down, that must end.
    """

    def __init__(self, broker: Broker, spec: ModelSpec, *, terms: Terms = DEFAULT_TERMS) -> None:
        self.name = f"render.{spec.name}"
        self._worker = worker_name("render")
        self._broker = broker
        self._spec = spec
        self._terms = terms
        self._lanes = [jobs.queue_of("render", spec.name, lane) for lane in jobs.LANES]
        self._trying = False
        self._renderer: Renderer

    async def start(self) -> None:
        """Loads the tokenizer and the chat template."""
        self._renderer = await asyncio.to_thread(Renderer.load, self._spec)
        queues = [jobs.queue_of("generate", self._spec.name, lane) for lane in jobs.LANES]
        await self._broker.queues.declare([*self._lanes, *queues])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Takes jobs until ``stop``; each is short, so all are finished."""
        async with asyncio.TaskGroup() as takers:
            for queue in self._lanes:
                takers.create_task(take(self._broker, queue, PREFETCH, self._handle, stop, terms=self._terms))

    async def _handle(self, delivery: Delivery) -> None:
        probe("render.taken")
        job = jobs.decode(delivery.body)
        if not isinstance(job, RenderJob):
            raise EnvelopeError(f"type: {type(job).__name__} is not for a render queue")
        job = jobs.stamp(job, now())
        if delivery.redelivered:
            await self._handle_again(job, delivery)
        else:
            await self._pass_on(job, delivery)

    async def _pass_on(self, job: RenderJob, delivery: Delivery) -> None:
        if job.deadline is not None and job.deadline <= now():
            raise DeadlineExceeded("deadline: it had passed before the request was rendered", param="deadline")
        rendered, request = await self._render(job)
        probe("render.rendered")
        tokens = tokens_of(request, self._spec.model_len())
        rendered = await count(self._broker, rendered, tokens, self._terms.allowance)
        queue = jobs.queue_of("generate", self._spec.name, lane_of(request.priority))
        message = Message(jobs.encode(rendered), job.request_id, passed_on(delivery), job.deadline)
        try:
            await self._broker.queues.publish(queue, message)
        except MessageTooLarge:
            await uncount(self._broker, rendered)
            raise
        probe("render.published")
        await self._broker.queues.ack(delivery)

    async def _handle_again(self, job: RenderJob, delivery: Delivery) -> None:
        """A job whose last holder died, or lost its connection."""
        request = ClaimRequest(
            run=job.run,
            role="render",
            worker=self._worker,
            digest=jobs.digest_of(job),
            deadline=job.deadline or 0.0,
            replay_ttl=job.replay_ttl,
            heartbeat=self._terms.heartbeat,
            redelivered=True,
            max_attempts=self._terms.max_attempts,
            max_rescues=self._terms.max_rescues,
            trial=not self._trying,
        )
        claim = await self._broker.runs.claim(request)
        match claim.answer:
            case ClaimAnswer.NEW | ClaimAnswer.MINE:
                await self._try(job, delivery, claim)
            case ClaimAnswer.DONE:
                assert claim.outcome is not None, "a run that is done has its outcome"
                await tell(self._broker, claim.outcome, to=job)
                await self._broker.queues.ack(delivery)
            case ClaimAnswer.CANCELLED:
                raise Cancelled(claim.reason or "cancelled")
            case ClaimAnswer.EXPIRED:
                raise DeadlineExceeded("deadline: it had passed before the request was rendered", param="deadline")
            case ClaimAnswer.CONFLICT:
                raise Conflict("request_id: it was used before with another body", param="request_id")
            case ClaimAnswer.EXHAUSTED:
                why = f"rendering the request took down {claim.rescues} workers"
                await refuse(self._broker, delivery, Exhausted(why), bury=True, history={RESCUES: claim.rescues})
            case ClaimAnswer.ALIVE | ClaimAnswer.SUSPECT | ClaimAnswer.ENDED:
                await self._broker.queues.retry(delivery, self._terms.beat)

    async def _try(self, job: RenderJob, delivery: Delivery, claim: Claim) -> None:
        """Renders under a claim, alive for as long as it takes; one suspect at a time."""
        self._trying = self._trying or claim.trial
        beating = asyncio.create_task(self._beat_on(job.run))
        try:
            await self._pass_on(job, delivery)
        finally:
            beating.cancel()
            self._trying = self._trying and not claim.trial
            await self._broker.runs.release(job.run, "render", claim.epoch, Release.HANDOVER)

    async def _beat_on(self, run: str) -> None:
        while True:
            await asyncio.sleep(self._terms.beat)
            try:
                await self._broker.runs.beat(self._worker, [run], self._terms.heartbeat)
            except BrokerError as away:
                log.warning("worker.beat_failed", worker=self._worker, error=str(away))

    async def _render(self, job: RenderJob) -> tuple[GenerateJob, GenerateRequest]:
        body = bytes(job.body)
        turn = self._renderer.chat if job.endpoint == "/v1/chat/completions" else self._renderer.completion
        request = turn(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(turn, body)
        self._check_model(request)
        request.request_id = job.request_id
        rendered = GenerateJob(
            **jobs.follow_on(job),
            request=Raw(request.to_wire()),
            endpoint=job.endpoint,
            source=job.body,
        )
        return rendered, request

    def _check_model(self, request: GenerateRequest) -> None:
        if request.model is not None and request.model != self._spec.name:
            message = f"model: this queue serves {self._spec.name!r}; the request names {request.model!r}"
            raise BadRequest(message, param="model")
