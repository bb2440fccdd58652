"""The work queues' promises, kept in one process; and what only that one can promise."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.broker.contract.queues import DEFAULT_LIMITS, QueueLimits, WorkQueueContract, a_queue, message, take
from headrace.broker.embedded import Embedded, EmbeddedQueues
from headrace.broker.ports import Message, WorkQueue
from headrace.protocol.jobs import DEAD_QUEUE


class TestEmbeddedQueues(WorkQueueContract):
    @pytest.fixture(autouse=True)
    def _home(self) -> None:
        self.homes: dict[QueueLimits, Embedded] = {}

    @asynccontextmanager
    async def connect(self, limits: QueueLimits = DEFAULT_LIMITS) -> AsyncIterator[WorkQueue]:
        if limits not in self.homes:
            self.homes[limits] = Embedded(max_length=limits.max_length, max_body=limits.max_body)
        async with self.homes[limits].connect() as broker:
            yield broker.queues


async def test_a_late_settlement_on_a_closed_connection_changes_nothing_and_is_counted() -> None:
    home, queue = Embedded(), a_queue()
    async with home.connect() as broker:
        queues = broker.queues
        await queues.declare([queue])
        await queues.publish(queue, message())
        async with queues.consume(queue, prefetch=1) as deliveries:
            (held,) = await take(deliveries, 1)
    await queues.ack(held)
    await queues.release(held)
    await queues.retry(held, 0.0)
    await queues.bury(held, "too late")
    assert isinstance(queues, EmbeddedQueues)
    assert queues.stale_settlements == 4
    assert (await queues.depth(queue), await queues.depth(DEAD_QUEUE)) == (1, 0)


async def test_a_consumer_whose_connection_is_closed_ends() -> None:
    home, queue = Embedded(), a_queue()
    async with home.connect() as broker:
        await broker.queues.declare([queue])
        entering = broker.queues.consume(queue, prefetch=1)
        deliveries = await entering.__aenter__()
        waiting = asyncio.create_task(_next_or_none(deliveries))
    assert await waiting is None


async def _next_or_none(deliveries: AsyncIterator[object]) -> object | None:
    return await anext(deliveries, None)


async def test_a_publisher_and_a_consumer_that_never_rest_leave_room_for_others() -> None:
    home, queue = Embedded(), a_queue()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await home.broker.queues.declare([queue])
    running = asyncio.create_task(others())
    for n in range(100):
        await home.broker.queues.publish(queue, message(n))
    async with home.broker.queues.consume(queue, prefetch=1) as deliveries:
        for delivery in [await anext(deliveries)]:
            await home.broker.queues.ack(delivery)
        for _ in range(99):
            await home.broker.queues.ack(await anext(deliveries))
    running.cancel()
    assert turns >= 200


async def test_what_the_publisher_changes_afterwards_does_not_reach_the_queue() -> None:
    home, queue = Embedded(), a_queue()
    headers = {"attempt": 1}
    await home.broker.queues.declare([queue])
    await home.broker.queues.publish(queue, Message(b"", "r", headers))
    headers["attempt"] = 2
    async with home.broker.queues.consume(queue, prefetch=1) as deliveries:
        assert (await anext(deliveries)).headers == {"attempt": 1}


async def test_the_dead_make_room_for_the_dead() -> None:
    home, queue = Embedded(max_length=3), a_queue()
    await home.broker.queues.declare([queue])
    async with home.broker.queues.consume(queue, prefetch=1) as deliveries:
        for n in range(5):
            await home.broker.queues.publish(queue, message(n))
            await home.broker.queues.bury(await anext(deliveries), "poison")
    async with home.broker.queues.consume(DEAD_QUEUE, prefetch=9) as dead:
        assert [each.request_id for each in await take(dead, 3)] == ["r2", "r3", "r4"]


async def test_closing_forgets_what_waits_to_be_retried() -> None:
    home, queue = Embedded(), a_queue()
    await home.broker.queues.declare([queue])
    await home.broker.queues.publish(queue, message())
    async with home.broker.queues.consume(queue, prefetch=1) as deliveries:
        await home.broker.queues.retry(await anext(deliveries), 0.0)
        home.close()
        await asyncio.sleep(0)
    assert await home.broker.queues.depth(queue) == 0


async def test_a_delivery_of_another_broker_is_refused() -> None:
    home, queue = Embedded(), a_queue()
    await home.broker.queues.declare([queue])
    await home.broker.queues.publish(queue, message())
    async with home.broker.queues.consume(queue, prefetch=1) as deliveries:
        delivery = await anext(deliveries)
    object.__setattr__(delivery, "token", 7)
    with pytest.raises(TypeError, match="r0"):
        await home.broker.queues.ack(delivery)


async def test_a_prefetch_below_one_is_refused() -> None:
    home, queue = Embedded(), a_queue()
    await home.broker.queues.declare([queue])
    with pytest.raises(ValueError, match="prefetch: 0"):
        async with home.broker.queues.consume(queue, prefetch=0):
            pass
