"""Work queues in this process: what a broker would keep, and what one connection to it holds."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal, Self

from headrace.broker.ports import Delivery, HeaderValue, Message, MessageTooLarge, QueueFull, Unroutable
from headrace.protocol.jobs import CONTROL_QUEUE, DEAD_QUEUE, INTAKE_QUEUE

RETRY_AFTER_S: Final = 1.0
MAX_HEADER: Final = 1_000
"""Characters of a text in a header that is added."""
LEAST_WAIT_S: Final = 1e-3
"""Before a timer looks again: a clock of another make than the event loop's may be a little behind it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a queue. ``redelivered``: someone held it. ``gave_up``: why it was taken out of ``origin``."""

    message: Message
    redelivered: bool = False
    origin: str | None = None
    gave_up: Literal["expired"] | None = None


class StoredQueue:
    """The messages that wait, and the consumers that wait for one."""

    __slots__ = ("_idle", "_returned", "alarm", "alarm_at", "name", "ready")

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.ready: deque[Stored] = deque(maxlen=limit)
        self._returned = 0
        """How many of them, the first ones, were given back."""
        self.alarm: asyncio.TimerHandle | None = None
        self.alarm_at = inf
        """When a timer looks whether the first one has expired, Unix seconds."""
        self._idle: list[asyncio.Future[None]] = []

    def add(self, stored: Stored) -> None:
        self.ready.append(stored)
        self.stir()

    def give_back(self, stored: Stored) -> None:
        """Puts it before those that nobody has held yet; it is the first to make room, too."""
        if len(self.ready) != self.ready.maxlen:
            self.ready.insert(self._returned, replace(stored, redelivered=True))
            self._returned += 1
            self.stir()

    def pop(self) -> Stored:
        """The first one."""
        self._returned = max(0, self._returned - 1)
        return self.ready.popleft()

    @property
    def expires(self) -> float:
        """When the first one expires."""
        expires = self.ready[0].message.expires if self.ready else None
        return inf if expires is None else expires

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

    def look(self, queue: StoredQueue) -> None:
        """Takes what has expired from the head of a queue into the intake; what stands behind others waits its turn.

        Called whenever another message may be the first: a timer looks again when that one expires.
        """
        while queue.expires <= self.clock():
            message = replace(queue.pop().message, expires=None)
            self.find(INTAKE_QUEUE).add(Stored(message, origin=queue.name, gave_up="expired"))
        if queue.expires < queue.alarm_at:
            self._watch(queue)

    def _watch(self, queue: StoredQueue) -> None:
        def look() -> None:
            queue.alarm, queue.alarm_at = None, inf
            self.look(queue)

        if queue.alarm is not None:
            queue.alarm.cancel()
            self._later.discard(queue.alarm)
        queue.alarm_at = queue.expires
        queue.alarm = self._do_later(max(LEAST_WAIT_S, queue.alarm_at - self.clock()), look)

    def add_later(self, name: str, stored: Stored, delay: float) -> None:
        """Adds it to its queue after ``delay`` seconds."""
        self._do_later(delay, lambda: self.find(name).add(stored))

    def _do_later(self, delay: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        def do() -> None:
            self._later.discard(timer)
            what()

        timer = asyncio.get_running_loop().call_later(delay, do)
        self._later.add(timer)
        return timer

    def close(self) -> None:
        """Forgets what waits to be retried."""
        for timer in self._later:
            timer.cancel()
        self._later.clear()


@dataclass(eq=False, slots=True)
class Held:
    """A message that a connection holds, for one of its consumers."""

    stored: Stored
    consumer: Consumer


class EmbeddedQueues:
    """The WorkQueue of ports, in one process. Each one is a connection: what it holds comes back when it is closed."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._held: dict[Held, None] = {}
        self._consumers: set[Consumer] = set()
        self.stale_settlements = 0

    async def declare(self, queues: Iterable[str]) -> None:
        """Makes the queues exist."""
        self._queues.declare(queues)

    async def publish(self, queue: str, message: Message) -> None:
        """Returns once the message is in the queue. Raises Unroutable, QueueFull, MessageTooLarge."""
        most = self._queues.max_body
        if len(message.body) > most:
            raise MessageTooLarge(f"body: {len(message.body)} bytes are over the limit of {most}", most)
        target = self._target(queue)
        target.add(Stored(replace(message, headers=dict(message.headers))))
        self._queues.look(target)
        await asyncio.sleep(0)  # a publisher in a loop must not keep its consumers from running

    @asynccontextmanager
    async def consume(self, queue: str, prefetch: int) -> AsyncIterator[AsyncIterator[Delivery]]:
        """Deliveries, at most ``prefetch`` unsettled at a time. Leaving the context stops taking."""
        if prefetch < 1:
            raise ValueError(f"prefetch: {prefetch} is less than 1")
        consumer = Consumer(self._queues, self._queues.find(queue), prefetch, self._held)
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
            self._give_back(held)

    async def retry(self, delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """Gives it back to its queue after ``delay`` seconds, headers added; it does not expire any more."""
        held = self._settle(delivery)
        if held is not None:
            again = replace(_with(held.stored.message, headers or {}), expires=None)
            self._queues.add_later(delivery.queue, replace(held.stored, message=again, redelivered=False), delay)

    async def move(self, delivery: Delivery, queue: str, expires: float | None = None) -> None:
        """Hands it to another queue. Raises Unroutable, QueueFull."""
        target = self._target(queue)
        held = self._settle(delivery)
        if held is not None:
            target.add(Stored(replace(held.stored.message, expires=expires)))
            self._queues.look(target)

    async def bury(self, delivery: Delivery, reason: str, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """Files it under ``dead`` with the reason and where it came from, headers added."""
        held = self._settle(delivery)
        if held is not None:
            told: dict[str, HeaderValue] = {
                **(headers or {}),
                "x-headrace-reason": reason,
                "x-headrace-queue": held.stored.origin or delivery.queue,
                "x-headrace-at": self._queues.clock(),
            }
            self._queues.find(DEAD_QUEUE).add(Stored(replace(_with(held.stored.message, told), expires=None)))

    async def depth(self, queue: str) -> int:
        """How many messages wait in the queue. Raises Unroutable."""
        found = self._queues.find(queue)
        self._queues.look(found)
        return len(found.ready)

    def close(self) -> None:
        """Ends the connection: its consumers stop, what it holds goes back to its queues."""
        for consumer in self._consumers:
            consumer.stop()
        self.lose()

    def lose(self) -> None:
        """The connection was lost, and is there again: what it held is back in its queues, its consumers go on."""
        held = list(self._held)
        self._held.clear()
        for each in held:
            self._give_back(each)
        for each in held:
            each.consumer.settled()

    def _give_back(self, held: Held) -> None:
        queue = held.consumer.queue
        queue.give_back(held.stored)
        self._queues.look(queue)

    def _target(self, name: str) -> StoredQueue:
        """The queue, if it takes one more message."""
        queue = self._queues.find(name)
        self._queues.look(queue)
        if len(queue.ready) >= self._queues.max_length:
            raise QueueFull(f"queue {name!r} is full, try again in {RETRY_AFTER_S:g} s", RETRY_AFTER_S)
        return queue

    def _settle(self, delivery: Delivery) -> Held | None:
        """What the delivery stands for, which is held no more; None if it was not."""
        held = delivery.token
        if not isinstance(held, Held):
            raise TypeError(f"delivery: {delivery.request_id!r} is not of an embedded queue")
        if held not in self._held:
            self.stale_settlements += 1
            return None
        del self._held[held]
        held.consumer.settled()
        return held


class Consumer:
    """Takes messages out of a queue as they are asked for."""

    def __init__(self, queues: Queues, queue: StoredQueue, prefetch: int, held: dict[Held, None]) -> None:
        self._queues = queues
        self.queue = queue
        self._room = prefetch
        self._held = held
        self._stopped = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        await asyncio.sleep(0)  # one that takes in a loop must not keep the others from their share
        while not self._stopped:
            self._queues.look(self.queue)
            if self._room and self.queue.ready:
                return self._hold(self.queue.pop())
            await self.queue.idle()
        raise StopAsyncIteration

    def _hold(self, stored: Stored) -> Delivery:
        message = stored.message
        held = Held(stored, self)
        self._held[held] = None
        self._room -= 1
        self._queues.look(self.queue)
        return Delivery(
            queue=self.queue.name,
            body=message.body,
            request_id=message.request_id,
            headers=message.headers,
            redelivered=stored.redelivered,
            token=held,
            gave_up=stored.gave_up,
        )

    def settled(self) -> None:
        """One that it took is settled: there is room for the next."""
        self._room += 1
        self.queue.stir()

    def stop(self) -> None:
        """Takes no more."""
        self._stopped = True
        self.queue.stir()


def _with(message: Message, headers: Mapping[str, HeaderValue]) -> Message:
    short = {name: value[:MAX_HEADER] if isinstance(value, str) else value for name, value in headers.items()}
    return replace(message, headers={**message.headers, **short})
