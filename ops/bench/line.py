"""What the whole line costs and how long it takes: real servers, the null engine, one process for each worker.

    python -m ops.bench.line [derender] [request] [latency] [embedded] [--rounds 5]

The servers are those of HEADRACE_AMQP_URL (a virtual host of its own: queues are made) and HEADRACE_REDIS_URL, else
private ones that the bench starts. Costs are CPU time of a process, the median of the rounds with least and most; the
variants of a section take turns within each round. Only latency is wall time: run it on a quiet machine.

derender: 256 runs whose logs are complete, told to one listener by one worker, beside a loop that does the same and
awaits a confirmed aio-pika publish for each chunk. request: 64 requests in flight, from submit to final at the client,
beside one such publish. latency: one request at a time, from submit to the first chunk (tokens) or the first text
(chat). embedded: the whole line in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aio_pika
import structlog
import uvloop

from headrace.broker.ports import Broker, Message
from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE
from headrace.client import Headrace
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, Delivery, DerenderJob, FinalEvent
from headrace.settings import PREFIX, Settings
from headrace.workers.models import ModelSpec
from ops.bench.each_awaited import CHAT, CLIENT, filled
from tests.integration.fleet import Fleet
from tests.servers import open_rabbitmq, open_redis

STREAMS, CHUNKS = 256, 200
EACH_AWAITED = 20
"""Chunks of each stream that the loop tells: it is so much slower."""
TOKENS, IN_FLIGHT = 16, 64
WAIT_S = 120.0

Figures = dict[str, list[float]]


class Cost:
    """CPU microseconds of processes within a block, by name. Threads that end within it are not counted."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self.us: dict[str, float] = {}

    def __enter__(self) -> Cost:
        self._before = {name: cpu_us(pid) for name, pid in self._pids.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self.us = {name: cpu_us(pid) - self._before[name] for name, pid in self._pids.items()}


def cpu_us(pid: int) -> float:
    """CPU time of a process so far, as the scheduler counts it (Linux)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


def add(figures: Figures, prefix: str, us: dict[str, float], count: int) -> None:
    for name, spent in us.items():
        figures.setdefault(f"{prefix}: {name}", []).append(spent / count)


def show(title: str, unit: str, figures: Figures, yardstick: str | None = None) -> None:
    """The table of a section; with a yardstick each figure also in terms of that one."""
    print(f"\n## {title}\n\n| | {unit}, median [least - most] | of the yardstick |\n|---|---|---|")
    base = statistics.median(figures[yardstick]) if yardstick else 0.0
    for name, all_of_them in figures.items():
        median = statistics.median(all_of_them)
        ratio = "" if not base or not median else f"1/{base / median:.1f}" if median < base else f"{median / base:.2f}"
        print(f"| {name} | {median:.2f} [{min(all_of_them):.2f} - {max(all_of_them):.2f}] | {ratio} |")


# ----------------------------------------------------------------------------------------------- the sections


class Line:
    """The servers, the workers' processes and a client."""

    def __init__(self, fleet: Fleet, settings: Settings, rounds: int) -> None:
        self.fleet = fleet
        self.settings = settings
        self.rounds = rounds

    def workers(self, model: str, *roles: str) -> dict[str, int]:
        """A process for each role, ready; their ids by role."""
        options = ("--model", "demo", "--name", model, "--engine", "null", "--max-rows", str(IN_FLIGHT))
        started = self.fleet.workers(*((role,) for role in roles), model=options)
        return {role: process.pid for role, process in zip(roles, started, strict=True)}

    async def derender(self) -> None:
        model = "bench-derender"
        worker = self.workers(model, "derender")["derender"]
        figures: Figures = {}
        async with servers(self.settings, name="bench") as broker:
            for number in range(self.rounds + 1):  # the first one only warms up
                loop, told = f"loop-{number}", f"told-{number}"
                await filled(broker, loop, STREAMS, EACH_AWAITED, model)
                spent = await self._each_awaited(broker, loop)
                await filled(broker, told, STREAMS, CHUNKS, model)
                with Cost(worker=worker, listener=os.getpid()) as cost:
                    await self._told(broker, told, model)
                if number:
                    add(figures, "a chunk awaited", {"loop": spent}, STREAMS * EACH_AWAITED)
                    add(figures, "a chunk told", cost.us, STREAMS * CHUNKS)
        show(f"derender, {STREAMS} streams of {CHUNKS} chunks", "CPU us a chunk", figures, "a chunk awaited: loop")

    async def _told(self, broker: Broker, prefix: str, model: str) -> None:
        """Has the worker tell the runs; returns when all of it has been heard, in order and once."""
        async with broker.topics.subscribe(f"{CLIENT}.*.{prefix}") as messages:
            queue = jobs.queue_of("derender", model)
            async with asyncio.TaskGroup() as group:
                for n in range(STREAMS):
                    job = DerenderJob(
                        client=CLIENT,
                        request_id=f"{prefix}-{n}",
                        model=model,
                        topic=prefix,
                        endpoint=CHAT,
                        submitted_at=1.0,
                        deadline=time.time() + 600,
                    )
                    group.create_task(broker.queues.publish(queue, Message(jobs.encode(job), job.request_id)))
            seqs = dict.fromkeys((f"{prefix}-{n}" for n in range(STREAMS)), 0)
            finals = 0
            async with asyncio.timeout(WAIT_S):
                while finals < STREAMS:
                    for event in jobs.decode_events((await anext(messages)).body):
                        match event:
                            case ChunkEvent(seq=seq, request_id=request_id):
                                assert seq == seqs[request_id], f"{request_id}: {seq} is not {seqs[request_id]}"
                                seqs[request_id] += 1
                            case FinalEvent(chunks=chunks, request_id=request_id):
                                assert chunks == CHUNKS, f"{request_id}: {chunks} chunks"
                                finals += 1
                            case other:
                                raise AssertionError(other)
            assert set(seqs.values()) == {CHUNKS}, "every chunk is told"

    async def _each_awaited(self, broker: Broker, prefix: str) -> float:
        """CPU microseconds of the loop that awaits each chunk; somebody listens here too."""
        async with broker.topics.subscribe(f"{CLIENT}.*.{prefix}") as messages:
            command = (sys.executable, "-m", "ops.bench.each_awaited", prefix, str(STREAMS))
            process = await asyncio.create_subprocess_exec(*command, env=self.fleet.env, stdout=asyncio.subprocess.PIPE)
            async with asyncio.timeout(WAIT_S):
                for _ in range(STREAMS * EACH_AWAITED):
                    await anext(messages)
                said, _ = await process.communicate()
        return float(said)

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
def urls() -> Iterator[dict[str, str]]:
    """The servers of the environment, else private ones."""
    named = {name: os.environ[name] for name in (f"{PREFIX}AMQP_URL", f"{PREFIX}REDIS_URL") if name in os.environ}
    if len(named) == 2:
        yield named
        return
    with open_rabbitmq() as rabbitmq, open_redis() as redis:
        yield {f"{PREFIX}AMQP_URL": rabbitmq.url, f"{PREFIX}REDIS_URL": redis.url}


def main(sections: list[str], rounds: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        os.environ |= stack.enter_context(urls()) | {f"{PREFIX}CLIENT": CLIENT, f"{PREFIX}LOG_LEVEL": "info"}
        for section in sections:
            fleet = Fleet(dict(os.environ), folder)
            stack.callback(fleet.close)
            line = Line(fleet, Settings.load(), rounds)
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
