"""One AMQP connection that is kept up, and the rim where AMQP's errors become ours.

aiormq's plain Connection is used below aio-pika's Robust layer: that layer hides the very event that matters here, the
loss of a channel with everything that was held on it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from aiormq import Connection
from aiormq.abc import AbstractChannel
from aiormq.exceptions import (
    AMQPError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionClosed,
    InvalidFrameError,
)
from yarl import URL

from headrace.broker.ports import BrokerError, BrokerUnavailable, Unroutable
from headrace.broker.rabbitmq.channel import Lane
from headrace.broker.rabbitmq.topology import drift
from headrace.logs import get_logger

log = get_logger()
T = TypeVar("T")


class State(StrEnum):
    CONNECTING = "connecting"
    """Not up yet, for the first time."""
    UP = "up"
    BLOCKED = "blocked"
    """Up, but the broker is short of memory or disk and takes no messages (connection.blocked)."""
    DOWN = "down"
    """It was up; it is being sought again."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take, in seconds."""

    connect: float = 10.0
    """One attempt at one host, up to the end of the handshake."""
    call: float = 10.0
    """Anything a caller waits for: a publish, a declaration, the first connection."""
    close: float = 5.0
    heartbeat: int = 15
    """A connection that is silent for three of these is dead."""
    backoff: float = 0.1
    backoff_max: float = 10.0
    watch: float = 15.0
    """Between two looks at whether the broker still knows our consumers."""


DEFAULT_TIMING: Final = Timing()


@dataclass(slots=True)
class Counters:
    """What happened since the start; for metrics and tests."""

    connections_lost: int = 0
    resubscribed: int = 0
    """Consumers that got a new channel: after a lost one, or because the broker had dropped them."""
    stale_settlements: int = 0
    """Acks and the like that came too late: their channel was gone, the broker delivers the message again."""
    unheard: int = 0
    """Durable client messages that nobody subscribes to."""


def backoff(attempt: int, timing: Timing, draw: float) -> float:
    """Seconds before the next attempt: doubling, capped, half of it jitter. ``draw`` is from [0, 1)."""
    ceiling = min(timing.backoff_max, timing.backoff * 2.0 ** min(attempt, 30))
    return ceiling * (0.5 + draw / 2)


@asynccontextmanager
async def rim(
    doing: str, seconds: float, subject: str = "", state: Callable[[], str] | None = None
) -> AsyncIterator[None]:
    """Bounds what is inside, and translates AMQP's errors.

    ``subject`` is the queue or exchange that is asked about; ``state`` says what may explain a silence. Our own
    cancellation goes through: aiormq makes another error of it now and then, or nothing at all, and of a connection
    that missed its heartbeats it makes a CancelledError.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        async with asyncio.timeout(seconds):
            yield
    except (AMQPError, ChannelInvalidStateError, OSError, asyncio.CancelledError) as error:
        if task is None or task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise _translated(error, doing, seconds, subject, state) from None
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


def _translated(
    error: BaseException, doing: str, seconds: float, subject: str, state: Callable[[], str] | None
) -> BrokerError:
    match error:
        case TimeoutError():
            why = f" ({state()})" if state else ""
            return BrokerUnavailable(f"{doing}: no answer from RabbitMQ within {seconds:g} s{why}")
        case ChannelNotFoundEntity():
            return Unroutable(f"{doing}: RabbitMQ has no {subject}")
        case ChannelPreconditionFailed():
            return drift(str(error), subject)
        case ChannelAccessRefused() | ChannelLockedResource():
            return BrokerError(f"{doing}: RabbitMQ refuses: {error}")
        case asyncio.CancelledError():
            return BrokerUnavailable(f"{doing}: the connection to RabbitMQ was lost")
        case _:
            return BrokerUnavailable(f"{doing}: {str(error) or type(error).__name__}")


class Supervisor:
    """Keeps one connection up: several hosts in turn, jittered backoff, bounded attempts."""

    def __init__(
        self,
        urls: Sequence[str],
        name: str,
        timing: Timing,
        counters: Counters,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not urls:
            raise ValueError("urls: at least one AMQP URL is needed")
        defaults = {"heartbeat": str(timing.heartbeat), "name": name}
        self._urls = [URL(url).with_query(defaults | dict(URL(url).query)) for url in urls]
        self._tls = tls
        self.timing = timing
        self.counters = counters
        self.last_error = ""
        self.generations = itertools.count(1)
        """Numbers the channels over the life of this supervisor."""
        self._connection: Connection | None = None
        self._up = asyncio.Event()
        self._state = State.CONNECTING
        self._keeper: asyncio.Task[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        if self._state is State.UP and self._connection is not None and blocked(self._connection):
            return State.BLOCKED
        return self._state

    async def start(self) -> None:
        """Returns once the connection is up. Raises BrokerUnavailable with the last failure."""
        self._keeper = asyncio.create_task(self._keep(), name="amqp-keeper")
        try:
            async with asyncio.timeout(self.timing.call):
                await self._up.wait()
        except TimeoutError:
            await self.close()
            raise BrokerUnavailable(
                f"RabbitMQ cannot be reached within {self.timing.call:g} s: {self.last_error or 'no answer'}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def connection(self) -> Connection:
        """The connection, once it is up; the caller bounds the wait."""
        while self._connection is None:
            if self._state is State.CLOSED:
                raise BrokerUnavailable("the connection to RabbitMQ is closed")
            await self._up.wait()
        return self._connection

    def within(self, doing: str, subject: str = "") -> AbstractAsyncContextManager[None]:
        """The rim around what a caller waits for."""
        return rim(doing, self.timing.call, subject, self._explain)

    def _explain(self) -> str:
        why = f": {self.last_error}" if self.last_error and self.state is not State.UP else ""
        return f"the connection is {self.state}{why}"

    async def insist(self, doing: str, attempt: Callable[[Connection], Awaitable[T]], subject: str = "") -> T:
        """Does something on the connection, and again on the next one if it was lost meanwhile.

        The caller bounds the wait. Raises what RabbitMQ refuses: Unroutable, TopologyDrift, BrokerError.
        """
        number = 0
        while True:
            connection = await self.connection()
            try:
                async with rim(doing, self.timing.call, subject):
                    return await attempt(connection)
            except BrokerUnavailable as error:
                self.last_error = str(error)
            await asyncio.sleep(backoff(number, self.timing, random.random()))
            number += 1

    async def ask(self, doing: str, question: Callable[[AbstractChannel], Awaitable[T]], subject: str = "") -> T:
        """A few calls on a channel of their own: a refusal closes the channel, and nobody else's work with it."""

        async def attempt(connection: Connection) -> T:
            if connection.is_closed:
                raise ConnectionClosed(0, "lost")
            channel = await connection.channel(publisher_confirms=False)
            answer = await question(channel)
            await channel.close()
            return answer

        async with self.within(doing, subject):
            return await self.insist(doing, attempt, subject)

    async def unblocked(self) -> None:
        """Returns once the broker takes messages, or the connection is gone; the caller bounds the wait."""
        connection = self._connection
        if connection is None or not blocked(connection):
            return
        ready = asyncio.ensure_future(connection.ready())
        try:
            await asyncio.wait((ready, connection.closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()

    def spawn(self, chore: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Runs something that must not outlive this supervisor. Whoever wants its failure asks the task."""
        task = asyncio.create_task(chore, name=name)
        self._chores.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen

    async def close(self) -> None:
        """Ends everything within the bound; whoever waits for a connection is told that there is none."""
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSED
        await self._end(*self._chores, *([self._keeper] if self._keeper else []))
        connection, self._connection = self._connection, None
        self._up.set()
        if connection is not None:
            await self._close(connection)

    async def _keep(self) -> None:
        attempt = 0
        clock = asyncio.get_running_loop().time
        for url in itertools.cycle(random.sample(self._urls, len(self._urls))):
            connection = await self._connect(url)
            attempt += 1
            if connection is not None:
                since = clock()
                await self._hold(connection)
                if clock() - since > self.timing.backoff_max:  # else it comes up only to fall: keep backing off
                    attempt = 0
            await asyncio.sleep(backoff(attempt, self.timing, random.random()))

    async def _connect(self, url: URL) -> Connection | None:
        async def handshake() -> None:
            await connection.connect()

        # A task of its own: whatever ends it, a stray CancelledError too, ends only this attempt.
        connection = Connection(url, context=self._tls if url.scheme == "amqps" else None)
        attempt = self.spawn(handshake(), "amqp-handshake")
        try:
            await asyncio.wait((attempt,), timeout=self.timing.connect)
        finally:
            await self._end(attempt)
        if connection.is_opened:
            return connection
        failure = attempt.exception() if attempt.done() and not attempt.cancelled() else None
        reason = f"no answer within {self.timing.connect:g} s" if failure is None else _refusal(failure, url)
        self.last_error = f"{url.host}:{url.port}: {reason}"
        log.warning("amqp_unreachable", host=url.host, port=url.port, reason=reason)
        return None

    async def _hold(self, connection: Connection) -> None:
        """Lends the connection out until it is lost."""
        closing = connection.closing
        self._connection, self._state = connection, State.UP
        self._up.set()
        log.info("amqp_up", host=connection.url.host, port=connection.url.port)
        # When close() cancels this, the connection stays as it is: it ends after its channels.
        while not closing.done() and connection.is_opened:
            await asyncio.wait((closing,), timeout=self.timing.watch)
        self._connection, self._state = None, State.DOWN
        self._up.clear()
        self.counters.connections_lost += 1
        reason = closing.exception() if closing.done() and not closing.cancelled() else None
        self.last_error = str(reason or "the connection was lost")
        log.warning("amqp_lost", host=connection.url.host, port=connection.url.port, reason=self.last_error)
        await self._close(connection)

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.timing.close)

    async def _close(self, connection: Connection) -> None:
        """Ends a connection in good order if it answers, else without; its channels first, with what they still hold
        back for the socket: an ack that was given must not be lost."""
        try:
            async with rim("close", self.timing.close):
                lanes = [channel for channel in connection.channels.values() if isinstance(channel, Lane)]
                await asyncio.gather(*(lane.shut() for lane in lanes))
                await connection.close(ConnectionClosed(200, "closed by this side"))
        except BrokerError as error:
            log.info("amqp_close", reason=str(error))


def _refusal(failure: BaseException, url: URL) -> str:
    """Why a handshake failed. aiormq keeps no more of a refused virtual host than that the wrong frame came."""
    if isinstance(failure, InvalidFrameError) and "Connection.OpenOk" in str(failure):
        return f"the virtual host {url.path[1:] or '/'!r} does not exist, or {url.user!r} may not use it"
    return str(failure)


def blocked(connection: Connection) -> bool:
    """Whether the broker takes no messages now. aiormq tells only by ``ready``: one step of it answers."""
    ready = connection.ready()
    try:
        ready.send(None)
    except StopIteration:
        return False
    ready.close()
    return True
