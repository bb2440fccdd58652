"""Large jobs wait in the run store: the queue around it keeps all promises of a queue, and some of its own."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import Raw

from headrace.broker.claim_check import ClaimCheck
from headrace.broker.contract.queues import DEFAULT_LIMITS, QueueLimits, WorkQueueContract, a_queue, take
from headrace.broker.embedded import Embedded, EmbeddedQueues
from headrace.broker.ports import Broker, BrokerUnavailable, Message, MessageTooLarge, WorkQueue
from headrace.broker.rabbitmq import RabbitMQ, Topology
from headrace.broker.redis import connect_redis
from headrace.protocol import jobs
from headrace.protocol.errors import StreamLost
from headrace.protocol.jobs import DEAD_QUEUE, GenerateJob, RenderJob
from tests import servers

INLINE = 2_000
EVERY = 40
"""Bytes, less than any job has."""


def job(size: int, request_id: str = "r1") -> RenderJob:
    body = Raw(json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode())
    endpoint = "/v1/chat/completions"
    return RenderJob(client="c", request_id=request_id, model="m", endpoint=endpoint, body=body, replay_ttl=60)


def message(asked: RenderJob) -> Message:
    return Message(jobs.encode(asked), asked.request_id)


class TestEmbedded(WorkQueueContract):
    @pytest.fixture(autouse=True)
    def _broker(self) -> None:
        self.homes: dict[QueueLimits, Embedded] = {}

    @asynccontextmanager
    async def connect(self, limits: QueueLimits = DEFAULT_LIMITS) -> AsyncIterator[WorkQueue]:
        home = self.homes.setdefault(limits, Embedded(max_length=limits.max_length, max_body=limits.max_body))
        async with home.connect() as broker:
            yield ClaimCheck(broker.queues, broker.runs, inline=EVERY)


@pytest.mark.servers
class TestServers(WorkQueueContract):
    @pytest.fixture(autouse=True)
    def _servers(self, vhost: servers.RabbitMQ, redis_db: servers.Redis) -> None:
        self.urls = vhost.url, redis_db.url

    @asynccontextmanager
    async def connect(self, limits: QueueLimits = DEFAULT_LIMITS) -> AsyncIterator[WorkQueue]:
        layout = Topology(limits.max_length, limits.rungs)
        async with (
            RabbitMQ.connect(self.urls[0], layout=layout, max_body=limits.max_body) as rabbit,
            connect_redis(self.urls[1]) as redis,
        ):
            yield ClaimCheck(rabbit.queues, redis.runs, inline=EVERY)


@pytest.fixture(params=["embedded", "servers"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Broker, WorkQueue]]:
    """A broker, and the queues of it as they are without the claim check."""
    if request.param == "embedded":
        home = Embedded(max_body=INLINE * 2)
        async with home.connect() as bare:
            yield Broker(ClaimCheck(bare.queues, bare.runs, inline=INLINE), *rest(bare)), bare.queues
        home.close()
        return
    vhost, redis_db = request.getfixturevalue("vhost"), request.getfixturevalue("redis_db")
    async with (
        RabbitMQ.connect(vhost.url, max_body=INLINE * 2) as rabbit,
        connect_redis(redis_db.url) as redis,
    ):
        queues = ClaimCheck(rabbit.queues, redis.runs, inline=INLINE)
        yield Broker(queues, rabbit.topics, redis.log, redis.runs, redis.topics), rabbit.queues


def rest(bare: Broker) -> tuple[object, ...]:
    return bare.topics, bare.log, bare.runs, bare.streams


async def test_a_large_job_arrives_whole_and_its_queue_holds_a_note(broker: tuple[Broker, WorkQueue]) -> None:
    whole, bare = broker
    queue, asked = a_queue(), job(100_000)
    await whole.queues.declare([queue])
    await whole.queues.publish(queue, message(asked))
    async with bare.consume(queue, prefetch=1) as deliveries:
        (note,) = await take(deliveries, 1)
        ref = jobs.ref_of(note.body)
        assert ref is not None
        assert (ref.run, ref.model, ref.replay_ttl, ref.digest) == (asked.run, "m", 60, jobs.digest_of(asked))
        assert len(note.body) < INLINE
        await bare.release(note)
    async with whole.queues.consume(queue, prefetch=1) as deliveries:
        (delivery,) = await take(deliveries, 1)
        assert delivery.body == jobs.encode(asked)
        await whole.queues.ack(delivery)
    assert await bare.depth(queue) == 0


async def test_a_large_job_is_retried_moved_and_buried_as_a_note(broker: tuple[Broker, WorkQueue]) -> None:
    whole, bare = broker
    queue, other, asked = a_queue(), a_queue(), job(100_000)
    await whole.queues.declare([queue, other])
    await whole.queues.publish(queue, message(asked))
    async with whole.queues.consume(queue, prefetch=1) as deliveries:
        await whole.queues.retry((await take(deliveries, 1))[0], 0.1, {"tries": 1})
        (again,) = await take(deliveries, 1)
        assert (again.body, again.headers["tries"]) == (jobs.encode(asked), 1)
        await whole.queues.move(again, other)
    async with whole.queues.consume(other, prefetch=1) as deliveries:
        await whole.queues.bury((await take(deliveries, 1))[0], "it failed")
    async with bare.consume(DEAD_QUEUE, prefetch=1) as deliveries:
        (note,) = await take(deliveries, 1)
        assert jobs.ref_of(note.body) is not None
        assert note.headers["x-headrace-reason"] == "it failed"
        await bare.ack(note)


async def test_what_is_not_stored_any_more_is_said_by_whoever_reads_the_note(broker: tuple[Broker, WorkQueue]) -> None:
    whole, _ = broker
    queue, asked = a_queue(), job(100_000)
    await whole.queues.declare([queue])
    await whole.queues.publish(queue, message(asked))
    await whole.runs.drop_body(asked.run, jobs.body_name(jobs.encode(asked)))
    async with whole.queues.consume(queue, prefetch=1) as deliveries:
        (delivery,) = await take(deliveries, 1)
        with pytest.raises(StreamLost, match="not stored any more"):
            jobs.decode(delivery.body)
        said = jobs.sender(delivery.body)
        assert said is not None
        assert (said.run, said.digest) == (asked.run, jobs.digest_of(asked))
        await whole.queues.ack(delivery)


async def test_a_dead_letter_keeps_its_body_beyond_its_time(broker: tuple[Broker, WorkQueue]) -> None:
    whole, _ = broker
    queue = a_queue()
    asked = jobs.stamp(job(100_000), time.time())
    await whole.queues.declare([queue])
    await whole.queues.publish(queue, message(asked))
    async with whole.queues.consume(queue, prefetch=1) as deliveries:
        await whole.queues.bury((await take(deliveries, 1))[0], "it failed")
    async with whole.queues.consume(DEAD_QUEUE, prefetch=1) as deliveries:
        (buried,) = await take(deliveries, 1)
        assert isinstance(jobs.decode(buried.body), RenderJob)
        await whole.queues.ack(buried)


async def test_a_body_over_the_limit_is_refused_with_the_limit() -> None:
    home = Embedded()
    assert isinstance(home.broker.queues, EmbeddedQueues)
    queues = ClaimCheck(home.broker.queues, home.broker.runs, inline=INLINE, most=50_000)
    await queues.declare(["render.m"])
    with pytest.raises(MessageTooLarge, match="50000") as refused:
        await queues.publish("render.m", message(job(60_000)))
    assert refused.value.limit == 50_000
    assert await queues.depth("render.m") == 0
    home.close()


async def test_two_bodies_of_one_run_are_kept_apart(broker: tuple[Broker, WorkQueue]) -> None:
    whole, _ = broker
    queue, asked = a_queue(), job(50_000)
    request = Raw(json.dumps({"token_ids": list(range(10_000)), "sampling_params": {}}).encode())
    rendered = GenerateJob(client="c", request_id="r1", model="m", request=request, source=asked.body)
    await whole.queues.declare([queue])
    for body in (jobs.encode(asked), jobs.encode(rendered)):
        await whole.queues.publish(queue, Message(body, "r1"))
    async with whole.queues.consume(queue, prefetch=2) as deliveries:
        first, second = await take(deliveries, 2)
        assert (first.body, second.body) == (jobs.encode(asked), jobs.encode(rendered))
        for each in (first, second):
            await whole.queues.ack(each)


async def test_an_asker_that_leaves_before_the_body_is_there_loses_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    home, asked, gate = Embedded(), (job(50_000, "r1"), job(50_000, "r2")), asyncio.Event()
    queues, fetch = ClaimCheck(home.broker.queues, home.broker.runs, inline=INLINE), home.broker.runs.get_body

    async def slow(run: str, name: str) -> bytes | None:
        await gate.wait()
        return await fetch(run, name)

    monkeypatch.setattr(home.broker.runs, "get_body", slow)
    await queues.declare(["render.m"])
    for each in asked:
        await queues.publish("render.m", message(each))
    async with queues.consume("render.m", prefetch=2) as deliveries:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(deliveries), 0.01)
        gate.set()
        (delivery,) = await take(deliveries, 1)
        assert delivery.body == jobs.encode(asked[0])
        await queues.ack(delivery)
        gate.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(deliveries), 0.01)
    assert await queues.depth("render.m") == 1
    home.close()


async def test_a_body_that_cannot_be_fetched_now_comes_later_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, asked = Embedded(), (job(50_000, "r1"), job(1, "r2"))
    queues, fetch, away = ClaimCheck(home.broker.queues, home.broker.runs, inline=INLINE), home.broker.runs.get_body, 2

    async def failing(run: str, name: str) -> bytes | None:
        nonlocal away
        if away:
            away -= 1
            raise BrokerUnavailable("the store is away")
        return await fetch(run, name)

    monkeypatch.setattr(home.broker.runs, "get_body", failing)
    monkeypatch.setattr("headrace.broker.claim_check.AWAY_S", 0.01)
    await queues.declare(["render.m"])
    for each in asked:
        await queues.publish("render.m", message(each))
    async with queues.consume("render.m", prefetch=2) as deliveries:
        assert [each.request_id for each in await take(deliveries, 2)] == ["r2", "r1"]
    home.close()
