"""What the token log costs: client and server CPU per entry, ours beside redis-py doing the same, interleaved.

    python -m ops.bench.redis_log redis://127.0.0.1:6379/15        (an empty database: it is filled and emptied)

Each figure is the CPU time of this process, the median of the rounds with least and most.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import redis.asyncio as redis_py
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headrace.broker.entries import SEED, Entry, NewEntry, Position
from headrace.broker.ports import Batch, ClaimRequest
from headrace.broker.redis import RedisStores, connect_redis
from headrace.broker.redis.keys import Keys
from headrace.broker.redis.scripts import APPEND, command
from headrace.protocol.jobs import run_of

RUNS = 256
PAYLOAD = b'{"choices":[{"index":0,"token_ids":[1234],"logprobs":null,"finish_reason":null}],"id":"' + b"x" * 80 + b'"}'

Case = Callable[[int], Awaitable[int]]
"""Does one round under a number that no other round has; returns how many operations it did."""


class Bench:
    """Runs of which the log is ours alone, and how each library appends to and reads them."""

    def __init__(self, stores: RedisStores, other: Any) -> None:
        self.stores = stores
        self.other = other
        self.keys = Keys()
        self.cases: dict[str, Case] = {
            "append 1 entry to each of 256 runs, headrace (per entry)": self.append,
            "append 1 entry to each of 256 runs, redis-py pipeline (per entry)": self.append_other,
            "read 256 x 16 ready, headrace (per entry)": self.read,
            "read 256 x 16 ready, headrace's socket, undecoded (per entry)": self.read_raw,
            "read 256 x 16 ready, redis-py, into the same entries (per entry)": self.read_other,
            "read 1 ready of 256, headrace (per call)": self.read_sparse,
            "read 1 ready of 256, redis-py (per call)": self.read_sparse_other,
            "claim, one at a time (per call)": self.claim_each,
            "claim, 256 at once (per call)": self.claim_all,
            "exists, redis-py, one at a time (per call)": self.exists_other,
            "wake a waiting read of 256 runs (per wake)": self.wake,
        }

    async def start(self, name: str, count: int = RUNS) -> list[str]:
        runs = [run_of("bench", f"{name}-{n}") for n in range(count)]
        await asyncio.gather(*(self.stores.runs.claim(request(run)) for run in runs))
        return runs

    async def filled(self, name: str, entries: int) -> dict[str, Position]:
        runs = await self.start(name)
        batch = [NewEntry("chunk", PAYLOAD, SEED)] * entries
        await self.stores.log.append([Batch(run, Position(1, 0), 1, batch) for run in runs])
        return dict.fromkeys(runs, Position(1, 0))

    async def append(self, number: int) -> int:
        runs = await self.start(f"a{number}")
        with self.measured():
            for k in range(1, 9):
                entry = [NewEntry("chunk", PAYLOAD, SEED)]
                await self.stores.log.append([Batch(run, Position(1, k - 1), k, entry) for run in runs])
        return 8 * RUNS

    async def append_other(self, number: int) -> int:
        runs = await self.start(f"b{number}")
        with self.measured():
            for k in range(1, 9):
                pipe = self.other.pipeline(transaction=False)
                for run in runs:
                    own = self.keys.of(run)
                    pipe.evalsha(APPEND.sha, 2, own.run, own.log, 1, f"1-{k - 1}", k, 0, PAYLOAD, SEED)
                assert set(await pipe.execute()) == {b"stored"}
        return 8 * RUNS

    async def read(self, number: int) -> int:
        cursors = await self.filled(f"c{number}", 16)
        with self.measured():
            found = await self.stores.log.read(cursors, wait=1, count=16)
        return sum(map(len, found.values()))

    async def read_raw(self, number: int) -> int:
        cursors = await self.filled(f"d{number}", 16)
        with self.measured():
            keys = [self.keys.of(run).log for run in cursors]
            ids = [str(cursor) for cursor in cursors.values()]
            (found,) = await self.stores.line.ask([command("XREAD", "COUNT", 16, "STREAMS", *keys, *ids)])
        assert isinstance(found, list) and len(found) == RUNS
        return 16 * RUNS

    async def read_other(self, number: int) -> int:
        cursors = await self.filled(f"e{number}", 16)
        with self.measured():
            asked = {self.keys.of(run).log: str(cursor) for run, cursor in cursors.items()}
            found: dict[bytes, list[Entry]] = {}
            for key, items in await self.other.xread(asked, count=16):
                found[key] = entries = []
                for name, fields in items:
                    epoch, _, k = name.partition(b"-")
                    position = Position(int(epoch), int(k))
                    entries.append(Entry(position, "chunk", fields[b"chunk"], int(fields[b"before"])))
        return sum(map(len, found.values()))

    async def read_sparse(self, number: int) -> int:
        cursors, one = await self.sparse(f"f{number}")
        with self.measured():
            for _ in range(10):
                assert len(await self.stores.log.read({**cursors, one: Position(1, 0)}, wait=0)) == 1
        return 10

    async def read_sparse_other(self, number: int) -> int:
        cursors, one = await self.sparse(f"g{number}")
        with self.measured():
            for _ in range(10):
                asked = {self.keys.of(run).log: str(cursor) for run, cursor in cursors.items()}
                assert len(await self.other.xread({**asked, self.keys.of(one).log: "1-0"})) == 1
        return 10

    async def sparse(self, name: str) -> tuple[dict[str, Position], str]:
        cursors = dict.fromkeys(await self.filled(name, 1), Position(1, 1))
        return cursors, next(iter(cursors))

    async def claim_each(self, number: int) -> int:
        with self.measured():
            for n in range(64):
                await self.stores.runs.claim(request(run_of("bench", f"h{number}-{n}")))
        return 64

    async def claim_all(self, number: int) -> int:
        with self.measured():
            await self.start(f"i{number}")
        return RUNS

    async def exists_other(self, number: int) -> int:
        with self.measured():
            for n in range(64):
                await self.other.exists(f"j{number}-{n}")
        return 64

    async def wake(self, number: int) -> int:
        cursors, _ = await self.sparse(f"k{number}")
        loop = asyncio.get_running_loop()
        with self.measured():
            for _ in range(10):
                loop.call_later(0.001, self.stores.log.wake)
                assert await self.stores.log.read(cursors, wait=5) == {}
        return 10

    def measured(self) -> Meter:
        self.meter = Meter()
        return self.meter


class Meter:
    """CPU seconds of this process between its two ends."""

    def __enter__(self) -> None:
        self.began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.used = time.process_time() - self.began


def request(run: str) -> ClaimRequest:
    now = time.time()
    return ClaimRequest(run, "generate", "bench", "d", deadline=now + 600, replay_ttl=60, heartbeat=60)


async def main(url: str, rounds: int) -> None:
    async with AsyncExitStack() as stack:
        stores = await stack.enter_async_context(connect_redis(url))
        other = await stack.enter_async_context(redis_py.from_url(url, retry=Retry(NoBackoff(), 0)))
        if await other.dbsize():
            raise SystemExit(f"{url} is not empty")
        bench = Bench(stores, other)
        client: dict[str, list[float]] = {name: [] for name in bench.cases}
        for number in range(rounds):
            for name, case in bench.cases.items():
                count = await case(number)
                client[name].append(bench.meter.used / count * 1e6)
            await other.flushdb()
    print(f"| client CPU, us, median [least-most] of {rounds} rounds | |\n|---|---|")
    for name, figures in client.items():
        print(f"| {name} | {statistics.median(figures):.2f} [{min(figures):.2f}-{max(figures):.2f}] |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(asked.url, asked.rounds))
