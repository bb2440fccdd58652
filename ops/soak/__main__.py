"""A soak: many requests while workers die, stand still and leave at random. Nothing is lost, doubled or wrong.

    python -m ops.soak [--requests 100000] [--minutes 10] [--every 3] [--seed N]

Requests go through the SDK's map and from a plain AMQP producer to workers of the command line, null engine, on a
RabbitMQ and a Redis of their own. Prints one table; exits 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
import uvloop

from headrace.broker.ports import BrokerError
from headrace.broker.rabbitmq.topology import RUNGS, rung_name
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.settings import Settings
from ops.soak.gauges import Gauges, Sample, rss_of, store_of
from ops.soak.load import Load
from ops.soak.strikes import Crew
from tests.integration.fleet import fleet
from tests.servers import RabbitMQ, Redis, open_rabbitmq, open_redis

HEARTBEAT_S = 2.0
REPLAY_TTL_S = 20.0
SAMPLE_S = 2.0
AFTER_S = 60.0
"""Within so many seconds after the last outcome nothing waits any more, and the keys are gone."""
MODEL = "demo"
QUEUES = (
    *(jobs.queue_of(role, MODEL, lane) for role in ("render", "generate") for lane in jobs.LANES),
    *jobs.backlogs_of("generate", MODEL),
    jobs.queue_of("derender", MODEL),
    jobs.replays_of(MODEL),
    jobs.CONTROL_QUEUE,
    jobs.INTAKE_QUEUE,
    jobs.DEAD_QUEUE,
    *(rung_name(seconds) for seconds in RUNGS),
)


Depth = Callable[[str], Awaitable[int]]


@dataclass(slots=True)
class Soak:
    """One run."""

    load: Load
    crew: Crew
    store: redis.Redis
    gauges: Gauges = field(default_factory=Gauges)
    broken: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """The load under strikes; then what must be left of it: nothing."""
        self.crew.start()
        await self.crew.ready()
        base = store_of(self.store)[1]
        async with servers(self.load.settings, name="soak") as broker:
            watching = asyncio.create_task(self._watch(broker.queues.depth))
            striking = asyncio.create_task(self.crew.strike_on())
            try:
                await self.load.run()
            finally:
                for task in (striking, watching):
                    task.cancel()
                for ended in await asyncio.gather(striking, watching, return_exceptions=True):
                    if not isinstance(ended, asyncio.CancelledError):
                        self.broken.append(f"the soak itself: {ended!r}")
            for lost in self.load.book.lost()[:20]:
                self.broken.append(f"lost: {lost}")
            await asyncio.sleep(2 * HEARTBEAT_S)  # those that go on now send what they held, once more
            await self._empty(broker.queues.depth)
            await self.crew.leave()
            await self._empty(broker.queues.depth)  # what a worker still held would wait now
            await self._keys_go(base)
        self.broken += [*self.load.book.broken, *self.crew.broken, *self.gauges.grown()]

    async def _watch(self, depth: Depth) -> None:
        while True:
            memory, keys = await asyncio.to_thread(store_of, self.store)
            counts = self.load.book.counts
            rss = {post.role: rss_of(post.pid) for post in self.crew.elders()}
            second = time.monotonic() - self.load.began if self.load.began else 0.0
            waiting = sum((await _depths(depth)).values())
            sample = Sample(second, counts.outcomes, self.load.in_flight, waiting, memory, keys, rss)
            self.gauges.samples.append(sample)
            await asyncio.sleep(SAMPLE_S)

    async def _empty(self, depth: Depth) -> None:
        until = time.monotonic() + AFTER_S
        while waiting := {name: count for name, count in (await _depths(depth)).items() if count}:
            if time.monotonic() > until:
                self.broken.append(f"messages wait: {waiting}")
                return
            await asyncio.sleep(0.5)

    async def _keys_go(self, base: int) -> None:
        until = time.monotonic() + AFTER_S
        while (keys := store_of(self.store)[1]) > base:
            if time.monotonic() > until:
                left = [(key.decode(), self.store.ttl(key)) for key in self.store.scan_iter()][:20]
                self.broken.append(f"{keys} keys are left, {base} were there before: {left}")
                return
            await asyncio.sleep(0.5)

    def report(self, seconds: float) -> str:
        """The table."""
        counts, strikes = self.load.book.counts, self.crew.strikes
        lost = len(self.load.book.lost())
        lines = [
            f"\n## {counts.requests} requests in {seconds:.0f} s, {strikes.total()} strikes ({_listed(strikes)})\n",
            self.gauges.table(),
            "\n| requests | outcomes | lost | doubled | wrong | told again | chunks | chunks again |",
            "|---|---|---|---|---|---|---|---|",
            f"| {counts.requests} | {counts.outcomes} | {lost} | {counts.doubled} | {counts.wrong} | "
            f"{counts.told_again} | {counts.chunks} | {counts.chunks_again} |",
            "",
        ]
        return "\n".join(lines + [f"BROKEN {what}" for what in self.broken])


def _listed(strikes: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(strikes.items()))


async def _depths(depth: Depth) -> dict[str, int]:
    depths = {}
    for name in QUEUES:
        try:
            depths[name] = await depth(name)
        except BrokerError:
            depths[name] = 0  # not there: nobody has sent anything that way
    return depths


@contextmanager
def opened(rabbitmq: RabbitMQ, store: Redis, options: argparse.Namespace, folder: Path) -> Iterator[Soak]:
    """A soak on these servers; every worker is gone at the end."""
    own = {"HEARTBEAT": f"{HEARTBEAT_S:g}", "GRACE": "2", "MAX_RESCUES": "20"}
    settings = Settings(amqp_url=rabbitmq.url, redis_url=store.url, model=MODEL, replay_ttl=REPLAY_TTL_S)
    with fleet(rabbitmq, store, folder, **own) as started, redis.Redis.from_url(store.url) as connection:
        connection.config_set(
            "hz", 500
        )  # it looks for expired keys in a few databases at a time, and ours has thousands
        load = Load(settings, options.requests, options.minutes * 60)
        yield Soak(load, Crew(started, HEARTBEAT_S, options.every, random.Random(options.seed)), connection)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="over which the requests are spread")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two strikes")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of what is struck when, and how")
    options = parser.parse_args(arguments)
    logging.getLogger("headrace").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # by default the workers would outlive us
    print(f"seed {options.seed}", flush=True)
    with (
        open_rabbitmq() as rabbitmq,
        open_redis() as store,
        tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder,
        opened(rabbitmq, store, options, Path(folder)) as soak,
    ):
        began = time.monotonic()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(soak.run())
        print(soak.report(time.monotonic() - began), flush=True)
    return 1 if soak.broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
