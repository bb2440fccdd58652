"""Work queues in this process: what a broker would keep, and what one connection to it holds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, Self

from headrace.broker.ports import Delivery, HeaderValue, Message, MessageTooLarge, QueueFull, Unroutable
from headrace.protocol.jobs import CONTROL_QUEUE, DEAD_QUEUE, INTAKE_QUEUE

RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a queue. ``redelivered``: someone held it before."""

    message: Message
    redelivered: bool = False


class StoredQueue:
    """The messages that wait, and the consumers that wait for one."""

    __slots__ = ("_idle", "name", "ready")

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.ready: deque[Stored] = deque(maxlen=limit)
        self._idle: list[asyncio.Future[None]] = []

    def add(self, stored: Stored) -> None:
        self.ready.append(stored)
        self.stir()

    def give_back(self, message: Message) -> None:
        """Puts it first, as one that was held before; it is the first to make room, too."""
        if len(self.ready) != self.ready.maxlen:
            self.ready.appendleft(Stored(message, redelivered=True))
            self.stir()

    def stir(self) -> None:
        """Has every idle consumer look again."""
        idle, self._idle = self._idle, []
        for waiter in idle:
            if not waiter.done():
                waiter.set_result(None)

    async def idle(self) -> None:
        """Waits until there may be something new."""
        waiter = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._idle:
                self._idle.remove(waiter)


class Queues:
    """What the broker keeps: the queues, and what waits to be retried. At most ``max_length`` messages a queue."""

    def __init__(self, max_length: int, max_body: int, clock: Callable[[], float] = time.time) -> None:
        self.max_length = max_length
        self.max_body = max_body
        self.clock = clock
        # The dead make room for the dead: in one process nobody else would.
        self._queues = {DEAD_QUEUE: StoredQueue(DEAD_QUEUE, max_length)}
        self._later: set[asyncio.TimerHandle] = set()
        self.declare((CONTROL_QUEUE, INTAKE_QUEUE))

    def declare(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._queues:
                self._queues[name] = StoredQueue(name)

    def find(self, name: str) -> StoredQueue:
        if name not in self._queues:
            raise Unroutable(f"no queue {name!r}: this role or model is not served here")
        return self._queues[name]

    def add_later(self, name: str, message: Message, delay: float) -> None:
        """Adds it to its queue after ``delay`` seconds."""

        def add() -> None:
            self._later.discard(timer)
            self.find(name).add(Stored(message))

        timer = asyncio.get_running_loop().call_later(delay, add)
        self._later.add(timer)

    def close(self) -> None:
        """Forgets what waits to be retried."""
        for timer in self._later:
            timer.cancel()
        self._later.clear()


@dataclass(eq=False, slots=True)
class Held:
    """A message that a connection holds, for one of its consumers."""

    message: Message
    consumer: Consumer


class EmbeddedQueues:
    """The WorkQueue of ports, in one process. Each one is a connection: what it holds comes back when it is closed."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._held: set[Held] = set()
        self._consumers: set[Consumer] = set()
        self.stale_settlements = 0

    async def declare(self, queues: Iterable[str]) -> None:
        """Makes the queues exist."""
        self._queues.declare(queues)

    async def publish(self, queue: str, message: Message) -> None:
        """Returns once the message is in the queue. Raises Unroutable, QueueFull, MessageTooLarge."""
        most = self._queues.max_body
        if len(message.body) > most:
            raise MessageTooLarge(f"body: {len(message.body)} bytes are over the limit of {most}")
        target = self._queues.find(queue)
        if len(target.ready) >= self._queues.max_length:
            raise QueueFull(f"queue {queue!r} is full, try again in {RETRY_AFTER_S:g} s", RETRY_AFTER_S)
        target.add(Stored(replace(message, headers=dict(message.headers))))
        await asyncio.sleep(0)  # a publisher in a loop must not keep its consumers from running

    @asynccontextmanager
    async def consume(self, queue: str, prefetch: int) -> AsyncIterator[AsyncIterator[Delivery]]:
        """Deliveries, at most ``prefetch`` unsettled at a time. Leaving the context stops taking."""
        if prefetch < 1:
            raise ValueError(f"prefetch: {prefetch} is less than 1")
        consumer = Consumer(self._queues.find(queue), prefetch, self._held)
        self._consumers.add(consumer)
        try:
            yield consumer
        finally:
            self._consumers.discard(consumer)
            consumer.stop()

    async def ack(self, delivery: Delivery) -> None:
        """Done with it."""
        self._settle(delivery)

    async def release(self, delivery: Delivery) -> None:
        """Gives it back to its queue, at once."""
        held = self._settle(delivery)
        if held is not None:
            held.consumer.queue.give_back(held.message)

    async def retry(self, delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """Gives it back to its queue after ``delay`` seconds, headers added."""
        held = self._settle(delivery)
        if held is not None:
            self._queues.add_later(delivery.queue, _with(held.message, headers or {}), delay)

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """Files it under ``dead`` with the reason and where it came from."""
        held = self._settle(delivery)
        if held is not None:
            told: dict[str, HeaderValue] = {
                "x-headrace-reason": reason,
                "x-headrace-queue": delivery.queue,
                "x-headrace-at": self._queues.clock(),
            }
            self._queues.find(DEAD_QUEUE).add(Stored(_with(held.message, told)))

    async def depth(self, queue: str) -> int:
        """How many messages wait in the queue. Raises Unroutable."""
        return len(self._queues.find(queue).ready)

    def close(self) -> None:
        """Ends the connection: its consumers stop, what it holds goes back to its queues."""
        for consumer in self._consumers:
            consumer.stop()
        for held in self._held:
            held.consumer.queue.give_back(held.message)
        self._held.clear()

    def _settle(self, delivery: Delivery) -> Held | None:
        """What the delivery stands for, which is held no more; None if it was not."""
        held = delivery.token
        if not isinstance(held, Held):
            raise TypeError(f"delivery: {delivery.request_id!r} is not of an embedded queue")
        if held not in self._held:
            self.stale_settlements += 1
            return None
        self._held.discard(held)
        held.consumer.settled()
        return held


class Consumer:
    """Takes messages out of a queue as they are asked for."""

    def __init__(self, queue: StoredQueue, prefetch: int, held: set[Held]) -> None:
        self.queue = queue
        self._room = prefetch
        self._held = held
        self._stopped = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        await asyncio.sleep(0)  # one that takes in a loop must not keep the others from their share
        while not self._stopped:
            if self._room and self.queue.ready:
                return self._take()
            await self.queue.idle()
        raise StopAsyncIteration

    def _take(self) -> Delivery:
        stored = self.queue.ready.popleft()
        message = stored.message
        held = Held(message, self)
        self._held.add(held)
        self._room -= 1
        return Delivery(self.queue.name, message.body, message.request_id, message.headers, stored.redelivered, held)

    def settled(self) -> None:
        """One that it took is settled: there is room for the next."""
        self._room += 1
        self.queue.stir()

    def stop(self) -> None:
        """Takes no more."""
        self._stopped = True
        self.queue.stir()


def _with(message: Message, headers: Mapping[str, HeaderValue]) -> Message:
    return replace(message, headers={**message.headers, **headers})
