"""A consumer that stays: one iterator over many channels, one channel at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from aiormq import Connection
from aiormq.abc import AbstractChannel, DeliveredMessage

from headrace.broker.ports import BrokerError, BrokerUnavailable, Unroutable
from headrace.broker.rabbitmq.channel import Lane, open_lane
from headrace.broker.rabbitmq.connection import Supervisor, backoff, rim
from headrace.logs import get_logger

log = get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held:
    """A message, and the channel on which alone it can be settled."""

    lane: Lane
    tag: int
    message: DeliveredMessage


class Consumer(Generic[T]):
    """Iterates over the messages of one queue.

    ``attach`` makes the queue ready on each new channel and returns its name; ``read`` turns a message into what the
    iterator yields. With ``settle_later`` what was taken can still be settled after the context is left, else it goes
    back to the queue there and then. What is still in the buffer when its channel is lost is dropped: the broker
    delivers it again.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        prefetch: int,
        attach: Callable[[Lane], Awaitable[str]],
        read: Callable[[Held], T],
        *,
        subject: str,
        settle_later: bool,
    ) -> None:
        if not 1 <= prefetch <= 65_535:
            raise ValueError(f"prefetch: {prefetch} is not within 1 to 65535")
        self._supervisor = supervisor
        self._prefetch = prefetch
        self._attach = attach
        self._read = read
        self._subject = subject
        self._settle_later = settle_later
        # The broker sends no more than prefetch; one place is for the end.
        self._buffer: asyncio.Queue[Held | BrokerError | None] = asyncio.Queue(prefetch + 1)
        self._lane: Lane | None = None
        self._queue = ""
        self._consumer_tag = ""
        self._disturbed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        async with self._supervisor.within(f"consume {self._subject}", self._subject):
            await self._subscribe()
        self._keeper = self._supervisor.spawn(self._keep(), name=f"consumer-{self._subject}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A consumer left on the broker would be sent messages for ever: even a cancelled exit finishes.
        await asyncio.shield(self._supervisor.spawn(self._leave(), name=f"leave-{self._subject}"))

    @property
    def at_hand(self) -> bool:
        """Whether there is something that has been sent to this process and not been given out yet."""
        return not self._buffer.empty()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            item = await self._buffer.get()
            if isinstance(item, Held):
                if item.lane.usable:
                    return self._read(item)
                continue  # its channel is lost, the broker delivers it again
            self._buffer.put_nowait(item)  # the end, for everyone who asks
            if item is None:
                raise StopAsyncIteration
            raise item

    # ------------------------------------------------------------------------------------------------- one channel

    async def _subscribe(self) -> Lane:
        return await self._supervisor.insist(f"consume {self._subject}", self._open, self._subject)

    async def _open(self, connection: Connection) -> Lane:
        self._empty()
        self._disturbed.clear()
        lane = await open_lane(connection, next(self._supervisor.generations), confirms=False, prefetch=self._prefetch)
        self._lane = lane
        lane.on_message = self._receive
        lane.gone.add_done_callback(lambda _: self._disturb(lane))
        lane.on_consumer_cancel_callbacks.add(lambda _: self._disturb(lane))
        try:
            self._queue = await self._attach(lane)
            started = await lane.basic_consume(self._queue, _unused)
        except BaseException:
            self._supervisor.spawn(self._retire(lane), name=f"retire-{self._subject}")
            raise
        self._consumer_tag = started.consumer_tag or ""
        return lane

    def _disturb(self, lane: Lane) -> None:
        if lane is self._lane:
            self._disturbed.set()

    def _receive(self, lane: Lane, message: DeliveredMessage) -> None:
        tag = message.delivery_tag or 0
        if lane is self._lane:
            self._buffer.put_nowait(Held(lane, tag, message))
        elif self._settle_later:
            lane.requeue(tag)

    def _empty(self) -> None:
        while not self._buffer.empty():
            item = self._buffer.get_nowait()
            if isinstance(item, Held) and self._settle_later:
                item.lane.requeue(item.tag)

    # ------------------------------------------------------------------------------------------------- over its life

    async def _keep(self) -> None:
        end: BrokerError | None = None
        attempt = 0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                since = clock()
                await self._until_lost()
                log.warning("consumer_lost", queue=self._queue)
                attempt = 0 if clock() - since > self._supervisor.timing.backoff_max else attempt + 1
                lost, self._lane = self._lane, None
                if lost is not None and lost.usable:
                    self._supervisor.spawn(self._retire(lost), name=f"retire-{self._subject}")
                lane = await self._subscribe_again(attempt)
                self._supervisor.counters.resubscribed += 1
                log.info("consumer_resubscribed", queue=self._queue, generation=lane.generation)
        except BrokerError as error:
            log.error("consumer_ended", queue=self._queue, reason=str(error))
            end = error
        finally:
            self._empty()
            self._buffer.put_nowait(end)

    async def _subscribe_again(self, attempt: int) -> Lane:
        while True:
            await asyncio.sleep(backoff(attempt, self._supervisor.timing, random.random()))
            attempt += 1
            try:
                return await self._subscribe()
            except Unroutable as error:  # deleted, or its node is down: whoever owns it brings it back
                log.warning("consumer_waits", queue=self._queue, reason=str(error))

    async def _until_lost(self) -> None:
        """Returns when the channel is lost, or the broker has dropped our consumer, with or without telling us."""
        lane = self._lane
        while lane is not None and lane.usable and self._consumer_tag in lane.consumers:
            try:
                async with asyncio.timeout(self._supervisor.timing.watch):
                    await self._disturbed.wait()
                return
            except TimeoutError:
                if not await self._known():
                    return

    async def _known(self) -> bool:
        async def count(channel: AbstractChannel) -> int | None:
            return (await channel.queue_declare(self._queue, passive=True)).consumer_count

        try:
            return await self._supervisor.ask(f"watch {self._queue}", count, self._queue) != 0
        except Unroutable:
            return False
        except BrokerUnavailable:
            return True  # not known to be lost; when the connection is, its channels say so

    async def _leave(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        lane, self._lane = self._lane, None
        self._empty()
        self._buffer.put_nowait(None)
        if lane is None or not lane.usable:
            return
        try:
            async with rim(f"stop consuming {self._queue}", self._supervisor.timing.close):
                await lane.basic_cancel(self._consumer_tag)
        except BrokerError as error:
            log.info("consumer_left", queue=self._queue, reason=str(error))
        if lane.unsettled and self._settle_later:
            self._supervisor.spawn(self._retire(lane), name=f"retire-{self._subject}")
        else:
            await self._retire(lane)

    async def _retire(self, lane: Lane) -> None:
        """Closes a channel that consumes no more, once everything taken from it is settled."""
        while self._settle_later and lane.unsettled and lane.usable:
            lane.drained.clear()
            await lane.drained.wait()
        try:
            async with rim("close a channel", self._supervisor.timing.close):
                await lane.shut()
        except BrokerError as error:
            log.info("channel_close", reason=str(error))


async def _unused(_: DeliveredMessage) -> None:
    """aiormq wants a callback per consumer; a Lane hands its deliveries over itself."""
