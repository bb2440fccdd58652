"""What a WorkQueue promises. Subclass it under a name that starts with ``Test`` and give it ``connect``."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from headrace.broker.ports import Delivery, Message, MessageTooLarge, QueueFull, Unroutable, WorkQueue
from headrace.protocol.jobs import DEAD_QUEUE, INTAKE_QUEUE

BOUND: Final = 15.0
"""Seconds that anything promised may take on a busy machine."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How a contract test wants its transport: messages per queue, bytes per body, seconds of each retry rung."""

    max_length: int = 1_000
    max_body: int = 1 << 20
    rungs: tuple[float, ...] = (0.2, 0.4)


DEFAULT_LIMITS: Final = QueueLimits()


def a_queue() -> str:
    """A queue that no other test knows."""
    return f"render.contract-{uuid.uuid4().hex[:12]}"


def message(n: int = 0, **headers: str | int | float | bool) -> Message:
    """A job, so that a queue which looks into those has something to do."""
    job = b'{"type":"generate","client":"contract","request_id":"r%d","model":"m","request":{"n":%d}}' % (n, n)
    return Message(body=job, request_id=f"r{n}", headers=headers)


async def take(deliveries: AsyncIterator[Delivery], count: int) -> list[Delivery]:
    """The next ``count`` deliveries. Raises TimeoutError when they do not come within the bound."""
    async with asyncio.timeout(BOUND):
        return [await anext(deliveries) for _ in range(count)]


async def find(deliveries: AsyncIterator[Delivery], request_id: str) -> Delivery:
    """The next delivery of this request; a shared queue also holds what other tests left."""
    async with asyncio.timeout(BOUND):
        async for delivery in deliveries:
            if delivery.request_id == request_id:
                return delivery
    raise AssertionError(f"the deliveries ended before {request_id}")


def bodies(deliveries: Iterable[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


class WorkQueueContract(ABC):
    """Each call of ``connect`` is one more process on the same broker."""

    @abstractmethod
    def connect(self, limits: QueueLimits = DEFAULT_LIMITS) -> AbstractAsyncContextManager[WorkQueue]:
        """Connects under these limits; leaving the context closes the connection."""

    async def test_a_message_arrives_as_it_was_sent_and_an_ack_removes_it(self) -> None:
        queue = a_queue()
        sent = Message(
            body=b'{"text":"\xc3\xa9\x00"}',
            request_id="r-1",
            headers={"traceparent": "00-ab-cd-01", "attempt": 2, "share": 0.5, "first": True},
        )
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, sent)
            async with queues.consume(queue, prefetch=4) as deliveries:
                (delivery,) = await take(deliveries, 1)
                assert (delivery.queue, delivery.body, delivery.request_id) == (queue, sent.body, "r-1")
                assert dict(delivery.headers) == dict(sent.headers)
                assert not delivery.redelivered
                await queues.ack(delivery)
        async with self.connect() as queues:
            assert await queues.depth(queue) == 0

    async def test_an_empty_body_and_a_body_of_many_frames_arrive_whole(self) -> None:
        queue, sent = a_queue(), [b"", bytes(range(256)) * 2_000]
        async with self.connect() as queues:
            await queues.declare([queue])
            for body in sent:
                await queues.publish(queue, Message(body=body))
            async with queues.consume(queue, prefetch=4) as deliveries:
                assert bodies(await take(deliveries, 2)) == sent

    async def test_the_longest_request_id_arrives_whole(self) -> None:
        queue, request_id = a_queue(), "é" * 256
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", request_id, {"attempt": 1}))
            async with queues.consume(queue, prefetch=1) as deliveries:
                (delivery,) = await take(deliveries, 1)
                assert (delivery.request_id, dict(delivery.headers)) == (request_id, {"attempt": 1})

    async def test_messages_of_one_publisher_come_in_order(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            for n in range(50):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=7) as deliveries:
                for n in range(50):
                    (delivery,) = await take(deliveries, 1)
                    assert delivery.body == message(n).body
                    await queues.ack(delivery)

    async def test_concurrent_publishes_are_each_stored_once(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            async with asyncio.TaskGroup() as group:
                for n in range(200):
                    group.create_task(queues.publish(queue, message(n)))
            async with queues.consume(queue, prefetch=200) as deliveries:
                taken = await take(deliveries, 200)
            assert sorted(bodies(taken)) == sorted(message(n).body for n in range(200))

    async def test_declaring_again_changes_nothing(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, message())
            await queues.declare([queue, queue])
            assert await queues.depth(queue) == 1

    async def test_what_was_not_settled_comes_back_when_its_holder_is_gone(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            for n in range(3):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=3) as deliveries:
                await queues.ack((await take(deliveries, 3))[1])
        async with self.connect() as queues, queues.consume(queue, prefetch=3) as deliveries:
            again = await take(deliveries, 2)
            assert sorted(bodies(again)) == [message(0).body, message(2).body]
            assert all(delivery.redelivered for delivery in again)

    async def test_what_was_taken_can_be_settled_after_the_taking_has_stopped(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, message())
            async with queues.consume(queue, prefetch=1) as deliveries:
                (delivery,) = await take(deliveries, 1)
            await queues.ack(delivery)
        async with self.connect() as queues:
            assert await queues.depth(queue) == 0

    async def test_what_was_fetched_and_not_taken_goes_to_others_when_the_taking_stops(self) -> None:
        queue = a_queue()
        async with self.connect() as queues, self.connect() as others:
            await queues.declare([queue])
            for n in range(4):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=4) as deliveries:
                held = await take(deliveries, 1)
            async with others.consume(queue, prefetch=4) as deliveries:
                rest = await take(deliveries, 3)
            assert sorted(bodies(held + rest)) == [message(n).body for n in range(4)]
            await queues.ack(held[0])

    async def test_a_released_message_comes_back_at_once_as_redelivered(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, message(7, attempt=1))
            async with queues.consume(queue, prefetch=1) as deliveries:
                (first,) = await take(deliveries, 1)
                await queues.release(first)
                (second,) = await take(deliveries, 1)
                assert (second.body, second.headers["attempt"], second.redelivered) == (first.body, 1, True)

    async def test_no_more_than_prefetch_are_held_unsettled(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            for n in range(5):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=2) as deliveries:
                await take(deliveries, 2)
                assert await queues.depth(queue) == 3
                try:
                    await asyncio.wait_for(anext(deliveries), 0.05)
                except TimeoutError:
                    return
                raise AssertionError("a third delivery under prefetch 2")

    async def test_an_ack_makes_room_for_the_next_message(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            for n in range(3):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=1) as deliveries:
                for n in range(3):
                    (delivery,) = await take(deliveries, 1)
                    assert delivery.body == message(n).body
                    assert await queues.depth(queue) == 2 - n
                    await queues.ack(delivery)

    async def test_two_consumers_share_a_queue(self) -> None:
        queue = a_queue()
        async with self.connect() as one, self.connect() as two:
            await one.declare([queue])
            async with one.consume(queue, prefetch=5) as first, two.consume(queue, prefetch=5) as second:
                for n in range(10):
                    await one.publish(queue, message(n))
                # Nobody settles, so each holds as many as it may.
                taken = bodies(await take(first, 5)) + bodies(await take(second, 5))
                assert sorted(taken) == [message(n).body for n in range(10)]

    async def test_a_wait_that_is_given_up_loses_no_message(self) -> None:
        queue = a_queue()
        got: list[Delivery] = []
        async with self.connect() as queues:
            await queues.declare([queue])

            async def publish_slowly() -> None:
                for n in range(20):
                    await queues.publish(queue, message(n))

            async with queues.consume(queue, prefetch=50) as deliveries, asyncio.timeout(BOUND):
                for _ in range(20):
                    try:
                        await asyncio.wait_for(anext(deliveries), 0.002)
                    except TimeoutError:
                        continue
                    raise AssertionError("a delivery out of nowhere")
                publishing = asyncio.create_task(publish_slowly())
                while len(got) < 20:
                    try:
                        got.append(await asyncio.wait_for(anext(deliveries), 0.001))
                    except TimeoutError:
                        continue
                await publishing
        assert bodies(got) == [message(n).body for n in range(20)]

    async def test_a_retried_message_comes_back_to_its_queue_after_the_delay_with_its_headers(self) -> None:
        queue, other = a_queue(), a_queue()
        async with self.connect() as queues:
            await queues.declare([queue, other])
            await queues.publish(queue, message(1, attempt=1, traceparent="t"))
            async with queues.consume(queue, prefetch=1) as deliveries, queues.consume(other, prefetch=1):
                (first,) = await take(deliveries, 1)
                began = time.monotonic()
                await queues.retry(first, 0.2, {"attempt": 2})
                (second,) = await take(deliveries, 1)
                assert time.monotonic() - began >= 0.1
                assert (second.queue, second.body, second.request_id) == (queue, first.body, first.request_id)
                assert {"attempt": 2, "traceparent": "t"}.items() <= dict(second.headers).items()
                await queues.ack(second)
            assert await queues.depth(queue) == 0
            assert await queues.depth(other) == 0

    async def test_a_buried_message_lies_under_dead_with_its_reason_and_origin(self) -> None:
        queue, request_id = a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", request_id, {"traceparent": "t"}))
            before = time.time()
            async with queues.consume(queue, prefetch=1) as deliveries:
                await queues.bury((await take(deliveries, 1))[0], "its body is not JSON")
            async with queues.consume(DEAD_QUEUE, prefetch=500) as dead:
                found = await find(dead, request_id)
                assert found.body == b"{}"
                assert found.headers["x-headrace-reason"] == "its body is not JSON"
                assert found.headers["x-headrace-queue"] == queue
                at = found.headers["x-headrace-at"]
                assert isinstance(at, float) and before - 1 <= at <= time.time() + 1
                assert found.headers["traceparent"] == "t"
                await queues.ack(found)
            assert await queues.depth(queue) == 0

    async def test_a_queue_that_nobody_declared_is_unroutable(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            for name in (queue, "render." + "é" * 200):
                for ask in (queues.publish(name, message()), queues.depth(name), self._enter(queues, name)):
                    try:
                        await ask
                    except Unroutable as refused:
                        assert name in str(refused)
                    else:
                        raise AssertionError("an undeclared queue was accepted")

    @staticmethod
    async def _enter(queues: WorkQueue, queue: str) -> None:
        async with queues.consume(queue, prefetch=1):
            pass

    async def test_an_unroutable_message_harms_no_other(self) -> None:
        queue, missing = a_queue(), a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            sent = [queues.publish(missing if n % 3 == 0 else queue, message(n)) for n in range(30)]
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
            assert [isinstance(outcome, Unroutable) for outcome in outcomes] == [n % 3 == 0 for n in range(30)]
            assert await queues.depth(queue) == 20

    async def test_a_full_queue_rejects_and_takes_again_once_there_is_room(self) -> None:
        queue = a_queue()
        stored, refused = 0, None
        async with self.connect(QueueLimits(max_length=5)) as queues:
            await queues.declare([queue])
            for n in range(100):  # the limit of a replicated queue is met a few messages late
                try:
                    await queues.publish(queue, message(n))
                except QueueFull as full:
                    refused = full
                    break
                stored += 1
            assert refused is not None and queue in str(refused) and refused.retry_after > 0
            async with queues.consume(queue, prefetch=100) as deliveries:
                for delivery in await take(deliveries, stored):
                    await queues.ack(delivery)
            async with asyncio.timeout(BOUND):
                while True:
                    try:
                        await queues.publish(queue, message(1_000))
                        break
                    except QueueFull:
                        await asyncio.sleep(0.01)

    async def test_a_body_over_the_limit_is_refused_before_it_is_sent(self) -> None:
        queue = a_queue()
        async with self.connect(QueueLimits(max_body=1_000)) as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"x" * 1_000))
            try:
                await queues.publish(queue, Message(b"x" * 1_001))
            except MessageTooLarge as refused:
                assert "1001" in str(refused) and "1000" in str(refused)
            else:
                raise AssertionError("a body over the limit was accepted")
            assert await queues.depth(queue) == 1

    async def test_any_mix_of_settlements_loses_nothing_and_acks_each_message_once(self) -> None:
        queue, draw = a_queue(), random.Random(20)
        acked: list[bytes] = []
        async with self.connect() as queues:
            await queues.declare([queue])
            for n in range(30):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=8) as deliveries, asyncio.timeout(2 * BOUND):
                while len(acked) < 30:
                    delivery = await anext(deliveries)
                    how = draw.choice(("ack", "ack", "release", "retry"))
                    if how == "ack":
                        await queues.ack(delivery)
                        acked.append(delivery.body)
                    elif how == "release":
                        await queues.release(delivery)
                    else:
                        await queues.retry(delivery, 0.2)
        assert sorted(acked) == sorted(message(n).body for n in range(30))
        async with self.connect() as queues:
            assert await queues.depth(queue) == 0

    # ------------------------------------------------------------------------------------------ given up, and moved

    async def test_what_expires_in_its_queue_goes_to_the_intake_and_says_why(self) -> None:
        queue, name = a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b'{"n":1}', name, {"attempt": 1}, expires=time.time() + 0.1))
            async with queues.consume(INTAKE_QUEUE, prefetch=64) as intake:
                late = await find(intake, name)
                assert (late.body, late.headers["attempt"], late.gave_up) == (b'{"n":1}', 1, "expired")
                await queues.bury(late, "it was late")
            assert await queues.depth(queue) == 0
            async with queues.consume(DEAD_QUEUE, prefetch=64) as dead:
                buried = await find(dead, name)
                assert (buried.headers["x-headrace-queue"], buried.gave_up) == (queue, None)
                await queues.ack(buried)

    async def test_what_is_taken_in_time_does_not_expire_any_more(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", expires=time.time() + 60))
            async with queues.consume(queue, prefetch=1) as deliveries:
                (delivery,) = await take(deliveries, 1)
                assert delivery.gave_up is None
                await queues.retry(delivery, 0.2)
                (again,) = await take(deliveries, 1)
                assert again.gave_up is None
                await queues.ack(again)

    async def test_a_message_is_moved_with_its_headers_and_is_gone_where_it_was(self) -> None:
        queue, other = a_queue(), a_queue()
        async with self.connect() as queues:
            await queues.declare([queue, other])
            await queues.publish(queue, message(1, attempt=2))
            async with queues.consume(queue, prefetch=1) as deliveries:
                (delivery,) = await take(deliveries, 1)
                (refused,) = await asyncio.gather(queues.move(delivery, a_queue()), return_exceptions=True)
                assert isinstance(refused, Unroutable)
                await queues.move(delivery, other)
            async with queues.consume(other, prefetch=1) as deliveries:
                (moved,) = await take(deliveries, 1)
                assert (moved.body, moved.request_id, moved.headers["attempt"]) == (message(1).body, "r1", 2)
                await queues.ack(moved)
        async with self.connect() as queues:
            assert await queues.depth(queue) == await queues.depth(other) == 0

    async def test_a_full_queue_takes_no_message_that_is_moved_and_it_stays(self) -> None:
        queue, full = a_queue(), a_queue()
        async with self.connect(QueueLimits(max_length=5)) as queues:
            await queues.declare([queue, full])
            async with queues.consume(queue, prefetch=1) as deliveries:
                for n in range(100):  # the limit of a replicated queue is met a few messages late
                    await queues.publish(queue, message(n))
                    (delivery,) = await take(deliveries, 1)
                    try:
                        await queues.move(delivery, full)
                    except QueueFull as refused:
                        assert full in str(refused)
                        break
                else:
                    raise AssertionError("a full queue takes what is moved")
                await queues.release(delivery)
                (again,) = await take(deliveries, 1)
                assert again.body == message(n).body
                await queues.ack(again)

    async def test_history_is_filed_with_the_reason_however_long_that_is(self) -> None:
        queue, name = a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", name, {"traceparent": "00-ab"}))
            async with queues.consume(queue, prefetch=1) as deliveries:
                (delivery,) = await take(deliveries, 1)
                await queues.bury(delivery, "why " * 100_000, {"x-headrace-failures": 5})
            async with queues.consume(DEAD_QUEUE, prefetch=64) as dead:
                buried = await find(dead, name)
                assert (buried.headers["x-headrace-failures"], buried.headers["traceparent"]) == (5, "00-ab")
                assert str(buried.headers["x-headrace-reason"]).startswith("why why")
                await queues.ack(buried)

    async def test_what_expires_behind_others_is_given_up_when_they_are_gone_though_nobody_takes_it(self) -> None:
        queue, name = a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", expires=time.time() + 3600))
            await queues.publish(queue, Message(b"{}", name, expires=time.time() + 0.2))
            async with queues.consume(queue, prefetch=1) as deliveries, queues.consume(INTAKE_QUEUE, 64) as intake:
                (first,) = await take(deliveries, 1)
                late = await find(intake, name)
                assert late.gave_up == "expired"
                await queues.ack(late)
                await queues.ack(first)

    async def test_what_is_retried_in_the_intake_still_says_why_it_is_there_and_where_it_came_from(self) -> None:
        queue, name = a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", name, {"attempt": 1}, expires=time.time() + 0.05))
            async with queues.consume(INTAKE_QUEUE, prefetch=64) as intake:
                for _ in range(2):
                    late = await find(intake, name)
                    assert (late.gave_up, late.headers["attempt"]) == ("expired", 1)
                    await queues.retry(late, 0.2)
                await queues.bury(await find(intake, name), "it was late")
            async with queues.consume(DEAD_QUEUE, prefetch=64) as dead:
                buried = await find(dead, name)
                assert (buried.headers["x-headrace-queue"], buried.gave_up) == (queue, None)
                await queues.ack(buried)

    async def test_a_retried_message_is_buried_under_its_queue(self) -> None:
        queue, name = a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue])
            await queues.publish(queue, Message(b"{}", name))
            async with queues.consume(queue, prefetch=1) as deliveries:
                await queues.retry((await take(deliveries, 1))[0], 0.2)
                await queues.bury((await take(deliveries, 1))[0], "it failed twice")
            async with queues.consume(DEAD_QUEUE, prefetch=64) as dead:
                buried = await find(dead, name)
                assert buried.headers["x-headrace-queue"] == queue
                await queues.ack(buried)

    async def test_a_moved_message_expires_by_its_new_time(self) -> None:
        queue, other, name = a_queue(), a_queue(), uuid.uuid4().hex
        async with self.connect() as queues:
            await queues.declare([queue, other])
            await queues.publish(queue, Message(b"{}", name, expires=time.time() + 3600))
            async with queues.consume(queue, prefetch=1) as deliveries, queues.consume(INTAKE_QUEUE, 64) as intake:
                await queues.move((await take(deliveries, 1))[0], other, time.time() + 0.1)
                late = await find(intake, name)
                await queues.bury(late, "it was late")
            async with queues.consume(DEAD_QUEUE, prefetch=64) as dead:
                buried = await find(dead, name)
                assert buried.headers["x-headrace-queue"] == other
                await queues.ack(buried)

    async def test_a_time_beyond_all_bounds_is_none(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            for expires in (time.time() + 60 * 24 * 3600, 1e308):
                await queues.publish(queue, Message(b"{}", expires=expires))
            async with queues.consume(queue, prefetch=2) as deliveries:
                for delivery in await take(deliveries, 2):
                    await queues.ack(delivery)

    async def test_what_is_given_back_in_order_comes_first_and_in_order(self) -> None:
        queue = a_queue()
        async with self.connect() as queues:
            await queues.declare([queue])
            for n in range(8):
                await queues.publish(queue, message(n))
            async with queues.consume(queue, prefetch=5) as deliveries:
                taken = await take(deliveries, 5)
            for delivery in taken:
                await queues.release(delivery)
            async with queues.consume(queue, prefetch=8) as deliveries:
                again = await take(deliveries, 8)
                assert bodies(again) == [message(n).body for n in range(8)]
                for delivery in again:
                    await queues.ack(delivery)
