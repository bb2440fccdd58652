"""What has gone wrong elsewhere between workers, RabbitMQ and Redis, tried on ours."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio

from headrace.broker.contract.queues import a_queue, bodies, message, take
from headrace.broker.contract.stores import a_run, a_worker, append, batch, claim, places, taken, whole
from headrace.broker.entries import Position
from headrace.broker.ports import Append, BrokerUnavailable, Release
from headrace.broker.rabbitmq import RabbitMQ, Timing, Topology
from headrace.broker.redis import connect_redis
from headrace.broker.redis.keys import Keys
from tests import servers
from tests.contract.worlds import RedisStores
from tests.proxy import Mood, Proxy
from tests.servers import Redis, open_redis

pytestmark = pytest.mark.servers

QUICK = Timing(connect=1.0, call=5.0, close=1.0, backoff=0.02, backoff_max=0.2, watch=0.2)
RUNGS = (0.2, 0.8)
BOUND = 20.0


async def until(holds: Callable[[], bool]) -> None:
    """Returns once it holds. Raises TimeoutError."""
    async with asyncio.timeout(BOUND):
        while not holds():  # noqa: ASYNC110 (counters and states, no events)
            await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------------- RabbitMQ


async def test_work_that_keeps_the_event_loop_past_the_heartbeats_costs_the_connection_and_nothing_else(
    vhost: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with RabbitMQ.connect(vhost.url, timing=replace(QUICK, heartbeat=1)) as rabbit:
        await rabbit.queues.declare([queue])
        for n in range(3):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=3) as deliveries:
            (held,) = await take(deliveries, 1)
            time.sleep(4.0)  # noqa: ASYNC251 (this is the fault)
            await until(lambda: rabbit.counters.connections_lost > 0)
            await rabbit.queues.ack(held)
            assert rabbit.counters.stale_settlements == 1
            again = await take(deliveries, 3)
            assert sorted(bodies(again)) == [message(n).body for n in range(3)]
            for delivery in again:
                await rabbit.queues.ack(delivery)
        assert await rabbit.queues.depth(queue) == 0
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


async def test_consumers_and_subscriptions_that_come_and_go_leave_no_objects_behind(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])

        async def come_and_go(times: int) -> int:
            for n in range(times):
                async with rabbit.queues.consume(queue, prefetch=5) as deliveries, rabbit.topics.subscribe("a.#"):
                    await rabbit.queues.publish(queue, message(n))
                    await rabbit.queues.ack((await take(deliveries, 1))[0])
            gc.collect()
            return len(gc.get_objects())

        before = await come_and_go(40)
        assert await come_and_go(160) - before < 160


async def test_a_message_that_waits_for_its_retry_is_held_by_nobody(vhost: servers.RabbitMQ) -> None:
    queue, layout = a_queue(), Topology(rungs=RUNGS)
    async with RabbitMQ.connect(vhost.url, layout=layout) as leaving:
        await leaving.queues.declare([queue])
        await leaving.queues.publish(queue, message(7))
        async with leaving.queues.consume(queue, prefetch=1) as deliveries:
            await leaving.queues.retry((await take(deliveries, 1))[0], 0.8, {"tries": 1})
    async with (
        RabbitMQ.connect(vhost.url, layout=layout) as coming,
        coming.queues.consume(queue, prefetch=1) as deliveries,
    ):
        (again,) = await take(deliveries, 1)
        assert (again.body, again.headers["tries"]) == (message(7).body, 1)


async def test_messages_that_wait_for_their_retry_take_no_place_of_those_that_are_ready(
    vhost: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, layout=Topology(rungs=(600.0,))) as rabbit:
        await rabbit.queues.declare([queue])
        for n in range(4):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=4) as deliveries:
            for delivery in await take(deliveries, 4):
                await rabbit.queues.retry(delivery, 600.0)
            await rabbit.queues.publish(queue, message(4))
            assert bodies(await take(deliveries, 1)) == [message(4).body]


async def test_a_short_retry_does_not_wait_behind_a_long_one(
    vhost: servers.RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.5)  # no jitter
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, layout=Topology(rungs=RUNGS)) as rabbit:
        await rabbit.queues.declare([queue])
        for n in range(2):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=2) as deliveries:
            first, second = await take(deliveries, 2)
            await rabbit.queues.retry(first, RUNGS[1])
            await rabbit.queues.retry(second, RUNGS[0])
            assert bodies(await take(deliveries, 2)) == [second.body, first.body]


async def test_the_broker_knows_the_prefetch_of_each_consumer(vhost: servers.RabbitMQ) -> None:
    wanted = {a_queue(): 3, a_queue(): 70}

    def known() -> dict[str, int]:
        listed = vhost.api("GET", f"/api/consumers/{quote(vhost.vhost, safe='')}")
        return {each["queue"]["name"]: each["prefetch_count"] for each in listed}

    async with RabbitMQ.connect(vhost.url) as rabbit:
        await rabbit.queues.declare(wanted)
        one, two = (rabbit.queues.consume(queue, prefetch) for queue, prefetch in wanted.items())
        async with one, two:
            await until_known(known, wanted)


async def until_known(known: Callable[[], dict[str, int]], wanted: dict[str, int]) -> None:
    """The management API tells what there is a few seconds late."""
    async with asyncio.timeout(BOUND):
        while (told := await asyncio.to_thread(known)) != wanted:
            assert told.items() <= wanted.items()


@pytest.mark.parametrize("mood", [Mood.DEAF, Mood.FORGETFUL])
async def test_a_retry_that_fails_leaves_the_message_with_its_queue(vhost: servers.RabbitMQ, mood: Mood) -> None:
    queue = a_queue()
    async with Proxy.to(vhost.host, vhost.port) as proxy:
        url = replace(vhost, host="127.0.0.1", port=proxy.port).url
        timing = replace(QUICK, call=0.5)
        async with RabbitMQ.connect(url, timing=timing, layout=Topology(rungs=(600.0,))) as rabbit:
            await rabbit.queues.declare([queue])
            await rabbit.queues.publish(queue, message(7))
            async with rabbit.queues.consume(queue, prefetch=1) as deliveries:
                (held,) = await take(deliveries, 1)
                proxy.mood = mood
                with pytest.raises(BrokerUnavailable):
                    await rabbit.queues.retry(held, 600.0)
                proxy.mood = Mood.FAIR
                proxy.cut()
                (again,) = await take(deliveries, 1)
                assert again.redelivered
                assert again.body == held.body


# ------------------------------------------------------------------------------------------------- Redis


async def test_a_read_may_wait_longer_than_a_reply_may_take(redis_db: Redis) -> None:
    run = a_run()
    async with behind_a_proxy(redis_db, reply_timeout=0.2) as (proxy, stores):
        await taken(stores, run, a_worker())
        assert await stores.log.read({run: Position(1, 0)}, wait=0.1) == {}
        before = proxy.accepted
        assert await stores.log.read({run: Position(1, 0)}, wait=1.0) == {}
        assert proxy.accepted == before  # neither given up nor asked again on another connection


async def test_what_a_failover_loses_is_told_to_its_writer_and_the_run_goes_on_from_what_is_left() -> None:
    run = a_run()
    with open_redis() as master, open_redis() as replica:
        async with (
            Proxy.to(master.host, master.port) as replication,
            behind_a_proxy(master) as (line, stores),
            admin_of(master) as old,
            admin_of(replica) as new,
        ):
            await old.config_set("repl-diskless-sync-delay", 0)
            await new.replicaof("127.0.0.1", replication.port)
            await taken(stores, run, a_worker())
            assert await append(stores, batch(run, Position(1, 0), 1, 3)) is Append.STORED
            async with asyncio.timeout(BOUND):
                while await new.xlen(stores.keys.of(run).log) < 4:  # noqa: ASYNC110 (nobody tells)
                    await asyncio.sleep(0.01)
            replication.mood = Mood.DEAF
            assert await append(stores, batch(run, Position(1, 3), 4, 2)) is Append.STORED
            await new.replicaof("NO", "ONE")
            line.target = replica.host, replica.port
            line.cut()
            assert await append(stores, batch(run, Position(1, 5), 6)) is Append.LOST
            await stores.runs.release(run, "generate", 1, Release.HANDOVER)
            again = await claim(stores, run, a_worker())
            assert (again.epoch, again.chunks) == (2, 3)
            assert places(await whole(stores, run)) == [
                "begin 1-0", "chunk 1-1", "chunk 1-2", "chunk 1-3", "begin 2-0",
            ]  # fmt: skip


@asynccontextmanager
async def admin_of(server: Redis) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(server.url) as admin:
        yield admin


@asynccontextmanager
async def behind_a_proxy(server: Redis, *, reply_timeout: float = 2.0) -> AsyncIterator[tuple[Proxy, RedisStores]]:
    async with Proxy.to(server.host, server.port) as proxy, admin_of(server) as admin:
        url = f"redis://127.0.0.1:{proxy.port}/{server.db}"
        async with connect_redis(url, reply_timeout=reply_timeout, patience=BOUND) as stores:
            yield proxy, RedisStores(admin, Keys(), stores.log, stores.runs)
