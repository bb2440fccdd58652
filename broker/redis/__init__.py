"""Token log and run store on Redis 7.0 or newer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.broker.redis.keys import Keys
from headrace.broker.redis.line import Address, Line
from headrace.broker.redis.log import RedisLog
from headrace.broker.redis.runs import RedisRuns

__all__ = ["RedisLog", "RedisRuns", "RedisStores", "connect_redis"]


@dataclass(frozen=True, slots=True)
class RedisStores:
    """What a process has of Redis: one socket for commands, and up to four for reads that wait."""

    log: RedisLog
    runs: RedisRuns
    line: Line

    @property
    def connected(self) -> bool:
        """Whether the server could be reached when it was last needed."""
        return self.line.connected


@asynccontextmanager
async def connect_redis(
    url: str, *, prefix: str = "hr", reply_timeout: float = 2.0, patience: float = 5.0
) -> AsyncIterator[RedisStores]:
    """Connects, and looks whether the server is fit: raises BrokerUnavailable, or BrokerError saying what is wrong.

    Seconds: a reply may take ``reply_timeout``, a call goes on for ``patience`` over broken connections.
    """
    address, keys = Address.parse(url), Keys(prefix)
    line = Line(address, reply_timeout=reply_timeout, patience=patience)
    log = RedisLog(address, line, keys, reply_timeout=reply_timeout, patience=patience)
    try:
        await line.ready()
        yield RedisStores(log, RedisRuns(line, keys), line)
    finally:
        await log.close()
        await line.close()
