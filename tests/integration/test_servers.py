"""The test servers themselves: what the other tests rely on."""

import os
import signal
import socket
import subprocess
import sys

import aio_pika
import pytest
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from tests.servers import RabbitMQ, Redis
from tests.servers.local import die_with_parent

pytestmark = pytest.mark.servers


async def put(url: str, queue: str, body: bytes) -> None:
    connection = await aio_pika.connect(url)
    async with connection, connection.channel(publisher_confirms=True) as channel:
        declared = await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, routing_key=declared.name, timeout=10)


async def take(url: str, queue: str) -> bytes:
    connection = await aio_pika.connect(url)
    async with connection, connection.channel() as channel:
        declared = await channel.declare_queue(queue, durable=True, passive=True)
        message = await declared.get(timeout=10)
        await message.ack()
        return message.body


async def test_a_quorum_queue_in_a_fresh_vhost_keeps_a_confirmed_message(vhost: RabbitMQ) -> None:
    await put(vhost.url, "jobs", b"one")
    assert await take(vhost.url, "jobs") == b"one"


def test_two_vhosts_of_one_server_do_not_see_each_other(rabbitmq: RabbitMQ) -> None:
    with rabbitmq.fresh_vhost() as first, rabbitmq.fresh_vhost() as second:
        assert first.vhost != second.vhost
        assert first.url != second.url
        assert first.api("GET", f"/api/queues/{first.vhost}") == []


def test_a_vhost_is_gone_after_its_test(rabbitmq: RabbitMQ) -> None:
    with rabbitmq.fresh_vhost() as narrowed:
        pass
    names = [each["name"] for each in rabbitmq.api("GET", "/api/vhosts")]
    assert narrowed.vhost not in names


async def test_two_databases_of_one_server_do_not_see_each_other(redis_server: Redis) -> None:
    with redis_server.fresh_database() as first, redis_server.fresh_database() as second:
        async with redis.asyncio.from_url(first.url) as one, redis.asyncio.from_url(second.url) as other:
            await one.set("key", "value")
            assert await other.get("key") is None


async def test_a_stopped_rabbitmq_comes_back_on_its_port_with_its_messages(private_rabbitmq: RabbitMQ) -> None:
    await put(private_rabbitmq.url, "kept", b"still here")
    for end in (private_rabbitmq.stop, private_rabbitmq.kill):
        end()
        with pytest.raises(aio_pika.exceptions.AMQPConnectionError):
            await aio_pika.connect(private_rabbitmq.url, timeout=2)
        private_rabbitmq.start()
    assert await take(private_rabbitmq.url, "kept") == b"still here"


def test_rabbitmqctl_speaks_to_the_private_node(private_rabbitmq: RabbitMQ) -> None:
    with private_rabbitmq.fresh_vhost() as narrowed:
        assert narrowed.vhost in private_rabbitmq.ctl("list_vhosts", "--silent").split()


def test_the_process_id_is_the_servers_own(private_redis: Redis) -> None:
    os.kill(private_redis.pid, signal.SIGSTOP)
    try:
        impatient = redis.Redis.from_url(private_redis.url, socket_timeout=0.2, retry=Retry(NoBackoff(), 0))
        with impatient as client, pytest.raises(RedisTimeoutError):
            client.ping()
    finally:
        os.kill(private_redis.pid, signal.SIGCONT)
    with redis.Redis.from_url(private_redis.url, socket_timeout=5) as client:
        assert client.ping()


async def test_a_killed_redis_comes_back_on_its_port_with_what_it_acknowledged(private_redis: Redis) -> None:
    async with redis.asyncio.from_url(private_redis.url) as client:
        await client.set("key", "value")
    private_redis.kill()
    async with redis.asyncio.from_url(private_redis.url) as client:
        with pytest.raises(RedisConnectionError):
            await client.ping()
    private_redis.start()
    async with redis.asyncio.from_url(private_redis.url, decode_responses=True) as client:
        assert await client.get("key") == "value"


def test_redis_never_evicts(redis_server: Redis) -> None:
    with redis.Redis(host=redis_server.host, port=redis_server.port, decode_responses=True) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


@pytest.mark.skipif(not die_with_parent(), reason="needs setpriv of util-linux")
def test_no_server_outlives_a_test_run_that_was_killed() -> None:
    script = """
import sys
from tests.servers import open_redis
with open_redis() as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        port = int(killed.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            killed.kill()
            assert connection.recv(1) == b""  # the server's end is closed by its own end
