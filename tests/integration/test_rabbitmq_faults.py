"""What happens when RabbitMQ, or the way to it, fails: waits are bounded, work resumes, nothing is lost."""

import asyncio
import gc
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import aiormq
import pytest
from aiormq.abc import ChannelFrame
from pamqp import commands as spec
from yarl import URL

from headrace.broker.contract.queues import a_queue, find, message, take
from headrace.broker.contract.topics import a_client, event, hear, hear_until, numbers
from headrace.broker.ports import (
    BrokerError,
    BrokerUnavailable,
    Delivery,
    Message,
    TopicMessage,
    TopologyDrift,
    Unroutable,
)
from headrace.broker.rabbitmq import RabbitMQ, State, Timing, Topology
from headrace.broker.rabbitmq import publisher as publisher_module
from headrace.broker.rabbitmq.consumer import Consumer
from headrace.protocol.jobs import DEAD_QUEUE
from tests import servers
from tests.proxy import Mood, Proxy

pytestmark = pytest.mark.servers

QUICK = Timing(connect=1.0, call=5.0, close=1.0, backoff=0.02, backoff_max=0.2, watch=0.2)
IMPATIENT = replace(QUICK, call=0.5)
RUNGS = (0.2, 0.4)

BOUND = 20.0
"""Seconds; what is bounded ends long before. Without a bound it would not end."""


@pytest.fixture(autouse=True)
async def _nothing_goes_unheard() -> AsyncIterator[None]:
    """No task or future may end with a failure that nobody has asked for."""
    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


@asynccontextmanager
async def behind_a_proxy(vhost: servers.RabbitMQ, timing: Timing = QUICK) -> AsyncIterator[tuple[RabbitMQ, Proxy]]:
    """RabbitMQ with a proxy before it."""
    async with Proxy.to(vhost.host, vhost.port) as proxy:
        url = replace(vhost, host="127.0.0.1", port=proxy.port).url
        async with RabbitMQ.connect(url, timing=timing, layout=Topology(rungs=RUNGS)) as rabbit:
            yield rabbit, proxy


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns once it holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 (counters and states, no events)
            await asyncio.sleep(0.005)


async def insist(rabbit: RabbitMQ, queue: str, sent: Message) -> None:
    """Publishes until the broker has it, as a submitter does."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await rabbit.queues.publish(queue, sent)
            except (BrokerUnavailable, Unroutable):
                await asyncio.sleep(0.02)


async def consume_all(rabbit: RabbitMQ, queue: str, count: int, seen: list[bytes]) -> None:
    """Takes and acks until ``count`` different bodies have come."""
    async with asyncio.timeout(30), rabbit.queues.consume(queue, prefetch=10) as deliveries:
        while len(set(seen)) < count:
            delivery = await anext(deliveries)
            seen.append(delivery.body)
            await rabbit.queues.ack(delivery)


# -------------------------------------------------------------------------------------------- lost connections


async def test_publishing_and_consuming_go_on_when_the_broker_closes_the_connections(vhost: servers.RabbitMQ) -> None:
    queue, name, seen = a_queue(), f"victim-{uuid.uuid4().hex[:8]}", list[bytes]()
    async with RabbitMQ.connect(vhost.url, timing=QUICK, name=name) as rabbit:
        await rabbit.queues.declare([queue])
        consuming = asyncio.create_task(consume_all(rabbit, queue, 200, seen))
        for n in range(100):
            await rabbit.queues.publish(queue, message(n))
        await asyncio.to_thread(close_connections, vhost, name)
        for n in range(100, 200):
            await insist(rabbit, queue, message(n))
        await consuming
        assert rabbit.counters.connections_lost >= 2
        assert rabbit.health().up
    assert set(seen) == {message(n).body for n in range(200)}


def close_connections(vhost: servers.RabbitMQ, name: str) -> None:
    """Makes the broker close both of the connections of this name; it lists them a little late."""
    deadline = time.monotonic() + 20
    ours: list[str] = []
    while len(ours) < 2:
        assert time.monotonic() < deadline, "the broker does not list the connections"
        listed = vhost.api("GET", f"/api/vhosts/{quote(vhost.vhost, safe='')}/connections")
        ours = [each["name"] for each in listed if name in each.get("client_properties", {}).get("connection_name", "")]
        time.sleep(0.1)
    for connection in ours:
        vhost.api("DELETE", f"/api/connections/{quote(connection, safe='')}")


@pytest.mark.parametrize("cuts", [(10, 11, 12), (5, 60, 110)])
async def test_no_confirmed_message_is_lost_over_cut_connections(
    vhost: servers.RabbitMQ, cuts: tuple[int, ...]
) -> None:
    queue, seen = a_queue(), list[bytes]()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        consuming = asyncio.create_task(consume_all(rabbit, queue, 120, seen))
        for n in range(120):
            if n in cuts:
                proxy.cut()
            await insist(rabbit, queue, message(n))
        await consuming
    assert set(seen) == {message(n).body for n in range(120)}


async def test_many_publishes_in_flight_all_survive_a_cut(vhost: servers.RabbitMQ) -> None:
    queue, seen = a_queue(), list[bytes]()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        async with asyncio.TaskGroup() as group:
            for n in range(300):
                group.create_task(rabbit.queues.publish(queue, message(n)))
            await proxy.requested.wait()
            proxy.cut()
        await consume_all(rabbit, queue, 300, seen)
    assert set(seen) == {message(n).body for n in range(300)}


async def test_a_flush_ends_once_the_broker_has_answered_on_another_channel_if_need_be(
    vhost: servers.RabbitMQ,
) -> None:
    client = a_client()
    async with behind_a_proxy(vhost, IMPATIENT) as (rabbit, proxy):
        await rabbit.topics.publish([event(f"{client}.chunk", durable=False)])
        await rabbit.topics.flush()
        proxy.mood = Mood.FORGETFUL
        await rabbit.topics.publish([event(f"{client}.chunk", durable=False)])
        with pytest.raises(BrokerUnavailable, match="flush the client topics"):
            await rabbit.topics.flush()
        flushing = asyncio.create_task(rabbit.topics.flush())
        proxy.mood = Mood.FAIR
        proxy.cut()
        await flushing


@pytest.mark.parametrize("swallowed", [Mood.FORGETFUL, Mood.DEAF])
async def test_what_nobody_waited_for_is_sent_again_after_a_cut_and_in_order(
    vhost: servers.RabbitMQ, swallowed: Mood
) -> None:
    client = a_client()
    key, heard = f"{client}.chunk", list[bytes]()
    sent = [b'{"n":%d}' % n for n in range(40)]
    async with (
        RabbitMQ.connect(vhost.url) as listener,
        behind_a_proxy(vhost, IMPATIENT) as (rabbit, proxy),
        listener.topics.subscribe(f"{client}.#") as messages,
    ):
        for n, body in enumerate(sent):
            if n == 10:
                proxy.mood = swallowed
            if n == 20:
                proxy.mood = Mood.FAIR
                proxy.cut()
                await until(lambda: rabbit.counters.connections_lost >= 1)
            await rabbit.topics.publish([TopicMessage(key, body)])
        async with asyncio.timeout(BOUND):
            while sent[-1] not in heard:
                heard.append((await anext(messages)).body)
    firsts = list(dict.fromkeys(heard))
    assert firsts == sent


async def test_a_late_ack_is_counted_and_the_message_comes_back_once(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message())
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            (first,) = await take(deliveries, 1)
            proxy.cut()
            (again,) = await take(deliveries, 1)
            assert again.redelivered and again.body == first.body
            await rabbit.queues.ack(first)
            assert rabbit.counters.stale_settlements == 1
            await rabbit.queues.ack(again)
        assert await rabbit.queues.depth(queue) == 0
        assert rabbit.counters.stale_settlements == 1


async def test_a_late_retry_or_burial_makes_no_copy(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message())
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            (first,) = await take(deliveries, 1)
            proxy.cut()
            (again,) = await take(deliveries, 1)
            await rabbit.queues.retry(first, 0.2)
            await rabbit.queues.bury(first, "late")
            await rabbit.queues.release(first)
            assert rabbit.counters.stale_settlements == 3
            await rabbit.queues.ack(again)
        assert await rabbit.queues.depth(DEAD_QUEUE) == 0
        assert await rabbit.queues.depth("headrace.retry.200") == 0
        assert await rabbit.queues.depth(queue) == 0


async def test_a_second_settlement_is_counted_and_harms_no_other_delivery(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        for n in range(2):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=2) as deliveries:
            one, two = await take(deliveries, 2)
            await rabbit.queues.ack(one)
            await rabbit.queues.ack(one)
            await rabbit.queues.release(one)
            await rabbit.queues.ack(two)
        assert rabbit.counters.stale_settlements == 2
        assert rabbit.counters.resubscribed == 0
        assert await rabbit.queues.depth(queue) == 0


async def test_what_was_fetched_before_a_cut_is_not_given_out_after_it(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        for n in range(6):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=6) as deliveries:
            await take(deliveries, 1)
            proxy.cut()
            await until(lambda: rabbit.counters.resubscribed == 1)
            fresh = await take(deliveries, 6)
            assert sorted(delivery.body for delivery in fresh) == [message(n).body for n in range(6)]
            for delivery in fresh:
                await rabbit.queues.ack(delivery)
            assert rabbit.counters.stale_settlements == 0
        assert await rabbit.queues.depth(queue) == 0


async def test_a_subscription_listens_again_after_a_cut(vhost: servers.RabbitMQ) -> None:
    client = a_client()
    async with (
        behind_a_proxy(vhost) as (rabbit, proxy),
        rabbit.topics.subscribe(f"{client}.#") as own,
        rabbit.topics.subscribe("#", name="kept") as named,
    ):
        await rabbit.topics.publish([event(f"{client}.final", 0)])
        assert numbers(await hear(own, 1)) == numbers(await hear(named, 1)) == [0]
        proxy.cut()
        await until(lambda: rabbit.counters.resubscribed == 2)
        await rabbit.topics.publish([event(f"{client}.chunk", n, durable=n == 5) for n in range(1, 6)])
        assert numbers(await hear(own, 5)) == [1, 2, 3, 4, 5]
        # What was told and not yet settled when the line was cut is told again.
        assert numbers(await hear(named, 6)) == [0, 1, 2, 3, 4, 5]


async def test_client_messages_in_flight_over_a_cut_arrive_in_order(vhost: servers.RabbitMQ) -> None:
    client = a_client()
    async with (
        RabbitMQ.connect(vhost.url) as receiver,
        behind_a_proxy(vhost) as (sender, proxy),
        receiver.topics.subscribe(f"{client}.#") as messages,
    ):
        for start in range(0, 60, 10):
            if start in {20, 40}:
                proxy.cut()
            await sender.topics.publish([event(f"{client}.final", n) for n in range(start, start + 10)])
        await receiver.topics.publish([event(f"{client}.end", 99)])
        heard = numbers(await hear_until(messages, 99))
        assert list(dict.fromkeys(heard)) == list(range(60))


# -------------------------------------------------------------------------------------------- dropped consumers


async def test_a_deleted_queue_is_declared_again_and_consumed(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            await asyncio.to_thread(delete_queue, vhost, queue)
            await insist(rabbit, queue, message(7))
            (delivery,) = await take(deliveries, 1)
            assert delivery.body == message(7).body
            await rabbit.queues.ack(delivery)
        assert rabbit.counters.resubscribed == 1
        assert rabbit.counters.connections_lost == 0


async def test_a_consumer_of_a_queue_that_others_own_waits_until_it_is_back(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as owner, RabbitMQ.connect(vhost.url, timing=QUICK) as guest:
        await owner.queues.declare([queue])
        async with guest.queues.consume(queue, prefetch=5) as deliveries:
            assert isinstance(deliveries, Consumer)
            await asyncio.to_thread(delete_queue, vhost, queue)
            await until(lambda: deliveries._lane is None)
            await owner.queues.declare([queue])
            await owner.queues.publish(queue, message(7))
            assert (await take(deliveries, 1))[0].body == message(7).body


async def test_a_consumer_that_the_broker_forgot_is_noticed(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            assert isinstance(deliveries, Consumer)
            lane = deliveries._lane
            assert lane is not None
            # Cancelled without an answer: neither the channel nor the library knows.
            cancel = spec.Basic.Cancel(consumer_tag=deliveries._consumer_tag, nowait=True)
            await lane.write_queue.put(ChannelFrame.marshall(lane.number, [cancel]))
            await rabbit.queues.publish(queue, message(7))
            assert (await take(deliveries, 1))[0].body == message(7).body
        assert rabbit.counters.resubscribed == 1


async def test_what_is_held_when_the_broker_drops_the_consumer_can_still_be_settled(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message(1))
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            (held,) = await take(deliveries, 1)
            assert isinstance(deliveries, Consumer) and deliveries._lane is not None
            await deliveries._lane.basic_cancel(deliveries._consumer_tag)
            await until(lambda: rabbit.counters.resubscribed == 1)
            await rabbit.queues.ack(held)
        assert rabbit.counters.stale_settlements == 0
        assert await rabbit.queues.depth(queue) == 0


def delete_queue(vhost: servers.RabbitMQ, queue: str) -> None:
    vhost.api("DELETE", f"/api/queues/{quote(vhost.vhost, safe='')}/{quote(queue, safe='')}")


async def test_a_rung_or_dead_queue_that_somebody_deleted_is_declared_again(vhost: servers.RabbitMQ) -> None:
    queue, request_id = a_queue(), uuid.uuid4().hex
    async with RabbitMQ.connect(vhost.url, timing=QUICK, layout=Topology(rungs=RUNGS)) as rabbit:
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, Message(b"{}", request_id))
        for name in (DEAD_QUEUE, "headrace.retry.200", "headrace.retry.400"):
            await asyncio.to_thread(delete_queue, vhost, name)
        async with rabbit.queues.consume(queue, prefetch=1) as deliveries:
            await rabbit.queues.retry((await take(deliveries, 1))[0], 0.2)
            await rabbit.queues.bury((await take(deliveries, 1))[0], "enough")
        async with rabbit.queues.consume(DEAD_QUEUE, prefetch=1) as dead:
            assert (await find(dead, request_id)).headers["x-headrace-reason"] == "enough"


# -------------------------------------------------------------------------------------------- drift


async def test_other_arguments_are_told_once_and_harm_nothing_else(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with (
        RabbitMQ.connect(vhost.url, layout=Topology(max_length=10)) as first,
        RabbitMQ.connect(vhost.url, layout=Topology(max_length=20), timing=QUICK) as second,
    ):
        await first.queues.declare([queue])
        with pytest.raises(TopologyDrift, match=r"'control' exists with x-max-length = '10', ours is '20'"):
            await second.queues.declare([queue])
        await second.queues.publish(queue, message())
        assert await second.queues.depth(queue) == 1
        assert second.counters.connections_lost == 0


async def test_a_consumer_whose_queue_came_back_with_other_arguments_ends_with_the_drift(
    vhost: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        async with rabbit.queues.consume(queue, prefetch=1) as deliveries:
            proxy.mood = Mood.BROKEN
            proxy.cut()
            async with aiormq.connect(vhost.url) as connection:
                channel = await connection.channel()
                await channel.queue_delete(queue)
                await channel.queue_declare(queue, durable=True)
            proxy.mood = Mood.FAIR
            for _ in range(2):  # and says so to everyone who asks
                with pytest.raises(TopologyDrift, match=queue):
                    await take(deliveries, 1)


# -------------------------------------------------------------------------------------------- unreachable


@pytest.mark.parametrize("mood", [Mood.DEAF, Mood.BROKEN, Mood.FORGETFUL])
async def test_everything_raises_in_time_while_the_server_is_unreachable_and_works_after(
    vhost: servers.RabbitMQ, mood: Mood
) -> None:
    queue, client = a_queue(), a_client()
    async with behind_a_proxy(vhost, IMPATIENT) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        proxy.mood = mood
        if mood is Mood.BROKEN:
            proxy.cut()
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "publish": lambda: rabbit.queues.publish(queue, message(1)),
            "depth": lambda: rabbit.queues.depth(queue),
            "declare": lambda: rabbit.queues.declare([queue]),
            "topics": lambda: rabbit.topics.publish([event(f"{client}.final")]),
            "consume": lambda: consume_all(rabbit, queue, 1, []),
        }
        for ask in asked.values():
            async with asyncio.timeout(BOUND):
                with pytest.raises(BrokerUnavailable):
                    await ask()
        proxy.mood = Mood.FAIR
        proxy.cut()
        await insist(rabbit, queue, message(2))
        async with rabbit.queues.consume(queue, prefetch=10) as deliveries:
            await heard_of(deliveries, message(2).body)


async def heard_of(deliveries: AsyncIterator[Delivery], body: bytes) -> None:
    async with asyncio.timeout(10):
        async for delivery in deliveries:
            if delivery.body == body:
                return


async def test_a_virtual_host_that_does_not_exist_is_named(vhost: servers.RabbitMQ) -> None:
    elsewhere = str(URL(vhost.url).with_path("/nowhere"))
    with pytest.raises(BrokerUnavailable, match="the virtual host 'nowhere' does not exist"):
        async with RabbitMQ.connect(elsewhere, timing=IMPATIENT):
            pass


async def test_a_host_that_refuses_is_told_in_time(unused_tcp_port: int) -> None:
    with pytest.raises(BrokerUnavailable, match=rf"cannot be reached within 0\.5 s: 127\.0\.0\.1:{unused_tcp_port}"):
        async with asyncio.timeout(BOUND), RabbitMQ.connect(f"amqp://127.0.0.1:{unused_tcp_port}/", timing=IMPATIENT):
            pass


async def test_a_missing_permission_is_told_at_once(vhost: servers.RabbitMQ) -> None:
    nothing = {"configure": "^$", "write": "^$", "read": "^$"}
    await asyncio.to_thread(vhost.api, "PUT", f"/api/permissions/{quote(vhost.vhost, safe='')}/{vhost.user}", nothing)
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        with pytest.raises(BrokerError, match="ACCESS_REFUSED"):
            await rabbit.queues.declare([a_queue()])


async def test_a_wrong_password_is_told_as_such(vhost: servers.RabbitMQ) -> None:
    with pytest.raises(BrokerUnavailable, match="ACCESS_REFUSED"):
        async with RabbitMQ.connect(replace(vhost, password="wrong").url, timing=IMPATIENT):
            pass


async def test_the_next_host_is_tried(vhost: servers.RabbitMQ, unused_tcp_port: int) -> None:
    urls = [f"amqp://127.0.0.1:{unused_tcp_port}/", vhost.url]
    async with RabbitMQ.connect(urls, timing=QUICK) as rabbit:
        assert rabbit.health().up


async def test_no_more_than_the_window_is_held_for_a_server_that_takes_nothing(
    vhost: servers.RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "WINDOW", 20_000)
    queue = a_queue()
    async with behind_a_proxy(vhost, IMPATIENT) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message(0))
        lane = rabbit.queues._publisher._lane
        assert lane is not None
        proxy.mood = Mood.DEAF
        many = [rabbit.queues.publish(queue, Message(b"x" * 2_000)) for _ in range(100)]
        outcomes = await asyncio.gather(*many, return_exceptions=True)
        assert all(isinstance(outcome, BrokerUnavailable) for outcome in outcomes)
        assert 20_000 < lane.in_flight < 20_000 + 3_000


async def test_a_call_on_a_dead_line_is_answered_on_the_next_one(vhost: servers.RabbitMQ) -> None:
    """Half open: the peer is gone without a word, only the missing heartbeats tell."""
    queue = a_queue()
    async with behind_a_proxy(vhost, replace(QUICK, call=25.0, heartbeat=1, watch=60.0)) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message(1))
        async with rabbit.queues.consume(queue, prefetch=1) as deliveries:
            await take(deliveries, 1)
            proxy.mood = Mood.DEAF
            async with asyncio.TaskGroup() as group:
                depth = group.create_task(rabbit.queues.depth(queue))
                published = group.create_task(rabbit.queues.publish(queue, message(2)))
                await until(lambda: rabbit.counters.connections_lost == 2, seconds=15)
                assert rabbit.health().consuming is State.DOWN
                proxy.mood = Mood.FAIR
            assert depth.result() in range(3)
            assert published.result() is None
            (again,) = await take(deliveries, 1)
            assert again.redelivered


async def test_closing_over_a_dead_line_is_bounded(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with behind_a_proxy(vhost) as (rabbit, proxy):
        await rabbit.queues.declare([queue])
        async with rabbit.queues.consume(queue, prefetch=1):
            proxy.mood = Mood.DEAF
        async with asyncio.timeout(BOUND):
            await rabbit.close()
        assert rabbit.health().publishing is State.CLOSED
        with pytest.raises(BrokerUnavailable, match="closed"):
            await rabbit.queues.publish(queue, message())


async def test_closing_ends_the_iterators_that_are_still_open(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        async with rabbit.queues.consume(queue, prefetch=1) as deliveries:
            waiting = asyncio.ensure_future(anext(deliveries, None))
            await asyncio.sleep(0)
            await rabbit.close()
            async with asyncio.timeout(5):
                assert await waiting is None


async def test_channels_are_given_back(vhost: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        for _ in range(20):
            async with rabbit.queues.consume(queue, prefetch=5), rabbit.topics.subscribe("a.#"):
                await rabbit.queues.depth(queue)
        connection = await rabbit._consuming.connection()
        await until(lambda: not connection.channels)


async def test_a_cancelled_consumer_leaves_nothing_on_the_broker(vhost: servers.RabbitMQ) -> None:
    queue, entered = a_queue(), asyncio.Event()
    async with RabbitMQ.connect(vhost.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])

        async def worker() -> None:
            async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
                entered.set()
                async for _ in deliveries:
                    pass

        working = asyncio.create_task(worker())
        await entered.wait()
        working.cancel()
        await asyncio.wait((working,))
        await rabbit.queues.publish(queue, message())
        assert await rabbit.queues.depth(queue) == 1


# -------------------------------------------------------------------------------------------- the broker's health


async def test_a_broker_short_of_memory_is_told_as_blocked_and_still_takes_acks(
    private_rabbitmq: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(private_rabbitmq.url, timing=IMPATIENT) as rabbit:
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message(1))
        await asyncio.to_thread(private_rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1")
        try:
            async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
                (held,) = await take(deliveries, 1)
                with pytest.raises(BrokerUnavailable):
                    await rabbit.queues.publish(queue, message(2))
                await until(lambda: rabbit.health().publishing is State.BLOCKED)
                assert not rabbit.health().up
                with pytest.raises(BrokerUnavailable, match="the connection is blocked"):
                    await rabbit.queues.publish(queue, message(3))
                await rabbit.queues.ack(held)
            assert rabbit.counters.stale_settlements == 0
        finally:
            await asyncio.to_thread(private_rabbitmq.ctl, "set_vm_memory_high_watermark", "0.8")
        await until(lambda: rabbit.health().up)
        await insist(rabbit, queue, message(4))


async def test_work_goes_on_after_the_broker_was_stopped_and_started_again(private_rabbitmq: servers.RabbitMQ) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(private_rabbitmq.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        for n in range(20):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            held = await take(deliveries, 5)
            await asyncio.to_thread(private_rabbitmq.stop)
            await until(lambda: rabbit.health().consuming is State.DOWN)
            assert not rabbit.health().up
            with pytest.raises(BrokerUnavailable):
                await rabbit.queues.publish(queue, message(99))
            await asyncio.to_thread(private_rabbitmq.start)
            seen: set[bytes] = set()
            async with asyncio.timeout(40):
                while len(seen) < 20:
                    delivery = await anext(deliveries)
                    seen.add(delivery.body)
                    await rabbit.queues.ack(delivery)
            for late in held:
                await rabbit.queues.ack(late)
            assert rabbit.counters.stale_settlements == 5
        assert await rabbit.queues.depth(queue) == 0


async def test_a_broker_that_was_killed_has_its_consumers_again_and_all_that_it_confirmed(
    private_rabbitmq: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(private_rabbitmq.url, timing=QUICK) as rabbit:
        await rabbit.queues.declare([queue])
        for n in range(10):
            await rabbit.queues.publish(queue, message(n))
        async with rabbit.queues.consume(queue, prefetch=5) as deliveries:
            await take(deliveries, 5)
            # RabbitMQ 3.10 has it on disk after three minutes who leads a queue; killed before that, nobody does.
            await asyncio.to_thread(private_rabbitmq.ctl, "eval", "[dets:sync(Table) || Table <- dets:all()].")
            await asyncio.to_thread(private_rabbitmq.kill)
            await asyncio.to_thread(private_rabbitmq.start)
            await insist(rabbit, queue, message(10))
            seen: set[bytes] = set()
            async with asyncio.timeout(40):
                while len(seen) < 11:
                    delivery = await anext(deliveries)
                    seen.add(delivery.body)
                    await rabbit.queues.ack(delivery)
        assert await rabbit.queues.depth(queue) == 0
