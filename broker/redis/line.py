"""A connection to one Redis server that comes back by itself, and the errors it speaks in."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict, cast

from hiredis import ReplyError
from redis.asyncio.connection import SSLConnection, parse_url

from headrace.broker.ports import BrokerError, BrokerUnavailable
from headrace.broker.redis.connection import Connection, ConnectionLost, Reply
from headrace.broker.redis.scripts import LOAD, command
from headrace.logs import get_logger

log = get_logger()

OLDEST: Final = (7, 0)
_PASSES: Final = frozenset(("LOADING", "BUSY", "READONLY", "MASTERDOWN", "OOM", "NOREPLICAS", "MISCONF"))
"""Errors of a server that may be well again soon."""
_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 1.0


class _Parts(TypedDict, total=False):
    """What redis-py finds in a URL and we know how to use."""

    host: str
    port: int
    path: str
    db: int
    username: str
    password: str
    connection_class: type
    ssl_ca_certs: str
    ssl_cert_reqs: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, and who we are there."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """From redis://, rediss:// or unix://, with redis-py's query options. Raises ValueError."""
        parts = cast("_Parts", parse_url(url))
        tls = None
        if parts.pop("connection_class", None) is SSLConnection:
            tls = ssl.create_default_context(cafile=parts.get("ssl_ca_certs"))
            if parts.get("ssl_cert_reqs") == "none":
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        return cls(
            parts.get("host", "localhost"),
            parts.get("port", 6379),
            parts.get("path"),
            parts.get("db", 0),
            parts.get("username"),
            parts.get("password"),
            tls,
        )

    def __str__(self) -> str:
        return f"{self.path or f'{self.host}:{self.port}'}/{self.db}"

    async def dial(self) -> Connection:
        """A bare connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self.path is not None:
            _, connection = await loop.create_unix_connection(lambda: Connection(loop), self.path)
        else:
            _, connection = await loop.create_connection(lambda: Connection(loop), self.host, self.port, ssl=self.tls)
        return connection

    @property
    def login(self) -> list[bytes]:
        """The commands that a new connection begins with."""
        commands = []
        if self.password is not None:
            who = () if self.username is None else (self.username,)
            commands.append(command("AUTH", *who, self.password))
        if self.db:
            commands.append(command("SELECT", self.db))
        return commands


class Line:
    """Commands to one server, over one socket at a time. All that is asked must bear being done twice.

    A reply may take ``reply_timeout`` seconds, then the socket is given up. A call goes on for ``patience`` seconds
    over as many sockets as it takes; it ends at the latest one reply_timeout after that, with BrokerUnavailable.
    """

    def __init__(self, address: Address, *, reply_timeout: float = 2.0, patience: float = 5.0) -> None:
        self._address = address
        self._reply_timeout = reply_timeout
        self._patience = patience
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._fault: Exception | None = None
        self._failures = 0
        self.client_id = 0
        """The server's number for the present connection."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None and self._connection.open

    async def ask(self, commands: Sequence[bytes], *, longer: float = 0.0) -> list[Reply]:
        """Replies to the commands; none of them is an error. Raises BrokerUnavailable, or BrokerError if refused.

        ``longer``: how many seconds the server may wait before it replies.
        """
        data, count = b"".join(commands), len(commands)
        until = asyncio.get_running_loop().time() + self._patience
        fault: Exception | None = None
        while True:
            connection = await self._connected(until, fault)
            try:
                replies = await connection.ask(data, count, self._reply_timeout + longer)
                fault = next((reply for reply in replies if type(reply) is ReplyError), None)
                if fault is None:
                    return replies
                await self._cure(connection, fault, until)
            except ConnectionLost as lost:
                fault = lost
                self._give_up(until, fault)

    async def ready(self) -> None:
        """Returns once there is a connection. Raises BrokerUnavailable, or BrokerError if the server is not fit."""
        await self._connected(asyncio.get_running_loop().time() + self._patience, None)

    def post(self, data: bytes) -> asyncio.Future[list[Reply]] | None:
        """Sends one command if there is a connection now, once."""
        if self._connection is None or not self._connection.open:
            return None
        return self._connection.post(data, 1, self._reply_timeout)

    def drop(self) -> None:
        """Gives up the present connection; the next call makes another."""
        if self._connection is not None:
            self._connection.abort(ConnectionError("given up by us"))

    async def close(self) -> None:
        """Ends the connection."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        if self._connection is not None:
            await self._connection.close()

    async def _cure(self, connection: Connection, error: ReplyError, until: float) -> None:
        """Returns if asking again may help."""
        word = str(error).partition(" ")[0]
        self._give_up(until, error)
        if word == "NOSCRIPT":
            await connection.ask(b"".join(LOAD), len(LOAD), self._reply_timeout)
        elif word in _PASSES:
            if word == "READONLY":  # it was demoted: the name may lead to another server now
                connection.abort(error)
            await asyncio.sleep(_pause(3))
        else:
            raise BrokerError(f"Redis at {self._address} refused: {error}") from error

    def _give_up(self, until: float, fault: Exception) -> None:
        if asyncio.get_running_loop().time() >= until:
            state = "is out of memory" if str(fault).startswith("OOM ") else "is away"
            raise BrokerUnavailable(f"Redis at {self._address} {state}: {fault}") from fault

    async def _connected(self, until: float, fault: Exception | None) -> Connection:
        """The connection, when there is one; ``fault`` is why the last one did not do."""
        while self._connection is None or not self._connection.open:
            if self._opening is None:
                self._opening = asyncio.create_task(self._open(), name=f"redis {self._address}")
            left = until - asyncio.get_running_loop().time()
            await asyncio.wait((self._opening,), timeout=max(left, 0.0))
            if isinstance(self._fault, BrokerError):
                raise BrokerError(str(self._fault)) from self._fault
            if self._fault is not None:
                self._give_up(until, self._fault)
            elif left <= 0:
                self._give_up(until, fault or TimeoutError("no connection in time"))
        return self._connection

    async def _open(self) -> None:
        """One try, after a pause that grows with each failure; it is for all callers, and tells them of its fault."""
        try:
            if self._failures:
                await asyncio.sleep(_pause(self._failures))
            async with asyncio.timeout(self._reply_timeout):
                self._connection = await self._greet(await self._address.dial())
            log.info("redis.connected", address=str(self._address), failures=self._failures)
            self._fault, self._failures = None, 0
        except (OSError, TimeoutError, ConnectionLost) as fault:
            self._fail(fault if str(fault) else TimeoutError("no answer to a new connection"))
        except BrokerError as unfit:
            self._fail(unfit)
        finally:
            self._opening = None

    def _fail(self, fault: Exception) -> None:
        self._fault = fault
        self._failures += 1
        log.warning("redis.away", address=str(self._address), failures=self._failures, error=str(fault))

    async def _greet(self, connection: Connection) -> Connection:
        """Logs in, looks whether the server is fit for us, and makes it know the scripts."""
        asks = [*self._address.login, command("CLIENT", "ID"), command("INFO"), *LOAD]
        try:
            replies = await connection.ask(b"".join(asks), len(asks), self._reply_timeout)
            for reply in replies:
                if isinstance(reply, ReplyError):
                    if str(reply).partition(" ")[0] in _PASSES:
                        raise ConnectionLost(str(reply))
                    raise BrokerError(f"Redis at {self._address} refused: {reply}")
            number, info = replies[-2 - len(LOAD) : -len(LOAD)]
            check_server(str(self._address), cast("bytes", info).decode())
            self.client_id = cast("int", number)
        except BaseException:
            connection.abort(ConnectionError("it was not fit for us"))
            raise
        return connection


def _pause(failures: int) -> float:
    return min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def check_server(address: str, info: str) -> None:
    """Raises BrokerError if a server that says so in INFO is not fit to keep runs."""
    said = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    version = said.get("redis_version", "unknown")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise BrokerError(f"Redis at {address} is version {version}: 7.0 or newer is needed")
    if (mode := said.get("redis_mode", "standalone")) != "standalone":
        raise BrokerError(f"Redis at {address} runs as {mode}: only a standalone server is supported")
    if (policy := said.get("maxmemory_policy", "noeviction")) != "noeviction":
        raise BrokerError(f"Redis at {address} may evict runs: maxmemory-policy is {policy}, it must be noeviction")
