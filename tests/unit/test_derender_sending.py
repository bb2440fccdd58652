"""Messages leave by the way that each client has chosen, and none holds up the other for longer than it must."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from msgspec import Raw

from headrace.broker.embedded import Embedded
from headrace.broker.ports import Broker, BrokerError, BrokerUnavailable, MessageTooLarge, TopicMessage
from headrace.client.parts import Parts
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, PartEvent
from headrace.workers.derender.sending import insist, send
from tests.line import WAIT_S


class Topics:
    """Client topics that take messages up to a size, and refuse as often as they are told to."""

    def __init__(self, *refusals: BrokerError, most: int = 1000) -> None:
        self.refusals = list(refusals)
        self.most = most
        self.sent: list[bytes] = []
        self.tried = asyncio.Event()

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        self.tried.set()
        if self.refusals:
            raise self.refusals.pop(0)
        if any(len(message.body) > self.most for message in messages):
            raise MessageTooLarge("over the limit", self.most)
        self.sent += [message.body for message in messages]


def broker(amqp: Topics, redis: Topics) -> Broker:
    return replace(Embedded().broker, topics=amqp, streams=redis)  # type: ignore[arg-type]


def event(seq: int, size: int = 1) -> bytes:
    return jobs.encode(ChunkEvent(client="c", request_id="r", seq=seq, chunk=Raw(b'"%b"' % (b"x" * size))))


def message(*events: bytes) -> TopicMessage:
    return TopicMessage("c.chunk", jobs.pack(list(events)))


async def test_each_message_takes_its_own_way() -> None:
    amqp, redis = Topics(), Topics()
    async with asyncio.timeout(WAIT_S):
        await insist(broker(amqp, redis), {"amqp": [message(event(0))], "redis": [message(event(1))]}, pause=0.0)
        await insist(broker(amqp, redis), {"redis": [message(event(2))]}, pause=0.0)
        await insist(broker(amqp, redis), {}, pause=0.0)
    assert (amqp.sent, redis.sent) == ([event(0)], [event(1), event(2)])


async def test_what_could_not_be_sent_is_sent_again_and_nothing_overtakes_it() -> None:
    amqp, redis = Topics(BrokerUnavailable("away"), BrokerUnavailable("away")), Topics()
    both = {"amqp": [message(event(0))], "redis": [message(event(1))]}
    sending = asyncio.create_task(insist(broker(amqp, redis), both, pause=0.02))  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        await redis.tried.wait()
        assert redis.sent == [event(1)]
        assert not sending.done()
        await sending
    assert amqp.sent == [event(0)]


async def test_what_is_refused_for_good_holds_up_nobody() -> None:
    amqp, redis = Topics(BrokerError("may not")), Topics()
    async with asyncio.timeout(WAIT_S):
        for n in range(2):
            await insist(broker(amqp, redis), {"amqp": [message(event(n))]}, pause=60.0)
    assert amqp.sent == [event(1)]


async def test_a_pack_that_is_too_large_is_sent_event_by_event_and_one_too_large_by_itself_in_parts() -> None:
    amqp = Topics(most=300)
    pack = message(event(0), event(1, size=500), event(2))
    for way in (
        send(broker(amqp, Topics()), {"amqp": [pack]}),
        insist(broker(amqp, Topics()), {"amqp": [pack]}, pause=60),
    ):
        amqp.sent.clear()
        await way
        first, *parts, last = amqp.sent
        assert (first, last) == (event(0), event(2))
        assert len(parts) > 1
        together = Parts()
        whole = [
            together.add(part) for body in parts for part in jobs.decode_events(body) if isinstance(part, PartEvent)
        ]
        assert whole[-1] == event(1, size=500)
