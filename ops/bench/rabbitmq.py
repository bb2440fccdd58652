"""What a message costs this side: CPU per message, ours beside aio-pika's usual way of doing the same, interleaved.

    python -m ops.bench.rabbitmq amqp://guest:guest@127.0.0.1/bench      (a virtual host of its own: queues are made)

Each figure is the CPU time of this process, the median of the rounds with least and most.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aio_pika
import structlog
import uvloop
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from headrace.broker.ports import Message, TopicMessage
from headrace.broker.rabbitmq import RabbitMQ
from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE, Topology

MESSAGES = 1_000
JOB = b'{"type":"render","client":"bench","body":{"messages":[{"role":"user","content":"' + b"x" * 900 + b'"}]}}'
CHUNK = b'{"type":"chunk","seq":1234,"chunk":' + b"x" * 160 + b"}"
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
OURS, THEIRS = "render.bench-ours", "render.bench-aio-pika"

Case = Callable[[], Awaitable[None]]
"""Handles MESSAGES messages."""


class Bench:
    def __init__(self, rabbit: RabbitMQ, channel: AbstractChannel, queue: AbstractQueue) -> None:
        self.rabbit = rabbit
        self.channel = channel
        self.queue = queue
        self.spent = 0.0
        self.cases: dict[str, Case] = {
            "job published, confirmed, 1 in flight: headrace": lambda: self.publish(1),
            "job published, confirmed, 1 in flight: aio-pika": lambda: self.publish_other(1),
            "job published, confirmed, 100 in flight: headrace": lambda: self.publish(100),
            "job published, confirmed, 100 in flight: aio-pika": lambda: self.publish_other(100),
            "job consumed and acked, prefetch 256: headrace": self.consume,
            "job consumed and acked, prefetch 256: aio-pika": self.consume_other,
            "chunk told, 1 a call: headrace": lambda: self.tell(1),
            "chunk told, 1 a call: aio-pika, each awaited": self.tell_other,
            "chunk told, 32 a call: headrace": lambda: self.tell(32),
            "chunk heard: headrace": self.hear,
            "chunk heard: aio-pika, without acks": self.hear_other,
        }

    def measured(self) -> Measured:
        return Measured(self)

    async def publish(self, in_flight: int) -> None:
        await self.rabbit.queues.declare([OURS])

        async def one() -> None:
            await self.rabbit.queues.publish(OURS, Message(JOB, "request-1", HEADERS))

        with self.measured():
            await in_turns(one, in_flight)
        await self.purge(OURS)

    async def publish_other(self, in_flight: int) -> None:
        async def one() -> None:
            await self.channel.default_exchange.publish(job(), THEIRS, timeout=10)

        with self.measured():
            await in_turns(one, in_flight)
        await self.purge(THEIRS)

    async def consume(self) -> None:
        await in_turns(lambda: self.rabbit.queues.publish(OURS, Message(JOB, "request-1", HEADERS)), 100)
        async with self.rabbit.queues.consume(OURS, prefetch=256) as deliveries:
            with self.measured():
                for _ in range(MESSAGES):
                    await self.rabbit.queues.ack(await anext(deliveries))

    async def consume_other(self) -> None:
        await in_turns(lambda: self.channel.default_exchange.publish(job(), THEIRS), 100)
        async with self.queue.iterator() as messages:
            with self.measured():
                for _ in range(MESSAGES):
                    await (await anext(messages)).ack()

    async def tell(self, at_once: int) -> None:
        async with self.rabbit.topics.subscribe("bench.end") as heard:
            with self.measured():
                for _ in range(MESSAGES // at_once):
                    await self.rabbit.topics.publish([TopicMessage("bench.chunk", CHUNK, request_id="r")] * at_once)
                await self.rabbit.topics.publish([TopicMessage("bench.end", CHUNK, durable=True)])
            await anext(heard)

    async def tell_other(self) -> None:
        exchange = await self.channel.get_exchange(TOPIC_EXCHANGE)
        with self.measured():
            for _ in range(MESSAGES):
                message = aio_pika.Message(CHUNK, correlation_id="r", content_type="application/json")
                await exchange.publish(message, "bench.chunk", mandatory=False)

    async def hear(self) -> None:
        async with self.rabbit.topics.subscribe("bench.chunk") as heard:
            await self.rabbit.topics.publish([TopicMessage("bench.chunk", CHUNK, request_id="r")] * MESSAGES)
            with self.measured():
                for _ in range(MESSAGES):
                    await anext(heard)

    async def hear_other(self) -> None:
        queue = await self.channel.declare_queue(exclusive=True, auto_delete=True)
        await queue.bind(TOPIC_EXCHANGE, "bench.chunk")
        await self.rabbit.topics.publish([TopicMessage("bench.chunk", CHUNK, request_id="r")] * MESSAGES)
        async with queue.iterator(no_ack=True) as messages:
            with self.measured():
                for _ in range(MESSAGES):
                    message: AbstractIncomingMessage = await anext(messages)
                    assert message.body

    async def purge(self, name: str) -> None:
        await (await self.channel.get_queue(name, ensure=False)).purge()


class Measured:
    """Notes the CPU time of its block."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def __enter__(self) -> None:
        self.began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.bench.spent = time.process_time() - self.began


async def in_turns(one: Callable[[], Awaitable[object]], in_flight: int) -> None:
    """MESSAGES calls, ``in_flight`` of them at a time."""

    async def turn() -> None:
        for _ in range(MESSAGES // in_flight):
            await one()

    if in_flight == 1:
        return await turn()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(turn())


def job() -> aio_pika.Message:
    return aio_pika.Message(
        JOB,
        headers=dict(HEADERS),
        content_type="application/json",
        correlation_id="request-1",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        rabbit = await stack.enter_async_context(RabbitMQ.connect(url))
        await rabbit.queues.declare([OURS])
        connection = await stack.enter_async_context(await aio_pika.connect(url))
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        await channel.set_qos(prefetch_count=256)
        arguments = Topology().work(THEIRS).arguments
        queue = await channel.declare_queue(THEIRS, durable=True, arguments={**arguments})
        yield Bench(rabbit, channel, queue)


async def main(url: str, rounds: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    async with opened(url) as bench:
        costs: dict[str, list[float]] = {name: [] for name in bench.cases}
        for _ in range(rounds):
            for name, case in bench.cases.items():
                await case()
                costs[name].append(bench.spent / MESSAGES * 1e6)
        for name, figures in costs.items():
            print(f"{name:55} {statistics.median(figures):7.1f} us  [{min(figures):.1f} - {max(figures):.1f}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if given.loop == "uvloop" else None) as runner:
        runner.run(main(given.url, given.rounds))
