"""RabbitMQ's work queues keep what the port promises, and what its topology promises besides."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import aiormq
import pytest
from aiormq.exceptions import ChannelPreconditionFailed
from pamqp import commands as spec

from headrace.broker.contract.queues import DEFAULT_LIMITS, QueueLimits, WorkQueueContract, a_queue, message, take
from headrace.broker.ports import Message, Unroutable, WorkQueue
from headrace.broker.rabbitmq import RabbitMQ, Topology
from headrace.broker.rabbitmq.topology import DELIVERY_LIMIT
from headrace.protocol.jobs import DEAD_QUEUE, INTAKE_QUEUE
from tests import servers

pytestmark = pytest.mark.servers


class TestRabbitWorkQueue(WorkQueueContract):
    @pytest.fixture(autouse=True)
    def _server(self, vhost: servers.RabbitMQ) -> None:
        self.url = vhost.url

    @asynccontextmanager
    async def connect(self, limits: QueueLimits = DEFAULT_LIMITS) -> AsyncIterator[WorkQueue]:
        layout = Topology(limits.max_length, limits.rungs)
        async with RabbitMQ.connect(self.url, layout=layout, max_body=limits.max_body) as rabbit:
            yield rabbit.queues


async def test_what_the_broker_gives_up_on_lands_in_intake_and_is_buried_under_its_first_queue(
    vhost: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url) as rabbit:
        queues = rabbit.queues
        await queues.declare([queue])
        await queues.publish(queue, message(1, attempt=3))
        async with queues.consume(queue, prefetch=1) as deliveries, queues.consume(INTAKE_QUEUE, prefetch=1) as intake:
            for _ in range(DELIVERY_LIMIT + 1):
                await queues.release((await take(deliveries, 1))[0])
            (given_up,) = await take(intake, 1)
            assert (given_up.body, given_up.request_id, given_up.headers["attempt"]) == (message(1).body, "r1", 3)
            await queues.bury(given_up, "delivered too often")
        async with queues.consume(DEAD_QUEUE, prefetch=1) as dead:
            (buried,) = await take(dead, 1)
            assert buried.headers["x-headrace-queue"] == queue
            assert buried.headers["attempt"] == 3
            assert not [
                name for name in buried.headers if name.startswith(("x-death", "x-first-death", "x-last-death"))
            ]
            await queues.ack(buried)


async def test_a_retried_message_starts_with_a_clean_past(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, layout=Topology(rungs=(0.1,))) as rabbit:
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message(1))
        async with rabbit.queues.consume(queue, prefetch=1) as deliveries:
            for _ in range(3):  # over the same rung each time: the broker must not take it for a circle
                (delivery,) = await take(deliveries, 1)
                await rabbit.queues.release(delivery)
                (again,) = await take(deliveries, 1)
                assert again.headers["x-delivery-count"] == 1
                await rabbit.queues.retry(again, 0.1)
            (last,) = await take(deliveries, 1)
            assert "x-delivery-count" not in last.headers
            await rabbit.queues.ack(last)


async def test_a_body_over_our_limit_that_others_sent_can_still_be_buried(vhost: servers.RabbitMQ) -> None:
    queue, body = a_queue(), b"x" * 2_000
    async with RabbitMQ.connect(vhost.url) as sender, RabbitMQ.connect(vhost.url, max_body=1_000) as worker:
        await sender.queues.declare([queue])
        await sender.queues.publish(queue, Message(body))
        async with worker.queues.consume(queue, prefetch=1) as deliveries:
            await worker.queues.bury((await take(deliveries, 1))[0], "too large")
        async with worker.queues.consume(DEAD_QUEUE, prefetch=1) as dead:
            assert (await take(dead, 1))[0].body == body


async def test_a_job_that_came_back_too_often_says_so_although_it_was_retried_before(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, layout=Topology(rungs=(0.1,))) as rabbit:
        queues = rabbit.queues
        await queues.declare([queue])
        await queues.publish(queue, message(1))
        async with queues.consume(queue, prefetch=1) as deliveries, queues.consume(INTAKE_QUEUE, prefetch=1) as intake:
            await queues.retry((await take(deliveries, 1))[0], 0.1)
            for _ in range(DELIVERY_LIMIT + 1):
                await queues.release((await take(deliveries, 1))[0])
            (given_up,) = await take(intake, 1)
            assert given_up.gave_up == "delivery_limit"
            await queues.bury(given_up, "delivered too often")
        async with queues.consume(DEAD_QUEUE, prefetch=1) as dead:
            (buried,) = await take(dead, 1)
            assert buried.headers["x-headrace-queue"] == queue


async def test_headers_that_fill_their_frame_keep_a_message_neither_from_being_passed_on_nor_from_being_buried(
    vhost: servers.RabbitMQ,
) -> None:
    queue, other = a_queue(), a_queue()
    async with RabbitMQ.connect(vhost.url) as rabbit:
        queues = rabbit.queues
        await queues.declare([queue, other])
        connection = await aiormq.connect(vhost.url)
        channel = await connection.channel()
        full: spec.FieldTable = {"traceparent": "00-ab", **{f"h{n}": "x" * 1_000 for n in range(129)}}
        await channel.basic_publish(b"{}", routing_key=queue, properties=spec.Basic.Properties(headers=full))
        await connection.close()
        async with queues.consume(queue, prefetch=1) as deliveries:
            (delivery,) = await take(deliveries, 1)
            await queues.publish(other, Message(delivery.body, "passed on", delivery.headers))
            await queues.bury(delivery, "why " * 1_000, {"x-headrace-last-error": "é" * 1_000})
        async with queues.consume(DEAD_QUEUE, prefetch=1) as dead:
            (buried,) = await take(dead, 1)
            assert str(buried.headers["x-headrace-reason"]).startswith("why why")
            assert (buried.headers["x-headrace-queue"], buried.headers["traceparent"]) == (queue, "00-ab")
            assert buried.headers["x-headrace-last-error"] == "é" * 1_000
        assert await queues.depth(other) == 1
        assert rabbit.counters.connections_lost == 0


async def test_the_broker_vouches_for_who_publishes(vhost: servers.RabbitMQ) -> None:
    queue, name = a_queue(), f"client-{vhost.vhost}"
    api, place = vhost.api, quote(vhost.vhost, safe="")
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    await asyncio.to_thread(api, "PUT", f"/api/users/{name}", {"password": "secret", "tags": ""})
    try:
        await asyncio.to_thread(api, "PUT", f"/api/permissions/{place}/{name}", everything)
        own = replace(vhost, user=name, password="secret").url
        async with RabbitMQ.connect(vhost.url) as worker, RabbitMQ.connect(own) as client:
            await worker.queues.declare([queue])
            await client.queues.publish(queue, message(1))
            await worker.queues.publish(queue, message(2))
            connection = await aiormq.connect(own)
            channel = await connection.channel()
            claimed = spec.Basic.Properties(user_id=vhost.user, correlation_id="claimed")
            with pytest.raises(ChannelPreconditionFailed, match="user_id"):
                await channel.basic_publish(b"{}", routing_key=queue, properties=claimed)
            channel = await connection.channel()
            await channel.basic_publish(b"{}", routing_key=queue, properties=spec.Basic.Properties())
            await connection.close()
            async with worker.queues.consume(queue, prefetch=3) as deliveries:
                taken = await take(deliveries, 3)
                assert [each.user for each in taken] == [name, vhost.user, None]
    finally:
        await asyncio.to_thread(api, "DELETE", f"/api/users/{name}")


async def test_a_name_that_no_queue_can_have_is_refused_as_such(vhost: servers.RabbitMQ) -> None:
    name = "generate." + "é" * 200
    async with RabbitMQ.connect(vhost.url) as rabbit:
        with pytest.raises(Unroutable, match=name):
            await rabbit.queues.declare([name])
