"""Token log, run store and the client topics of those who choose so, on Redis 7.0 or newer."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from headrace.broker.redis.keys import Keys
from headrace.broker.redis.line import Address, Line
from headrace.broker.redis.log import RedisLog
from headrace.broker.redis.runs import RedisRuns
from headrace.broker.redis.topics import RedisTopics

__all__ = ["RedisLog", "RedisRuns", "RedisStores", "RedisTopics", "connect_redis"]

MAX_BODY: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class RedisStores:
    """What a process has of Redis: one socket for commands and one for large bodies, up to four for reads that wait,
    one for a subscription."""

    log: RedisLog
    runs: RedisRuns
    topics: RedisTopics
    line: Line

    @property
    def connected(self) -> bool:
        """Whether the server could be reached when it was last needed."""
        return self.line.connected


@asynccontextmanager
async def connect_redis(
    url: str,
    *,
    prefix: str = "hr",
    reply_timeout: float = 2.0,
    patience: float = 5.0,
    max_body: int = MAX_BODY,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[RedisStores]:
    """Connects, and looks whether the server is fit: raises BrokerUnavailable, or BrokerError saying what is wrong.

    Seconds: a reply may take ``reply_timeout``, a call goes on for ``patience`` over broken connections. ``max_body``
    bounds the bytes of a message to a client. ``tls`` is for rediss://, the system's authorities unless given.
    """
    address, keys = Address.parse(url), Keys(prefix)
    if tls is not None and address.tls is not None:
        address = replace(address, tls=tls)
    line = Line(address, reply_timeout=reply_timeout, patience=patience)
    bodies = Line(address, reply_timeout=reply_timeout, patience=patience)
    log = RedisLog(address, line, keys, reply_timeout=reply_timeout, patience=patience)
    topics = RedisTopics(address, line, keys, reply_timeout=reply_timeout, patience=patience, max_body=max_body)
    try:
        await line.ready()
        yield RedisStores(log, RedisRuns(line, bodies, keys), topics, line)
    finally:
        await log.close()
        await bodies.close()
        await line.close()
