"""What the whole line costs and how long it takes: real servers, the null engine, one process for each worker.

    python -m ops.bench.line [derender] [request] [latency] [embedded] [--rounds 5]

The servers are those of HEADRACE_AMQP_URL (a virtual host of its own: queues are made) and HEADRACE_REDIS_URL, else
private ones that the bench starts. Costs are CPU time of a process, the median of the rounds with least and most; the
variants of a section take turns within each round. Only latency is wall time: run it on a quiet machine.

derender: runs whose logs are complete, told to one listener by one worker in three ways (ops.bench.telling), beside a
loop that does the same and awaits a confirmed aio-pika publish for each chunk. request: 64 requests in flight, from
submit to final at the client, beside one such publish. latency: one request at a time, from submit to the first chunk
(tokens) or the first text (chat). embedded: the whole line in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aio_pika
import structlog
import uvloop

from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE
from headrace.client import Headrace
from headrace.client.connect import servers
from headrace.protocol.jobs import Delivery
from headrace.settings import PREFIX, Settings
from headrace.workers.models import ModelSpec
from ops.bench.each_awaited import CLIENT
from ops.bench.figures import Cost, Figures, add, show
from ops.bench.telling import measured
from tests.integration.fleet import Fleet
from tests.servers import open_rabbitmq, open_redis

TOKENS, IN_FLIGHT = 16, 64
WAIT_S = 120.0


# ----------------------------------------------------------------------------------------------- the sections


class Line:
    """The servers, the workers' processes and a client. ``pids`` are those of the servers, where they are ours."""

    def __init__(self, fleet: Fleet, settings: Settings, rounds: int, pids: dict[str, int]) -> None:
        self.fleet = fleet
        self.settings = settings
        self.rounds = rounds
        self.pids = pids

    def workers(self, model: str, *roles: str) -> dict[str, int]:
        """A process for each role, ready; their ids by role."""
        options = ("--model", "demo", "--name", model, "--engine", "null", "--max-rows", str(IN_FLIGHT))
        started = self.fleet.workers(*((role,) for role in roles), model=options)
        return {role: process.pid for role, process in zip(roles, started, strict=True)}

    async def derender(self) -> None:
        model = "bench-derender"
        pids = {"worker": self.workers(model, "derender")["derender"]} | self.pids
        async with servers(self.settings, name="bench") as broker:
            await measured(broker, model, self.fleet.env, pids, self.rounds)

    async def request(self) -> None:
        count, model = 1_000, "bench-request"
        pids = self.workers(model, "render", "generate", "derender") | {"client": os.getpid()}
        figures: Figures = {}
        async with self.client(model) as headrace, await aio_pika.connect(self.settings.amqp_urls[0]) as connection:
            exchange = await (await connection.channel(publisher_confirms=True)).get_exchange(TOPIC_EXCHANGE)
            message = aio_pika.Message(b"x" * 200, correlation_id="request")
            for number in range(self.rounds + 1):
                with Cost(client=os.getpid()) as cost:
                    for _ in range(count):
                        await exchange.publish(message, f"{CLIENT}.nobody", mandatory=False)
                if number:
                    add(figures, "aio-pika publish awaited", cost.us, count)
                for name, ask in asking(headrace).items():
                    with Cost(**pids) as cost:
                        await together(ask, count)
                    if number:
                        add(figures, name, cost.us, count)
        title = f"requests of {TOKENS} tokens, {IN_FLIGHT} in flight"
        show(title, "CPU us a request", figures, "aio-pika publish awaited: client")

    async def latency(self) -> None:
        count, model = 200, "bench-latency"
        self.workers(model, "render", "generate", "derender")
        figures: dict[str, list[float]] = {"token-in to first chunk": [], "chat to first text": []}
        async with self.client(model) as headrace:
            for number in range(self.rounds + 1):
                for _ in range(count):
                    took = await first_tokens(headrace), await first_text(headrace)
                    if number:
                        for into, seconds in zip(figures.values(), took, strict=True):
                            into.append(seconds * 1e3)
        print("\n## latency, one request at a time\n\n| | p50 | p90 | p99, ms |\n|---|---|---|---|")
        for name, all_of_them in figures.items():
            cuts = statistics.quantiles(all_of_them, n=100)
            print(f"| {name} | {cuts[49]:.2f} | {cuts[89]:.2f} | {cuts[98]:.2f} |")

    async def embedded(self) -> None:
        count, figures = 500, Figures()
        spec = ModelSpec.of("demo", engine="null", max_rows=IN_FLIGHT)
        own = Settings.load().model_copy(update={"amqp_url": None, "redis_url": None})
        async with Headrace.connect(own, spec=spec) as headrace:
            for number in range(self.rounds + 1):
                for name, ask in asking(headrace).items():
                    with Cost(process=os.getpid()) as cost:
                        await together(ask, count)
                    if number:
                        add(figures, name, cost.us, count)
        show(f"embedded, requests of {TOKENS} tokens, {IN_FLIGHT} in flight", "CPU us a request", figures)

    @asynccontextmanager
    async def client(self, model: str) -> AsyncIterator[Headrace]:
        """A client on the servers, asking for this model."""
        async with servers(self.settings) as broker:
            settings = self.settings.model_copy(update={"model": model})
            async with Headrace.connect(settings, broker=broker) as headrace:
                yield headrace


Ask = Callable[[], Awaitable[None]]


def asking(headrace: Headrace) -> dict[str, Ask]:
    """One whole request of each kind."""

    async def chat(delivery: Delivery) -> None:
        stream = await headrace.chat(
            messages=[{"role": "user", "content": "Write the notes."}], max_tokens=TOKENS, delivery=delivery
        )
        if delivery == "stream":
            seqs = [chunk.seq async for chunk in stream]
            assert seqs == list(range(TOKENS))
        await stream.outcome()

    async def tokens() -> None:
        stream = await headrace.generate(token_ids=[5, 6, 7], sampling_params={"max_tokens": TOKENS}, delivery="tokens")
        assert len([chunk async for chunk in stream]) == TOKENS
        await stream.outcome()

    return {"chat, final": lambda: chat("final"), "chat, stream": lambda: chat("stream"), "tokens": tokens}


async def together(ask: Ask, count: int) -> None:
    """So many requests, IN_FLIGHT of them at a time."""
    left = iter(range(count))

    async def one_by_one() -> None:
        for _ in left:
            await ask()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(one_by_one())


async def first_tokens(headrace: Headrace) -> float:
    began = time.perf_counter()
    stream = await headrace.generate(token_ids=[5, 6, 7], sampling_params={"max_tokens": TOKENS}, delivery="tokens")
    await anext(stream)
    took = time.perf_counter() - began
    await stream.outcome()
    return took


async def first_text(headrace: Headrace) -> float:
    began = time.perf_counter()
    stream = await headrace.chat(messages=[{"role": "user", "content": "Write the notes."}], max_tokens=TOKENS)
    async for chunk in stream:
        if chunk.text or chunk.reasoning:
            break
    took = time.perf_counter() - began
    await stream.outcome()
    return took


# ----------------------------------------------------------------------------------------------- the servers


@contextmanager
def urls() -> Iterator[tuple[dict[str, str], dict[str, int]]]:
    """The servers of the environment, else private ones; and the process ids of those that run here."""
    named = {name: os.environ[name] for name in (f"{PREFIX}AMQP_URL", f"{PREFIX}REDIS_URL") if name in os.environ}
    if len(named) == 2:
        yield named, {}
        return
    with open_rabbitmq() as rabbitmq, open_redis() as redis:
        pids = {"rabbitmq": rabbitmq.pid, "redis": redis.pid}
        yield {f"{PREFIX}AMQP_URL": rabbitmq.url, f"{PREFIX}REDIS_URL": redis.url}, pids


def main(sections: list[str], rounds: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        named, pids = stack.enter_context(urls())
        os.environ |= named | {f"{PREFIX}CLIENT": CLIENT, f"{PREFIX}LOG_LEVEL": "info"}
        for section in sections:
            fleet = Fleet(dict(os.environ), folder)
            stack.callback(fleet.close)
            line = Line(fleet, Settings.load(), rounds, pids)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(getattr(line, section)())
            fleet.close()


SECTIONS = ("derender", "request", "latency", "embedded")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"any of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    main(given.sections or list(SECTIONS), given.rounds)
