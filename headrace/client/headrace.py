"""The client: one subscription, many requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final, Self, cast

from headrace.broker.ports import Broker, BrokerError, Message
from headrace.client.connect import opened
from headrace.client.door import Body, Request, Response, envelope_of, job_of, queue_for
from headrace.client.inbox import Inbox
from headrace.client.many import Done, Many, Requests
from headrace.client.refusals import told
from headrace.client.stream import Need, Stream
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.base import new_request_id
from headrace.protocol.chat import ChatCompletionResponse
from headrace.protocol.completion import CompletionResponse
from headrace.protocol.errors import Conflict, HeadraceError
from headrace.protocol.generate import GenerateTextResponse, GenerateTokensResponse
from headrace.protocol.jobs import CONTROL_QUEUE, Cancel, Delivery, Envelope, Job, Replay, Terminal, Via, run_of
from headrace.settings import Settings
from headrace.workers.models import ModelSpec
from headrace.workers.runtime import Role, serve

log = get_logger()

TICK_S: Final = 0.2
"""How often every stream is asked what it needs."""
UNREAD: Final = 8_192
"""Messages that wait at the server for this client, at most; chunks that were dropped there are asked for again."""


class Broken(Exception):
    """The client cannot go on: its subscription or its embedded workers have ended. Connect again."""


class Headrace:
    """A client: one subscription for all its requests. Make it with ``connect``.

    ``chat``, ``completion``, ``generate`` and ``submit`` give a ``headrace.client.Stream`` each. What can go wrong with
    a request is a ``HeadraceError`` of ``headrace.protocol.errors``; a client that cannot go on raises ``Broken``.
    """

    def __init__(self, broker: Broker, settings: Settings, *, topic: str) -> None:
        self._broker = broker
        self._settings = settings
        self._to = {"topic": topic, "via": settings.via}
        """Where the events of its requests come back."""
        self._inbox = Inbox()
        self._broken: Broken | None = None

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        settings: Settings | None = None,
        *,
        broker: Broker | None = None,
        spec: ModelSpec | None = None,
        topic: str | None = None,
        via: Via | None = None,
    ) -> AsyncIterator[Self]:
        """A client on the broker given, or on the servers of the settings, or with all of it in this process.

        ``spec`` is the model served in this process, that of the settings unless given; ``topic`` the word under
        which the events come back, a random one unless given; ``via`` what brings them, amqp or redis, that of the
        settings unless given.
        """
        settings = settings or Settings.load()
        async with opened(settings, broker, spec) as backend:
            settings = settings.model_copy(update={"model": backend.model, "via": via or settings.via})
            client = cls(backend.broker, settings, topic=topic or secrets.token_hex(8))
            async with client._at_work(backend.roles):
                yield client

    # ------------------------------------------------------------------------------------------- requests

    async def submit(
        self,
        endpoint: str,
        body: Body,
        *,
        model: str | None = None,
        request_id: str | None = None,
        delivery: Delivery = "stream",
        deadline: float | None = None,
        replay_ttl: float | None = None,
    ) -> Stream[Response]:
        """Sends a request; returns once it is durable in its queue. ``deadline`` is in seconds from now.

        The body travels as it was sent. Sending it again under the same request_id runs it once. Raises BadRequest
        naming the field, NotFound for a model that nobody serves, QueueFull, TooLarge, Unavailable.
        """
        self._raise_if_broken()
        settings, now = self._settings, time.time()
        job = job_of(
            Request(endpoint, body, model),
            default_model=settings.model,
            max_bytes=settings.max_request_bytes,
            client=settings.client,
            request_id=new_request_id() if request_id is None else request_id,
            delivery=delivery,
            submitted_at=now,
            deadline=now + (settings.deadline if deadline is None else deadline),
            replay_ttl=settings.replay_ttl if replay_ttl is None else replay_ttl,
            **self._to,
        )
        stream: Stream[Response] = Stream(
            job, self, limit=settings.stream_buffer, silence=settings.silence, now=time.monotonic()
        )
        self._inbox.open(stream)
        try:
            await self._publish(queue_for(job), job, model=job.model)
        except BaseException:
            self._inbox.close(job.request_id)
            raise
        return stream

    async def chat(
        self,
        *,
        messages: Sequence[object],
        model: str | None = None,
        request_id: str | None = None,
        delivery: Delivery = "stream",
        deadline: float | None = None,
        **body: object,
    ) -> Stream[ChatCompletionResponse]:
        """A chat completion; ``body`` holds the other fields of the request."""
        whole = _without_none(model=model, messages=messages) | body
        stream = await self.submit(
            "/v1/chat/completions", whole, request_id=request_id, delivery=delivery, deadline=deadline
        )
        return cast("Stream[ChatCompletionResponse]", stream)

    async def completion(
        self,
        *,
        prompt: str | Sequence[object],
        model: str | None = None,
        request_id: str | None = None,
        delivery: Delivery = "stream",
        deadline: float | None = None,
        **body: object,
    ) -> Stream[CompletionResponse]:
        """A text completion; ``body`` holds the other fields of the request."""
        whole = _without_none(model=model, prompt=prompt) | body
        stream = await self.submit(
            "/v1/completions", whole, request_id=request_id, delivery=delivery, deadline=deadline
        )
        return cast("Stream[CompletionResponse]", stream)

    async def generate(
        self,
        *,
        token_ids: Sequence[int],
        sampling_params: dict[str, object],
        model: str | None = None,
        request_id: str | None = None,
        delivery: Delivery = "stream",
        deadline: float | None = None,
        **body: object,
    ) -> Stream[GenerateTokensResponse | GenerateTextResponse]:
        """Token ids in, token ids out; ``body`` holds the other fields of the request."""
        whole = _without_none(model=model, token_ids=token_ids, sampling_params=sampling_params) | body
        stream = await self.submit(
            "/inference/v1/generate", whole, request_id=request_id, delivery=delivery, deadline=deadline
        )
        return cast("Stream[GenerateTokensResponse | GenerateTextResponse]", stream)

    async def map(
        self,
        requests: Requests,
        *,
        max_in_flight: int = 256,
        attempts: int = 1,
        replay_ttl: float | None = None,
    ) -> AsyncGenerator[Done, None]:
        """Every request's end, in the order in which they end. Reads ``requests`` only as far as there is room.

        ``requests`` gives ``headrace.client.Request``s, as Request("/v1/completions", {"prompt": "Hi"}). One that fails
        is a ``Done`` with its ``error``: nothing is raised for it. Waits where a queue is full or a server is away;
        tries a retryable failure again, up to ``attempts`` times in all. Leaving early leaves the rest to the servers.
        """
        many = Many(self.submit, max_in_flight, attempts, self._settings.deadline, replay_ttl)
        async with aclosing(many.run(requests)) as ends:
            async for done in ends:
                yield done

    async def cancel(
        self, request_id: str, *, reason: str = "cancelled by the client", model: str | None = None
    ) -> None:
        """Asks for a request of this client name to be stopped, wherever it is. Raises BadRequest, Unavailable."""
        fields = {"client": self._settings.client, "request_id": request_id, "reason": reason[:200], "model": model}
        await self._publish(CONTROL_QUEUE, envelope_of(Cancel, {"type": "cancel", **fields, **self._to}))

    async def result(self, request_id: str) -> Terminal | None:
        """The outcome of a request of this client name, while it is kept. Raises Unavailable."""
        try:
            found = await self._broker.runs.result(run_of(self._settings.client, request_id))
        except BrokerError as error:
            raise told(error) from error
        return None if found is None else jobs.decode_terminal(found)

    # ------------------------------------------------------------------------------------------- events

    @asynccontextmanager
    async def _at_work(self, roles: Sequence[Role]) -> AsyncIterator[None]:
        """Listens, watches and serves the embedded roles while the context lasts."""
        stop, listening, serving = asyncio.Event(), asyncio.Event(), asyncio.Event()
        home = asyncio.create_task(self._live(roles, stop, listening, serving))
        home.add_done_callback(self._ended)
        try:
            await _first(home, listening, serving)
            self._raise_if_broken()
            yield
        finally:
            stop.set()
            await asyncio.gather(home, return_exceptions=True)

    async def _live(
        self, roles: Sequence[Role], stop: asyncio.Event, listening: asyncio.Event, serving: asyncio.Event
    ) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._listen(listening)), group.create_task(self._watch())]
            if roles:
                await serve(roles, stop=stop, ready=serving, grace=0.0)
            serving.set()
            await stop.wait()
            for task in tasks:
                task.cancel()

    async def _listen(self, listening: asyncio.Event) -> None:
        topics, pattern = self._broker.via(self._settings.via), f"{self._settings.client}.*.{self._to['topic']}"
        async with topics.subscribe(pattern, limit=UNREAD) as messages:
            listening.set()
            async for message in messages:
                self._inbox.hear(message.body, time.monotonic())
        raise Broken("The subscription to the client's topic has ended.")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for stream in self._inbox.streams():
                    await self._tend(stream)
            except HeadraceError as error:
                log.warning("client.servers_away", error=str(error))

    async def _tend(self, stream: Stream[Response]) -> None:
        match stream.needs(time.monotonic(), time.time()):
            case Need.REPLAY:
                log.info("stream.replay", request_id=stream.request_id, seq=stream.next_seq)
                job = stream.job
                again = Replay(
                    client=job.client,
                    request_id=job.request_id,
                    model=job.model,
                    seq=stream.next_seq,
                    topic=job.topic,
                    via=job.via,
                )
                await self._publish(CONTROL_QUEUE, again)
            case Need.RESULT:
                await self._look_up(stream)
        if stream.settled:
            self._inbox.close(stream.request_id)

    async def _look_up(self, stream: Stream[Response]) -> None:
        """The outcome of a request that is not heard of, unless the run under its id is another request."""
        outcome = await self.result(stream.request_id)
        if outcome is None:
            return
        try:
            digest = await self._broker.runs.digest(stream.job.run)
        except BrokerError as error:
            raise told(error) from error
        if digest in ("", jobs.digest_of(stream.job)):
            stream.accept(outcome, time.monotonic())
        else:
            stream.fail(Conflict("request_id: it was used before with another body", param="request_id"))

    def _ended(self, home: asyncio.Task[None]) -> None:
        """Whatever ends the client ends its streams: nobody waits for what cannot come."""
        error = None if home.cancelled() else home.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        broken = error if isinstance(error, Broken) else Broken(f"The client cannot go on: {error or 'it was closed'}")
        if broken is not error:
            broken.__cause__ = error
        self._broken = broken
        for stream in self._inbox.streams():
            stream.fail(broken)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    async def _publish(self, queue: str, envelope: Envelope, *, model: str | None = None) -> None:
        expires = envelope.deadline if isinstance(envelope, Job) else None
        message = Message(jobs.encode(envelope), envelope.request_id, expires=expires)
        try:
            await self._broker.queues.publish(queue, message)
        except BrokerError as error:
            raise told(error, model=model) from error


def _without_none(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


async def _first(home: asyncio.Task[None], *events: asyncio.Event) -> None:
    """Waits for all the events, or for the task to end."""

    async def all_set() -> None:
        for event in events:
            await event.wait()

    ready = asyncio.create_task(all_set())
    try:
        await asyncio.wait([home, ready], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
