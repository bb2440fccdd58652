"""The driver: sends a round of requests by the SDK and by plain AMQP, and keeps all that is heard of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractRobustConnection
from aio_pika.exceptions import AMQPException

from headrace.broker.ports import Broker
from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE
from headrace.client import Headrace
from headrace.client.connect import servers
from headrace.client.door import Response
from headrace.client.stream import Stream
from headrace.protocol import errors, jobs
from headrace.protocol.jobs import Event
from headrace.settings import Settings
from tests.chaos.asks import ASKS, MODEL, NOBODY, Ask
from tests.chaos.audit import Received, Told, broken_promises

T = TypeVar("T")

HEARD: Final = "chaos-heard"
PATIENT_S, HASTY_S = 300.0, 0.2
"""Deadlines, in seconds from the start of a round."""
ROUND_S, EMPTY_S = 40.0, 20.0
"""Within so many seconds a round must have all its outcomes, and so many later nothing may wait anywhere."""

CODES = {
    errors.Cancelled: "cancelled",
    errors.DeadlineExceeded: "expired",
    errors.StreamLost: "stream_lost",
    errors.BadRequest: "bad_request",
    errors.Exhausted: "exhausted",
    errors.Interrupted: "interrupted",
}


@dataclass(slots=True)
class Round:
    """The requests of one client, sent once."""

    client: str
    asks: Sequence[Ask] = ASKS
    received: dict[str, Received] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    """Those that are durable in their queues."""


class Driver:
    """A client of all kinds. What plain consumers hear waits in a durable queue, from one driver to the next."""

    def __init__(self, broker: Broker, plain: AbstractRobustConnection, settings: Settings) -> None:
        self._broker = broker
        self._plain = plain
        self._settings = settings
        self._heard: dict[tuple[str, str], list[Event]] = {}

    @classmethod
    @asynccontextmanager
    async def at_work(
        cls, settings: Settings, heard: dict[tuple[str, str], list[Event]] | None = None
    ) -> AsyncIterator[Driver]:
        async with servers(settings, name="chaos") as broker, await aio_pika.connect_robust(settings.amqp_url) as plain:
            await broker.queues.declare([jobs.queue_of("render", NOBODY)])
            driver = cls(broker, plain, settings)
            if heard is not None:
                driver._heard = heard
            await driver._listen()
            yield driver

    async def _listen(self) -> None:
        channel = await self._plain.channel()
        await channel.set_qos(prefetch_count=1000)
        queue = await channel.declare_queue(HEARD, durable=True)
        await queue.bind(TOPIC_EXCHANGE, "#")
        await queue.consume(self._hear)

    async def _hear(self, message: AbstractIncomingMessage) -> None:
        for event in jobs.decode_events(message.body):
            self._heard.setdefault((event.client, event.request_id), []).append(event)
        with suppress(AMQPException, aio_pika.exceptions.ChannelInvalidStateError):
            await message.ack()

    # ------------------------------------------------------------------------------------------ sending

    async def send(self, round_: Round) -> None:
        """Sends everything; returns when the SDK's requests have ended and the plain ones are sent."""
        settings = self._settings.model_copy(update={"client": round_.client, "model": MODEL})
        async with Headrace.connect(settings, broker=self._broker) as headrace, asyncio.TaskGroup() as group:
            for ask in round_.asks:
                one = self._ask(headrace, ask, round_) if ask.kind.by == "sdk" else self._produce(ask, round_)
                group.create_task(one)

    async def _ask(self, headrace: Headrace, ask: Ask, round_: Round) -> None:
        wish, twist = ask.kind.wish, ask.kind.twist
        received = Received()
        deadline = HASTY_S / 100 if twist == "late" else PATIENT_S

        async def submit() -> Stream[Response]:
            received.submitted_at.add(int(time.time()))
            stream = await headrace.submit(
                wish.endpoint, ask.body, request_id=ask.request_id, delivery=wish.delivery, deadline=deadline
            )
            received.submitted_at.add(int(stream.job.submitted_at or 0))
            return stream

        stream = await _insist(submit)
        round_.sent.add(ask.request_id)
        try:
            if twist == "cancelled":
                await _insist(stream.cancel)
            if wish.delivery != "final":
                async for chunk in stream:
                    received.chunks.append((chunk.seq, chunk.raw))
            received.final = await stream.outcome()
        except errors.HeadraceError as error:
            received.error = CODES.get(type(error), f"{type(error).__name__}: {error}")
        round_.received[ask.request_id] = received

    async def _produce(self, ask: Ask, round_: Round) -> None:
        """As a producer does that has nothing but an AMQP library: until the broker has confirmed it."""
        twist = ask.kind.twist
        if twist == "never sent":
            await self._cancel(round_.client, ask.request_id)
        else:
            hasty = twist == "unserved"
            body = ask.envelope(round_.client, deadline=time.time() + (HASTY_S if hasty else PATIENT_S))
            model = NOBODY if twist in ("unserved", "rejected") else MODEL
            queue = jobs.queue_of("generate" if ask.of_tokens else "render", model)
            for _ in range(2 if twist == "twice" else 1):
                await self._publish(queue, ask.request_id, body, expiration=HASTY_S if hasty else None)
            if twist == "rejected":
                await self._reject_one(queue)
        round_.sent.add(ask.request_id)

    async def _cancel(self, client: str, request_id: str) -> None:
        body = json.dumps({"type": "cancel", "client": client, "request_id": request_id}).encode()
        await self._publish(jobs.CONTROL_QUEUE, request_id, body)

    async def _publish(self, queue: str, request_id: str, body: bytes, *, expiration: float | None = None) -> None:
        while True:
            try:
                async with asyncio.timeout(10), await self._plain.channel() as channel:
                    message = aio_pika.Message(
                        body,
                        correlation_id=request_id,
                        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                        expiration=expiration,
                    )
                    await channel.default_exchange.publish(message, queue)
                    return
            except (AMQPException, ConnectionError, TimeoutError, RuntimeError):
                await asyncio.sleep(0.2)

    async def _reject_one(self, queue: str) -> None:
        """Throws a job out of its queue, as the broker does with one that came back too often."""
        async with await self._plain.channel() as channel:
            place = await channel.get_queue(queue)
            seen: list[AbstractIncomingMessage] = []
            while (message := await place.get(fail=False)) is not None:
                if message.expiration is None:
                    await message.reject(requeue=False)
                    break
                seen.append(message)
            for other in seen:
                await other.reject(requeue=True)

    # ------------------------------------------------------------------------------------------ looking

    async def settled(self, *rounds: Round, hear: bool = True) -> None:
        """Returns when every request has its outcome and, with ``hear``, a plain consumer has heard of it."""
        until = time.monotonic() + ROUND_S
        while waiting := [
            f"{round_.client}/{ask.request_id}"
            for round_ in rounds
            for ask in round_.asks
            if not await self._is_settled(round_.client, ask, hear)
        ]:
            assert time.monotonic() < until, f"after {ROUND_S:g} seconds these have no outcome: {waiting}"
            await asyncio.sleep(0.1)

    async def _is_settled(self, client: str, ask: Ask, hear: bool) -> bool:
        if hear:
            return self._told_outcome(client, ask)
        return await self._broker.runs.result(jobs.run_of(client, ask.request_id)) is not None

    def _told_outcome(self, client: str, ask: Ask) -> bool:
        heard = self._heard.get((client, ask.request_id), ())
        return any(isinstance(event, jobs.FinalEvent | jobs.ErrorEvent) for event in heard)

    async def emptied(self, queues: Sequence[str]) -> None:
        """Returns when nothing waits in any of the queues."""
        until = time.monotonic() + EMPTY_S
        async with await self._plain.channel() as channel:
            while waiting := {name: count for name in queues if (count := await _waiting(channel, name))}:
                assert time.monotonic() < until, f"after {EMPTY_S:g} seconds there still wait {waiting}"
                await asyncio.sleep(0.1)

    async def buried(self) -> dict[str, int]:
        """How often each request lies in ``dead``, which is empty afterwards."""
        found: dict[str, int] = {}
        async with await self._plain.channel() as channel:
            dead = await channel.get_queue(jobs.DEAD_QUEUE)
            while (message := await dead.get(fail=False)) is not None:
                found[message.correlation_id or ""] = found.get(message.correlation_id or "", 0) + 1
                await message.ack()
        return found

    async def audit(self, round_: Round, *, complete: bool = True, allowed: frozenset[str] = frozenset()) -> list[str]:
        """Every promise about the round that was broken."""
        broken: list[str] = []
        for ask in round_.asks:
            result = await self._broker.runs.result(jobs.run_of(round_.client, ask.request_id))
            told = Told(
                ask,
                round_.client,
                self._heard.get((round_.client, ask.request_id), ()),
                round_.received.get(ask.request_id),
                None if result is None else jobs.decode_terminal(result),
                complete,
            )
            broken += broken_promises(told, await ask.answer(), allowed=allowed)
        return broken


async def _insist(send: Callable[[], Awaitable[T]]) -> T:
    """As every client does: again, while a server is away."""
    while True:
        try:
            return await send()
        except errors.Unavailable:
            await asyncio.sleep(0.2)


async def _waiting(channel: AbstractChannel, name: str) -> int:
    """How many messages wait. Asked for its count, a queue of RabbitMQ 3.10 still names some that have expired and are
    gone; so whoever finds a count tries to get one of them."""
    queue = await channel.declare_queue(name, passive=True)
    count = queue.declaration_result.message_count or 0
    if count:
        one = await queue.get(fail=False)
        if one is None:
            return 0
        await one.reject(requeue=True)
    return count
