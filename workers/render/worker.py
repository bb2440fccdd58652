"""The render worker: takes chat and completion requests, hands on token ids."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Raw

from headrace.broker.ports import Broker, Delivery, Message
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.errors import BadRequest, DeadlineExceeded
from headrace.protocol.jobs import EnvelopeError, GenerateJob, RenderJob
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import conclude, failed
from headrace.workers.render.renderer import Renderer
from headrace.workers.runtime import now, take

PREFETCH: Final = 64
_INLINE_BYTES: Final = 8192
"""Up to this size a request is rendered on the event loop: a thread costs more than the work."""


class RenderWorker:
    """Consumes ``render.<model>``, publishes to ``generate.<model>``. Rendering twice gives the same job twice."""

    def __init__(self, broker: Broker, spec: ModelSpec) -> None:
        self.name = f"render.{spec.name}"
        self._broker = broker
        self._spec = spec
        self._queue = jobs.queue_of("render", spec.name)
        self._next = jobs.queue_of("generate", spec.name)
        self._renderer: Renderer

    async def start(self) -> None:
        """Loads the tokenizer and the chat template."""
        self._renderer = await asyncio.to_thread(Renderer.load, self._spec)
        await self._broker.queues.declare([self._queue, self._next])

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Takes jobs until ``stop``; each is short, so all are finished."""
        await take(self._broker, self._queue, PREFETCH, self._handle, stop)

    async def _handle(self, delivery: Delivery) -> None:
        job = jobs.decode(delivery.body)
        if not isinstance(job, RenderJob):
            raise EnvelopeError(f"type: {type(job).__name__} is not for a render queue")
        job = jobs.stamp(job, now())
        if job.deadline is not None and job.deadline <= now():
            late = DeadlineExceeded("deadline: it had passed before the request was rendered", param="deadline")
            await conclude(self._broker, failed(job, late), to=job, replay_ttl=job.replay_ttl)
        else:
            rendered = await self._render(job)
            await self._broker.queues.publish(
                self._next, Message(jobs.encode(rendered), job.request_id, delivery.headers)
            )
        await self._broker.queues.ack(delivery)

    async def _render(self, job: RenderJob) -> GenerateJob:
        body = bytes(job.body)
        turn = self._renderer.chat if job.endpoint == "/v1/chat/completions" else self._renderer.completion
        request = turn(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(turn, body)
        self._check_model(request)
        request.request_id = job.request_id
        return GenerateJob(
            **jobs.follow_on(job),
            request=Raw(request.to_wire()),
            endpoint=job.endpoint,
            source=job.body,
        )

    def _check_model(self, request: GenerateRequest) -> None:
        if request.model is not None and request.model != self._spec.name:
            message = f"model: this queue serves {self._spec.name!r}; the request names {request.model!r}"
            raise BadRequest(message, param="model")
