"""An AMQP channel whose hot paths are plain callbacks.

aiormq makes a task for each delivery and holds a lock, a drain and three futures for each publish: about 100 µs each.
A Lane keeps aiormq's connection, its handshake and its calls, and does deliveries, settlements, publishes and confirms
itself: what is written in one turn of the event loop leaves as one piece, and a confirm settles all that it covers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

from aiormq import Channel, Connection
from aiormq.abc import ChannelFrame, ConfirmationFrameType, DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError
from pamqp import commands as spec
from pamqp.header import ContentHeader
from yarl import URL

from headrace.broker.ports import HeaderValue, MessageTooLarge
from headrace.broker.rabbitmq import frames
from headrace.broker.rabbitmq.frames import SHORT_MAX

FRAME_BUFFER: Final = 1_000
"""Frames between the socket and the channel: with aiormq's 10 the two tasks take turns all the time."""
WINDOW: Final = 64 << 20
"""Bytes that may be sent and not yet confirmed: what a stalled broker can make us hold."""
MAX_TTL_MS: Final = 2**32 - 1
"""About 49 days: the longest time to live that every RabbitMQ takes."""
_OVERHEAD: Final = 512
REQUEST_ID: Final = "x-headrace-request-id"
"""Header of a request_id that is too long for a correlation id."""


class Outcome(StrEnum):
    """What became of a publish."""

    CONFIRMED = auto()
    RETURNED = auto()
    """No queue takes it."""
    REJECTED = auto()
    """The queue is full."""
    LOST = auto()
    """The channel went away before the broker answered."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way out. A durable one is persistent, mandatory (it comes back when no queue takes it) and
    waited for; nobody waits for the other kind, which is sent again where its channel is lost before its confirm."""

    exchange: str
    key: str
    body: bytes
    request_id: str = ""
    headers: Mapping[str, HeaderValue] | None = None
    durable: bool = True
    expires: float | None = None
    """Unix seconds until which it may wait in its queue."""

    @property
    def cost(self) -> int:
        return len(self.body) + _OVERHEAD


@dataclass(slots=True)
class _Sent:
    cost: int
    answer: asyncio.Future[Outcome] | None
    message: Outgoing | None
    """What is to be sent again by itself."""
    returned: bool = False


class Lane(Channel):
    """One generation of a channel, for publishing or for consuming. Everything on it is void once it is ``gone``."""

    def __init__(self, connection: Connection, number: int, generation: int, *, confirms: bool) -> None:
        super().__init__(connection, number, publisher_confirms=confirms, frame_buffer=FRAME_BUFFER)
        self.generation = generation
        self.on_message: Callable[[Lane, DeliveredMessage], None] | None = None
        self.unsettled: set[int] = set()
        """Tags of the deliveries that came on it and were not settled."""
        self.drained = asyncio.Event()
        """Set whenever a settlement leaves nothing unsettled."""
        self.in_flight = 0
        """Bytes sent and not confirmed."""
        self.room = asyncio.Event()
        self.lost: list[Outgoing] = []
        """Messages that nobody waits for and that were not confirmed when the channel went away, in order."""
        self._sent: OrderedDict[int, _Sent] = OrderedDict()
        self._name = uuid.uuid4().hex
        self._user = user_of(connection.url)
        self._outbox: list[bytes] = []
        self._written = asyncio.Event()
        self._shut = False
        self._writer = self.loop.create_task(self._carry())
        self.gone: asyncio.Future[None] = self.closing
        self.gone.add_done_callback(lambda _: self._void())

    @property
    def usable(self) -> bool:
        return not (self._shut or self.is_closed)

    # ------------------------------------------------------------------------------------------------- publishing

    def send(self, message: Outgoing) -> asyncio.Future[Outcome] | None:
        """Queues a message for the socket. The future of a durable one tells what became of it; it never raises."""
        if not self.usable:
            raise ChannelInvalidStateError("the channel is closed")
        tag = self.delivery_tag + 1
        request_id, headers = message.request_id, message.headers
        if len(request_id) * 4 > SHORT_MAX and len(request_id.encode()) > SHORT_MAX:
            request_id, headers = "", {REQUEST_ID: request_id, **(headers or {})}
        self._write(
            frames.publish(
                self.number,
                message.exchange,
                message.key,
                message.body,
                durable=message.durable,
                # A returned message is matched by this id: never the same twice, whatever is sent again.
                message_id=f"{self._name}-{tag}",
                correlation_id=request_id,
                headers=headers,
                frame_max=self.connection.connection_tune.frame_max,
                user_id=self._user,
                expiration_ms=None if message.expires is None else _ms_until(message.expires),
            )
        )
        self.delivery_tag = tag
        self.in_flight += message.cost
        answer: asyncio.Future[Outcome] | None = self.loop.create_future() if message.durable else None
        self._sent[tag] = _Sent(message.cost, answer, None if message.durable else message)
        return answer

    async def answered(self) -> None:
        """Returns once the broker has answered all that was sent before, or the channel is gone; bound the wait."""
        last = self.delivery_tag
        while self._sent and next(iter(self._sent)) <= last:
            self.room.clear()
            await self.room.wait()

    async def _on_confirm_frame(self, frame: ConfirmationFrameType) -> None:
        answer = Outcome.CONFIRMED if isinstance(frame, spec.Basic.Ack) else Outcome.REJECTED
        last = frame.delivery_tag or 0
        if isinstance(frame, spec.Basic.Ack | spec.Basic.Nack) and frame.multiple:
            while self._sent and (tag := next(iter(self._sent))) <= last:
                self._answer(tag, answer)
        else:
            self._answer(last, answer)

    def _answer(self, tag: int, outcome: Outcome) -> None:
        sent = self._sent.pop(tag, None)
        if sent is None:
            return
        self.in_flight -= sent.cost
        self.room.set()
        if sent.answer is not None and not sent.answer.done():
            sent.answer.set_result(Outcome.RETURNED if sent.returned else outcome)

    async def _on_return_frame(self, frame: spec.Basic.Return) -> None:
        message = await self._content(frame)
        name, _, tag = (message.header.properties.message_id or "").partition("-")
        if name == self._name and (sent := self._sent.get(int(tag))) is not None:
            sent.returned = True  # its confirm follows

    # ------------------------------------------------------------------------------------------------- consuming

    async def _on_deliver_frame(self, frame: spec.Basic.Deliver) -> None:
        message = await self._content(frame)
        self.unsettled.add(frame.delivery_tag or 0)
        if self.on_message is not None:
            self.on_message(self, message)

    async def _content(self, frame: spec.Basic.Deliver | spec.Basic.Return) -> DeliveredMessage:
        header = await self._get_frame()
        if not isinstance(header, ContentHeader):
            raise ValueError(f"{header!r} instead of a content header")
        return await self._read_content(frame, header)

    def holds(self, tag: int) -> bool:
        """Whether a delivery can still be settled."""
        return self.usable and tag in self.unsettled

    def ack(self, tag: int) -> bool:
        """Settles a delivery. False if it cannot be settled any more: the broker delivers it again."""
        return self._settle(tag, frames.ack(self.number, tag))

    def ack_up_to(self, tag: int) -> bool:
        """Settles all deliveries up to this one."""
        if not self.holds(tag):
            return False
        self.unsettled = {later for later in self.unsettled if later >= tag}
        return self._settle(tag, frames.ack(self.number, tag, multiple=True))

    def requeue(self, tag: int) -> bool:
        """Gives a delivery back. False if it cannot be settled any more."""
        return self._settle(tag, frames.requeue(self.number, tag))

    def _settle(self, tag: int, frame: bytes) -> bool:
        # A second settlement of one tag would make the broker close the channel with all that is held on it.
        if not self.holds(tag):
            return False
        self.unsettled.discard(tag)
        self._write(frame)
        if not self.unsettled:
            self.drained.set()
        return True

    # ------------------------------------------------------------------------------------------------- the end

    async def shut(self) -> None:
        """Closes the channel after everything written has left; the caller bounds the wait.

        An ack that overtakes the close would make the broker close the whole connection.
        """
        if not self.usable:
            return
        self._shut = True
        await self._halt_writer()
        if rest := b"".join(self._outbox):
            await self.write_queue.put(ChannelFrame(rest, should_close=False))
        await self.close()

    def _write(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._written.set()

    async def _carry(self) -> None:
        while True:
            await self._written.wait()
            self._written.clear()
            count = len(self._outbox)
            await self.write_queue.put(ChannelFrame(b"".join(self._outbox), should_close=False))
            # Only now: when halted in the line above, nothing has left, and shut() sends it.
            del self._outbox[:count]

    async def _halt_writer(self) -> None:
        self._writer.cancel()
        await asyncio.wait((self._writer,))

    async def _on_close_frame(self, frame: spec.Channel.Close) -> None:
        # After our answer to the broker's close nothing more may be sent on this number.
        self._shut = True
        self._outbox.clear()
        await self._halt_writer()
        await super()._on_close_frame(frame)

    def _void(self) -> None:
        self._shut = True
        self._writer.cancel()
        self.unsettled.clear()
        self.drained.set()
        self.lost += [sent.message for sent in self._sent.values() if sent.message is not None]
        for tag in list(self._sent):
            self._answer(tag, Outcome.LOST)
        self.room.set()


async def open_lane(connection: Connection, generation: int, *, confirms: bool, prefetch: int = 0) -> Lane:
    """Opens a channel; the caller bounds the wait."""
    number = next(number for number in itertools.count(1) if number not in connection.channels)
    lane = Lane(connection, number, generation, confirms=confirms)
    connection.channels[number] = lane
    await lane.open()
    if prefetch:
        await lane.basic_qos(prefetch_count=prefetch)
    return lane


def check_size(body: bytes, max_body: int) -> None:
    """A body over the broker's limit would close the channel, with all that is in flight on it."""
    if len(body) > max_body:
        raise MessageTooLarge(f"body: {len(body)} bytes are over the limit of {max_body}", max_body)


def request_id_of(message: DeliveredMessage) -> str:
    properties = message.header.properties
    long = (properties.headers or {}).get(REQUEST_ID)
    return long if isinstance(long, str) else properties.correlation_id or ""


def user_of(url: URL) -> str:
    """The user that a connection to this URL has; empty where the broker takes it from elsewhere, as a certificate."""
    return "" if url.query.get("auth", "plain").lower() == "external" else url.user or "guest"


def _ms_until(at: float) -> int | None:
    """Milliseconds from now on; None, for ever, beyond what RabbitMQ takes. One that is late is given up at once."""
    left = (at - time.time()) * 1000
    return None if left > MAX_TTL_MS else max(0, int(left))
