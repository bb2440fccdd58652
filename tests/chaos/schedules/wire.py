"""The line between one process and the servers: it takes its time, loses what a schedule says, and can be cut."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any, Final, Literal, TypeAlias, cast

from headrace.broker.embedded import EmbeddedQueues
from headrace.broker.ports import (
    Broker,
    BrokerUnavailable,
    ClientTopics,
    Message,
    RunStore,
    TokenLog,
    TopicMessage,
    WorkQueue,
)

Server = Literal["rabbitmq", "redis"]
Lost = Literal["request", "reply"]

_UNANSWERED: Final = frozenset({"ack", "release"})
"""The broker answers neither: on a connection that is gone they do nothing, and nobody hears of it."""
_ANSWER_S: Final = 1.0
"""After so many seconds a call to a server that is away is given up."""


@dataclass(slots=True)
class Servers:
    """Which servers are away, for how many reasons; when the last job to be tried again comes back, in seconds of the
    loop's clock; and every job that was ever published."""

    away: Counter[Server] = field(default_factory=Counter)
    retried_at: float = 0.0
    published: list[tuple[str, Message]] = field(default_factory=list)

    def note(self, verb: str, args: Sequence[Any], *, settled: bool) -> None:
        """A call took effect."""
        match verb, args:
            case "publish", (str() as queue, Message() as message):
                self.published.append((queue, message))
            case "retry", (_, delay, *_) if settled:
                self.retried_at = max(self.retried_at, asyncio.get_running_loop().time() + delay)


@dataclass(frozen=True, slots=True)
class At:
    """A moment in a process: its next call of this verb, before or after it takes effect."""

    verb: str
    after: bool


Fuse: TypeAlias = tuple[At, Callable[[], None]]


class Wire:
    """``broker`` is what its process has of the broker ``far``. Each way takes ``delay`` seconds."""

    def __init__(self, far: Broker, servers: Servers, *, delay: float = 0.0) -> None:
        self._far = far
        self._servers = servers
        self._delay = delay
        self._losses: dict[Server, list[Lost]] = {"rabbitmq": [], "redis": []}
        self._cut = False
        self._fuse: Fuse | None = None
        topics = cast("ClientTopics", _Port(far.topics, self, "rabbitmq"))
        self.broker = Broker(
            queues=cast("WorkQueue", _Port(far.queues, self, "rabbitmq")),
            topics=topics,
            log=cast("TokenLog", _Port(far.log, self, "redis")),
            runs=cast("RunStore", _Port(far.runs, self, "redis")),
            streams=topics,
        )

    def lose(self, server: Server, what: Lost, calls: int) -> None:
        """So many of the next calls to the server fail, before or after they took effect."""
        self._losses[server] = [what] * calls

    def arm(self, fuse: Fuse | None) -> None:
        """What is to happen to the process at a moment, in place of anything before."""
        self._fuse = fuse

    def reconnect(self) -> None:
        """RabbitMQ's connection was lost and is there again."""
        self._queues.lose()

    def cut(self) -> None:
        """The process is gone: RabbitMQ takes back what it held, nothing comes through any more."""
        self._cut = True
        self._queues.close()

    @property
    def holds(self) -> int:
        """Jobs that its process has and has not settled."""
        return len(self._queues._held)

    @property
    def _queues(self) -> EmbeddedQueues:
        assert isinstance(self._far.queues, EmbeddedQueues)
        return self._far.queues

    async def call(self, server: Server, verb: Callable[..., Awaitable[Any]], args: Any, named: Any) -> Any:
        """A call to a server as its process sees it."""
        silent = verb.__name__ in _UNANSWERED
        lost = self._losses[server].pop() if self._losses[server] and not silent else None
        await self._travel()
        await self._strike(At(verb.__name__, after=False))
        away = self._servers.away[server] > 0
        if not silent and (away or lost == "request"):
            await asyncio.sleep(_ANSWER_S)
            raise BrokerUnavailable(f"{server} does not answer")
        held = self.holds
        answer = None if away else await verb(*args, **named)
        if not away:
            self._servers.note(verb.__name__, args, settled=self.holds < held)
        await self._strike(At(verb.__name__, after=True))
        await self._travel()
        if lost == "reply":
            raise BrokerUnavailable("the reply was lost")
        return answer

    async def _strike(self, at: At) -> None:
        if self._fuse is not None and self._fuse[0] == at:
            _, strike = self._fuse
            self._fuse = None
            strike()
            await asyncio.sleep(0)  # a process that was stopped or killed gets no further than here

    async def _travel(self) -> None:
        if self._delay:
            await asyncio.sleep(self._delay)
        if self._cut:
            raise BrokerUnavailable("the process is gone")


class _Port:
    """A port of the far broker, its calls over the wire. What only opens a context, or only wakes, is near."""

    def __init__(self, far: object, wire: Wire, server: Server) -> None:
        self._far = far
        self._wire = wire
        self._server = server

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._far, name)
        if not iscoroutinefunction(verb):
            return verb

        async def call(*args: Any, **named: Any) -> Any:
            return await self._wire.call(self._server, verb, args, named)

        return call


Mischief = Literal["drop", "late", "twice"]


class Gossip:
    """Client topics on which some of the messages to a subscriber are dropped, come late or come twice."""

    def __init__(self, topics: ClientTopics) -> None:
        self._topics = topics
        self._next: list[tuple[Mischief, float]] = []

    def plan(self, what: Mischief, messages: int, late: float) -> None:
        """So happens to the next messages; a late one comes ``late`` seconds after its time."""
        self._next += [(what, late)] * messages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topics, name)

    def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AbstractAsyncContextManager[AsyncIterator[TopicMessage]]:
        return self._spoiled(self._topics.subscribe(pattern, name=name, limit=limit))

    @asynccontextmanager
    async def _spoiled(
        self, subscribed: AbstractAsyncContextManager[AsyncIterator[TopicMessage]]
    ) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        heard: asyncio.Queue[TopicMessage] = asyncio.Queue()
        async with subscribed as messages:
            passing = asyncio.create_task(self._pass_on(messages, heard))
            try:
                yield _each(heard)
            finally:
                passing.cancel()
                await asyncio.gather(passing, return_exceptions=True)

    async def _pass_on(self, messages: AsyncIterator[TopicMessage], heard: asyncio.Queue[TopicMessage]) -> None:
        async for message in messages:
            match self._next.pop(0) if self._next else None:
                case None:
                    heard.put_nowait(message)
                case ("late", late):
                    asyncio.get_running_loop().call_later(late, heard.put_nowait, message)
                case ("twice", _):
                    heard.put_nowait(message)
                    heard.put_nowait(message)


async def _each(heard: asyncio.Queue[TopicMessage]) -> AsyncIterator[TopicMessage]:
    while True:
        yield await heard.get()
