"""One socket to Redis that many callers share.

Replies come in the order of the commands, so each caller gets his own whatever the others do. A caller who gives up
leaves his place in the order, and his reply is dropped when it comes: cancelling costs nothing and confuses nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, TypeAlias, cast

import hiredis
from hiredis import ReplyError

Reply: TypeAlias = "int | bytes | ReplyError | list[Reply] | None"

_MORE: Final = object()


class ConnectionLost(Exception):
    """The socket closed, or a reply did not come in time. What was sent may have been done."""


class _Asked:
    """Commands that were sent and the replies so far."""

    __slots__ = ("count", "due", "replies", "waiter")

    def __init__(self, count: int, due: float, waiter: asyncio.Future[list[Reply]]) -> None:
        self.count = count
        self.due = due
        self.waiter = waiter
        self.replies: list[Reply] = []


class Connection(asyncio.Protocol):
    """Sends commands as they come, one write per turn of the event loop; a late reply breaks it for everybody."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._asked: deque[_Asked] = deque()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None
        self._closed = loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def open(self) -> bool:
        """Whether it can be written to."""
        return self._transport is not None and self._fault is None

    async def ask(self, data: bytes, count: int, within: float) -> list[Reply]:
        """Sends ``count`` packed commands, returns their replies, errors among them. Raises ConnectionLost.

        All replies are due ``within`` seconds.
        """
        if not self._writable.is_set():
            await self._writable.wait()
        return await self.post(data, count, within)

    def post(self, data: bytes, count: int, within: float) -> asyncio.Future[list[Reply]]:
        """As ``ask``, without waiting for the socket to take more."""
        waiter: asyncio.Future[list[Reply]] = self._loop.create_future()
        if self._fault is not None:
            waiter.set_exception(ConnectionLost(str(self._fault)))
            return waiter
        due = self._loop.time() + within
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._asked.append(_Asked(count, due, waiter))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._look)
        return waiter

    def abort(self, fault: Exception) -> None:
        """Breaks it: whoever waits gets ConnectionLost."""
        if self._fault is None:
            self._fault = fault
            if self._transport is not None:
                self._transport.abort()

    async def close(self) -> None:
        """Closes it; returns once the socket is gone."""
        self.abort(ConnectionError("closed by us"))
        if self._transport is not None:
            await self._closed

    # ------------------------------------------------------------------------------ what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        reader, asked = self._reader, self._asked
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                first = asked[0]
                first.replies.append(reply)
                if len(first.replies) == first.count:
                    asked.popleft()
                    if not first.waiter.done():
                        first.waiter.set_result(first.replies)
        except hiredis.ProtocolError as error:
            self.abort(error)
        except IndexError:
            self.abort(ValueError("a reply that nobody asked for"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fault = self._fault or exc or ConnectionError("closed by the server")
        if self._timer is not None:
            self._timer.cancel()
        while self._asked:
            waiter = self._asked.popleft().waiter
            if not waiter.done():
                waiter.set_exception(ConnectionLost(str(self._fault)))
        self._writable.set()
        self._closed.set_result(None)

    def _flush(self) -> None:
        if self._transport is not None and self._fault is None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _look(self) -> None:
        """Whether the reply that is due first is late. A caller who gave up is owed his reply all the same."""
        self._timer = None
        if not self._asked:
            return
        due = self._asked[0].due
        if due <= self._loop.time():
            self.abort(TimeoutError("no reply in time"))
        else:
            self._timer = self._loop.call_at(due, self._look)
