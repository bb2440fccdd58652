"""ClientTopics on RabbitMQ: one topic exchange, a bounded queue per subscription."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

from headrace.broker.ports import TopicMessage
from headrace.broker.rabbitmq import topology
from headrace.broker.rabbitmq.channel import Lane, Outcome, Outgoing, check_size, request_id_of
from headrace.broker.rabbitmq.connection import Supervisor
from headrace.broker.rabbitmq.consumer import Consumer, Held
from headrace.broker.rabbitmq.publisher import Publisher
from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE

_PERSISTENT: Final = 2
PREFETCH: Final = 512
"""Messages that a client has in hand and not yet settled. The rest waits, and ages, in its queue at the broker."""


class RabbitClientTopics:
    """Durable messages are waited for and come back when nobody subscribes; transient ones are sent, and sent again
    where a connection is lost before the broker has them: twice rather than never.

    A subscription acks what it has been given, many at once: a queue consumed without acks would push its backlog into
    the client's memory, past the queue's own bound.
    """

    def __init__(self, publishing: Supervisor, consuming: Supervisor, max_body: int) -> None:
        self._publisher = Publisher(publishing, topology.declare_topics)
        self._consuming = consuming
        self._max_body = max_body
        self._counters = publishing.counters

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        for message in messages:
            check_size(message.body, self._max_body)
        outgoing = [
            Outgoing(TOPIC_EXCHANGE, message.key, message.body, message.request_id, durable=message.durable)
            for message in messages
        ]
        outcomes = await self._publisher.publish(outgoing, "publish to the client topics")
        self._counters.unheard += outcomes.count(Outcome.RETURNED)

    async def flush(self) -> None:
        """Transient messages are confirmed too, only nobody waits for it; this does. Raises BrokerUnavailable."""
        await self._publisher.flush("flush the client topics")

    @asynccontextmanager
    async def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        """A name subscribed to again under another pattern listens to both."""
        if limit < 2:
            raise ValueError(f"limit: {limit} is less than 2 messages")
        in_hand = min(PREFETCH, limit // 2)
        waiting = limit - in_hand

        async def attach(lane: Lane) -> str:
            # A new name on each channel: the broker may still know the old queue as held by the lost connection.
            own = name is None
            await topology.declare_topics(lane)
            declared = await lane.queue_declare(
                "" if own else f"client.{name}",
                durable=not own,
                exclusive=own,
                auto_delete=own,
                arguments=dict(topology.own_subscription(waiting) if own else topology.named_subscription(waiting)),
            )
            queue = declared.queue or ""
            await lane.queue_bind(queue, TOPIC_EXCHANGE, pattern)
            return queue

        consumer = Consumer(
            self._consuming, in_hand, attach, lambda held: held, subject=f"subscription {pattern!r}", settle_later=False
        )
        async with consumer:
            # What was told is told again after a crash unless it is acked; a process's own queue dies with it anyway.
            subscription = _Subscription(consumer, batch=1 if name is not None else max(1, in_hand // 2))
            yield subscription
            subscription.settle()


class _Subscription:
    """Gives out messages and acks them when the next is asked for, up to ``batch`` at once where they come that fast.

    Nothing stays unacked while there is nothing to give out: the broker takes back what is held for too long.
    """

    def __init__(self, consumer: Consumer[Held], batch: int) -> None:
        self._consumer = consumer
        self._given: Held | None = None
        self._unacked = 0
        self._batch = batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage:
        if self._unacked >= self._batch or not self._consumer.at_hand:
            self.settle()
        held = await anext(self._consumer)
        if self._given is not None and self._given.lane is not held.lane:
            self._unacked = 0
        self._given = held
        self._unacked += 1
        properties = held.message.header.properties
        return TopicMessage(
            key=held.message.routing_key or "",
            body=held.message.body,
            durable=properties.delivery_mode == _PERSISTENT,
            request_id=request_id_of(held.message),
        )

    def settle(self) -> None:
        """Acks all that was given out."""
        if self._given is not None:
            self._given.lane.ack_up_to(self._given.tag)
            self._given, self._unacked = None, 0
