"""The embedded stores and those on Redis, with what the contract tests do to them behind their back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio

from headrace.broker.contract.stores import Stores
from headrace.broker.embedded import Embedded
from headrace.broker.ports import RunStore, TokenLog
from headrace.broker.redis import connect_redis
from headrace.broker.redis.keys import Keys


class Clock:
    """A clock that stands until it is set on."""

    def __init__(self, at: float = 1_700_000_000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


@dataclass(frozen=True, slots=True)
class EmbeddedStores:
    home: Embedded
    clock: Clock
    log: TokenLog
    runs: RunStore

    async def now(self) -> float:
        return self.clock.at

    async def elapse(self, seconds: float) -> None:
        self.clock.at += seconds

    async def lapse(self, worker: str) -> None:
        self.home.shelf.lapse(worker)

    async def lose_log(self, run: str) -> None:
        record = self.home.shelf.find(run)
        assert record is not None
        record.log = None

    async def lose_all(self, run: str) -> None:
        self.home.shelf.forget(run)


@dataclass(frozen=True, slots=True)
class EmbeddedWorld:
    """One embedded broker and its clock."""

    home: Embedded
    clock: Clock

    @classmethod
    def new(cls, **limits: int) -> EmbeddedWorld:
        clock = Clock()
        return cls(Embedded(clock=clock, **limits), clock)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stores]:
        async with self.home.connect() as broker:
            yield EmbeddedStores(self.home, self.clock, broker.log, broker.runs)


@dataclass(frozen=True, slots=True)
class RedisStores:
    admin: redis.asyncio.Redis
    keys: Keys
    log: TokenLog
    runs: RunStore

    async def now(self) -> float:
        seconds, microseconds = await self.admin.time()
        return float(seconds) + microseconds / 1e6

    async def elapse(self, seconds: float) -> None:
        """Has the server itself wait: its clock is the one that counts."""
        until = await self.now() + seconds
        while (left := until - await self.now()) > 0:
            await self.admin.blpop("nothing is ever pushed here", left)

    async def lapse(self, worker: str) -> None:
        async for key in self.admin.scan_iter("hr:*:workers"):
            await self.admin.zrem(key, worker)

    async def lose_log(self, run: str) -> None:
        await self.admin.delete(self.keys.of(run).log)

    async def lose_all(self, run: str) -> None:
        own = self.keys.of(run)
        await self.admin.delete(own.run, own.log, own.job, own.state)


@dataclass(frozen=True, slots=True)
class RedisWorld:
    """One Redis database."""

    url: str

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stores]:
        pool = redis.asyncio.BlockingConnectionPool.from_url(self.url, max_connections=8)
        async with connect_redis(self.url) as stores, redis.asyncio.Redis.from_pool(pool) as admin:
            yield RedisStores(admin, Keys(), stores.log, stores.runs)
