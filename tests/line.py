"""A whole line in one process for tests: an embedded broker, the workers, and a client that listens by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from headrace.broker.ports import Broker, Message
from headrace.client.parts import Parts
from headrace.protocol import jobs
from headrace.protocol.jobs import Delivery, ErrorEvent, Event, FinalEvent, GenerateJob, PartEvent, RenderJob
from headrace.workers.control import ControlWorker
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.generate.engine import Engine
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.models import ModelSpec
from headrace.workers.render.worker import RenderWorker
from headrace.workers.runtime import Role, serve
from headrace.workers.terms import Terms

CLIENT = "tester"
WAIT_S = 20.0


def demo_spec() -> ModelSpec:
    return ModelSpec.of("demo", engine="null")


@dataclass
class Listener:
    """Everything that a client heard, by request."""

    broker: Broker
    heard: dict[str, list[Event]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    parts: dict[str, Parts] = field(default_factory=dict)
    parted: int = 0
    """How many events came in parts."""

    async def listen(self, messages: AsyncIterator[Any]) -> None:
        async for message in messages:
            async with self.changed:
                for event in jobs.decode_events(message.body):
                    self._take(event)
                self.changed.notify_all()

    def _take(self, event: Event) -> None:
        if isinstance(event, PartEvent):
            parts = self.parts.setdefault(event.request_id, Parts())
            if (whole := parts.add(event)) is not None:
                self.parted += 1
                for each in jobs.decode_events(whole):
                    self._take(each)
        else:
            self.heard.setdefault(event.request_id, []).append(event)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(holds)

    async def outcome(self, request_id: str) -> FinalEvent | ErrorEvent:
        await self.until(lambda: bool(self.outcomes(request_id)))
        return self.outcomes(request_id)[0]

    def outcomes(self, request_id: str) -> list[FinalEvent | ErrorEvent]:
        return [e for e in self.heard.get(request_id, []) if isinstance(e, FinalEvent | ErrorEvent)]

    def chunks(self, request_id: str) -> list[jobs.ChunkEvent]:
        return [e for e in self.heard.get(request_id, []) if isinstance(e, jobs.ChunkEvent)]

    async def send(self, queue: str, body: bytes) -> None:
        await self.broker.queues.publish(queue, Message(body, "x"))

    async def chat(self, request_id: str, *, delivery: Delivery = "stream", **body: Any) -> None:
        wanted = {"messages": [{"role": "user", "content": "Hello"}]} | body
        await self.send("render.demo", jobs.encode(render_job(request_id, wanted, delivery=delivery)))

    async def generate(self, request_id: str, *, delivery: Delivery = "tokens", **request: Any) -> None:
        wanted = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}} | request
        job = GenerateJob(client=CLIENT, request_id=request_id, model="demo", delivery=delivery, request=raw(wanted))
        await self.send("generate.demo", jobs.encode(job))


def raw(value: object) -> Raw:
    return Raw(json.dumps(value).encode())


def render_job(request_id: str, body: object, **rest: Any) -> RenderJob:
    endpoint = "/v1/chat/completions"
    return RenderJob(client=CLIENT, request_id=request_id, model="demo", endpoint=endpoint, body=raw(body), **rest)


def roles(broker: Broker, *, engine: Engine | None = None, heartbeat: float = 6.0) -> list[Role]:
    spec, terms = demo_spec(), Terms(heartbeat=heartbeat)
    engine = engine or NullEngine(NullSettings())
    return [
        RenderWorker(broker, spec),
        GenerateWorker(broker, spec, engine=engine, terms=terms),
        DerenderWorker(broker, spec, terms=terms),
        ControlWorker(broker),
    ]


@asynccontextmanager
async def listening(broker: Broker) -> AsyncIterator[Listener]:
    """A client of the broker, with its subscription in place."""
    async with broker.topics.subscribe(f"{CLIENT}.#") as messages:
        listener = Listener(broker)
        task = asyncio.create_task(listener.listen(messages))
        try:
            yield listener
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def working(workers: Sequence[Role], *, grace: float = 5.0) -> AsyncIterator[asyncio.Event]:
    """The workers at work; drained at the end. Yields the event that stops them."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(workers, stop=stop, ready=ready, grace=grace))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        waiting.cancel()
        await task
    try:
        yield stop
    finally:
        stop.set()
        async with asyncio.timeout(WAIT_S):
            await task
