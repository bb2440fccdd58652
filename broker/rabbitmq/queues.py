"""WorkQueue on RabbitMQ: quorum queues, confirmed publishes, deliveries that know their channel."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, Literal, TypeAlias

from aiormq.abc import AbstractChannel

from headrace.broker.ports import BrokerUnavailable, Delivery, HeaderValue, Message, QueueFull, Unroutable
from headrace.broker.rabbitmq import topology
from headrace.broker.rabbitmq.channel import REQUEST_ID, Lane, Outcome, Outgoing, check_size, request_id_of
from headrace.broker.rabbitmq.connection import Supervisor
from headrace.broker.rabbitmq.consumer import Consumer, Held
from headrace.broker.rabbitmq.frames import SHORT_MAX
from headrace.broker.rabbitmq.publisher import Publisher
from headrace.broker.rabbitmq.topology import DEFAULT_EXCHANGE, Topology, is_rung
from headrace.protocol.jobs import DEAD_QUEUE, INTAKE_QUEUE

MAX_BODY: Final = 16 << 20
"""Bytes; RabbitMQ 4 closes the channel over a larger message."""
RETRY_AFTER: Final = 1.0

_NO_QUEUE: Final = "no queue {!r}: this role or model is not served here"

REASON: Final = "x-headrace-reason"
ORIGIN: Final = "x-headrace-queue"
BURIED_AT: Final = "x-headrace-at"
GAVE_UP: Final = "x-headrace-gave-up"
"""Why the broker gave up what is being retried out of the intake."""

MAX_HEADER: Final = 1_000
"""Characters of a text in a header that is added: all headers share one frame, and these are to fit."""

GaveUp: TypeAlias = Literal["expired", "rejected", "delivery_limit", "maxlen"]
_GAVE_UP: Final[dict[object, GaveUp]] = {
    "expired": "expired",
    "rejected": "rejected",
    "delivery_limit": "delivery_limit",
    "maxlen": "maxlen",
}
_BROKERS_OWN: Final = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")
"""Headers that tell a message's past to the broker: on a copy they would be another message's past."""


class RabbitWorkQueue:
    """Publishes on one connection, consumes on another: a broker that blocks publishers still takes acks."""

    def __init__(self, publishing: Supervisor, consuming: Supervisor, layout: Topology, max_body: int) -> None:
        self._publisher = Publisher(publishing)
        self._consuming = consuming
        self._counters = consuming.counters
        self._topology = layout
        self._max_body = max_body
        self._declared: dict[str, topology.Queue] = {}

    async def declare(self, queues: Iterable[str]) -> None:
        wanted = self._topology.all(queues)
        for queue in wanted:
            _check_name(queue.name)

        async def question(channel: AbstractChannel) -> None:
            await topology.declare(channel, wanted)

        await self._consuming.ask("declare the queues", question, "one of the queues")
        self._declared |= {queue.name: queue for queue in wanted}

    async def publish(self, queue: str, message: Message) -> None:
        _check_name(queue)
        check_size(message.body, self._max_body)
        outgoing = Outgoing(
            DEFAULT_EXCHANGE,
            queue,
            message.body,
            message.request_id,
            dict(message.headers),
            expires=message.expires,
        )
        _check(await self._store(outgoing), queue)

    @asynccontextmanager
    async def consume(self, queue: str, prefetch: int) -> AsyncIterator[AsyncIterator[Delivery]]:
        _check_name(queue)

        async def attach(lane: Lane) -> str:
            if ours := self._declared.get(queue):  # it may have been deleted since
                await topology.declare_queue(lane, ours)
            return queue

        def read(held: Held) -> Delivery:
            properties = held.message.header.properties
            return Delivery(
                queue=queue,
                body=held.message.body,
                request_id=request_id_of(held.message),
                headers=_scalars(properties.headers),
                redelivered=bool(held.message.redelivered),
                token=held,
                user=properties.user_id or None,
                gave_up=_death_of(properties.headers)[1] if queue in (INTAKE_QUEUE, DEAD_QUEUE) else None,
            )

        subject = f"queue {queue!r}"
        async with Consumer(self._consuming, prefetch, attach, read, subject=subject, settle_later=True) as deliveries:
            yield deliveries

    async def ack(self, delivery: Delivery) -> None:
        held = _held(delivery)
        self._count(held.lane.ack(held.tag))

    async def release(self, delivery: Delivery) -> None:
        held = _held(delivery)
        self._count(held.lane.requeue(held.tag))

    async def retry(self, delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue] | None = None) -> None:
        exchange = self._topology.rung(delay, random.random())
        added = dict(headers or {})
        if delivery.queue == INTAKE_QUEUE:  # in the rung it dies once more
            queue, why = _death_of(_held(delivery).message.header.properties.headers)
            added |= {name: said for name, said in ((ORIGIN, queue), (GAVE_UP, why)) if said}
        await self._insist(delivery, _copy(delivery, exchange, delivery.queue, added))

    async def move(self, delivery: Delivery, queue: str, expires: float | None = None) -> None:
        _check_name(queue)
        held = _held(delivery)
        if held.lane.holds(held.tag):
            _check(await self._store(_copy(delivery, DEFAULT_EXCHANGE, queue, {}, expires)), queue)
        self._count(held.lane.ack(held.tag))

    async def bury(self, delivery: Delivery, reason: str, headers: Mapping[str, HeaderValue] | None = None) -> None:
        origin = delivery.queue
        if origin == INTAKE_QUEUE:  # the queue that the broker took it out of
            origin = _death_of(_held(delivery).message.header.properties.headers)[0] or origin
        told = {**(headers or {}), REASON: reason, ORIGIN: origin, BURIED_AT: time.time()}
        await self._insist(delivery, _copy(delivery, DEFAULT_EXCHANGE, DEAD_QUEUE, told))

    async def depth(self, queue: str) -> int:
        _check_name(queue)

        async def question(channel: AbstractChannel) -> int:
            return (await channel.queue_declare(queue, passive=True)).message_count or 0

        return await self._consuming.ask(f"look at queue {queue!r}", question, f"queue {queue!r}")

    async def _insist(self, delivery: Delivery, copy: Outgoing) -> None:
        """Stores a copy elsewhere, then acks: a crash in between doubles it, the other order would lose it."""
        held = _held(delivery)
        if not held.lane.holds(held.tag):
            self._count(False)  # the broker delivers it again, so a copy would be one too many
            return
        for mended in (False, True):
            outcome = await self._store(copy)
            if outcome is Outcome.CONFIRMED:
                self._count(held.lane.ack(held.tag))
                return
            if outcome is Outcome.RETURNED and not mended:
                await self.declare([])  # somebody deleted it
        raise BrokerUnavailable(
            f"RabbitMQ does not take request {delivery.request_id!r} for {copy.key!r}: it was {outcome}"
        )

    async def _store(self, message: Outgoing) -> Outcome:
        (outcome,) = await self._publisher.publish([message], f"publish to {message.key!r}")
        return outcome

    def _count(self, settled: bool) -> None:
        if not settled:
            self._counters.stale_settlements += 1


def _check(outcome: Outcome, queue: str) -> None:
    if outcome is Outcome.RETURNED:
        raise Unroutable(_NO_QUEUE.format(queue))
    if outcome is Outcome.REJECTED:
        raise QueueFull(f"queue {queue!r} is full, try again in {RETRY_AFTER:g} s", RETRY_AFTER)


def _copy(
    delivery: Delivery, exchange: str, key: str, added: Mapping[str, HeaderValue], expires: float | None = None
) -> Outgoing:
    """The delivery for another queue. It does not expire in a retry rung: there it would come back early."""
    short = {name: value[:MAX_HEADER] if isinstance(value, str) else value for name, value in added.items()}
    others = {
        name: value
        for name, value in delivery.headers.items()
        if name not in short and not name.startswith(_BROKERS_OWN)
    }
    body = _held(delivery).message.body  # as it lies in the queue
    return Outgoing(exchange, key, body, delivery.request_id, short | others, expires=expires)


def _death_of(headers: Mapping[str, object] | None) -> tuple[str | None, GaveUp | None]:
    """The queue that the broker itself gave the message up in, and why. A retry's end is no death."""
    said = headers or {}
    match said.get("x-death"):
        case [{"queue": str(queue), "reason": reason}, *_] if not is_rung(queue):
            return queue, _GAVE_UP.get(reason)
        case [{"queue": str()}, *_]:
            origin = said.get(ORIGIN)
            return origin if isinstance(origin, str) else None, _GAVE_UP.get(said.get(GAVE_UP))
        case _:
            return None, None


def _check_name(queue: str) -> None:
    if len(queue.encode()) > SHORT_MAX:  # AMQP has no words for it, so no such queue can be
        raise Unroutable(_NO_QUEUE.format(queue))


def _held(delivery: Delivery) -> Held:
    if not isinstance(delivery.token, Held):
        raise TypeError(f"delivery: {delivery.request_id!r} is not RabbitMQ's")
    return delivery.token


def _scalars(headers: Mapping[str, object] | None) -> dict[str, HeaderValue]:
    """The headers that are plain values; the broker's own lists and tables are left out."""
    return {
        name: value
        for name, value in (headers or {}).items()
        if isinstance(value, str | int | float | bool) and name != REQUEST_ID
    }
