"""What each part of telling a chunk costs by itself: no servers, one process, CPU time.

    python -m ops.bench.parts [--chunks 200]

The input is that of ops.bench.line's derender section: a chat that thinks and answers, one token in each chunk, the
demo's tokenizer and formats. Parts of a chunk are in nanoseconds a chunk, parts of a run in microseconds a run; the
least of several repetitions. What is not in here: system calls, the event loop, what RabbitMQ's client does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

import hiredis
import msgspec

from headrace.broker.embedded.log import entries_of
from headrace.broker.entries import Entry, Position
from headrace.broker.redis.keys import Keys
from headrace.broker.redis.log import Streams, _entries
from headrace.protocol import jobs
from headrace.protocol.jobs import DerenderJob
from headrace.protocol.wire import TokenChunk, Usage
from headrace.workers.derender import Derenderer
from headrace.workers.derender.checkpoint import Saved
from headrace.workers.derender.gather import Gathered
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.telling import ChunkEvents, InText, telling_of
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower
from headrace.workers.generate.writer import Writing
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import End
from ops.bench.each_awaited import chunk, job_of, tokens

REPEATS: Final = 9
FOR_S: Final = 0.1
"""CPU seconds of one repetition, at least."""


def least(work: Callable[[], object]) -> float:
    """CPU seconds that the work takes."""
    work()
    times = 1
    while (spent := _spent(work, times)) < FOR_S:
        times = max(times * 2, int(times * FOR_S / max(spent, 1e-6)))
    return min(_spent(work, times) for _ in range(REPEATS)) / times


def _spent(work: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        work()
    return time.process_time() - began


def reply_of(key: bytes, entries: Sequence[Entry]) -> bytes:
    """What Redis answers to an XREAD that finds these entries of one run."""

    def resp(value: object) -> bytes:
        if isinstance(value, list):
            return b"*%d\r\n%b" % (len(value), b"".join(map(resp, value)))
        text = value if isinstance(value, bytes) else str(value).encode()
        return b"$%d\r\n%b\r\n" % (len(text), text)

    return resp([[key, [[entry.position, [entry.kind, entry.payload, "before", entry.before]] for entry in entries]]])


def parts(chunks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Nanoseconds of a chunk's parts, microseconds of a run's."""
    derenderer = Derenderer.load(ModelSpec.of("demo").path, reasoning_parser="qwen3", tool_parser="hermes")
    prompt, ids = tokens(chunks)
    job = job_of("SDK-256-1-200", "bench-derender", prompt)
    derender = DerenderJob(**jobs.follow_on(job), endpoint=job.endpoint)
    end = End(Usage(prompt_tokens=40, total_tokens=40 + chunks, completion_tokens=chunks))
    writing = Writing(job.run, after=Position(1, 0), chunks=0, running=Follower().running)
    writing.add([chunk(job.request_id, token, last=k == chunks) for k, token in enumerate(ids, 1)], end)
    *entries, _ = entries_of(writing.batch())
    reply, reader = reply_of(Keys().of(job.run).log, entries), hiredis.Reader()

    def replied() -> Streams:
        reader.feed(reply)
        return cast("Streams", reader.gets())

    def followed() -> list[TokenChunk]:
        follower = Follower(Position(1, 0))
        return [followed for entry in entries if (followed := follower.follow(entry)) is not None]

    def stepped() -> list[msgspec.Struct]:
        session = cast("InText", telling_of(derenderer, job))._session
        return [session.step(each) for each in token_chunks]

    def packed() -> None:
        outbox = Outbox()
        outbox.add(derender, "chunk", [form % (seq, body) for seq, body in enumerate(bodies)], derender)
        outbox.take()

    def told() -> Told:
        telling = Told(derender, None, 1, telling_of(derenderer, job), Follower(Position(1, 0)))  # type: ignore[arg-type]
        telling.take(entries, Outbox())
        return telling

    streams, token_chunks = replied(), followed()
    outs, form, encode = stepped(), ChunkEvents(derender).form, msgspec.json.Encoder().encode
    bodies = [encode(out) for out in outs]
    whole = told()
    opening = least(lambda: telling_of(derenderer, job))
    of_chunk: dict[str, Callable[[], object]] = {
        "the reply (hiredis)": replied,
        "entries": lambda: _entries(streams),
        "followed: order, hash, JSON": followed,
        "derendered": stepped,
        "gathered for the response": lambda: Gathered.of(token_chunks),
        "its JSON": lambda: [encode(out) for out in outs],
        "its event, packed": packed,
        "all of it from the entries on": told,
    }
    of_run: dict[str, Callable[[], object]] = {
        "checkpoint taken": lambda: msgspec.json.encode(Saved.of(whole)),
        "response, its JSON": lambda: whole.telling.final(end),
    }
    minus = {"derendered": opening, "all of it from the entries on": opening}
    nanoseconds = {name: (least(work) - minus.get(name, 0.0)) / chunks * 1e9 for name, work in of_chunk.items()}
    microseconds = {"telling opened": opening * 1e6} | {name: least(work) * 1e6 for name, work in of_run.items()}
    return nanoseconds, microseconds


def main(chunks: int) -> None:
    nanoseconds, microseconds = parts(chunks)
    print(f"\n| a chunk of {chunks} | ns |\n|---|---|")
    for name, spent in nanoseconds.items():
        print(f"| {name} | {spent:.0f} |")
    print("\n| a run | us |\n|---|---|")
    for name, spent in microseconds.items():
        print(f"| {name} | {spent:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=200)
    main(parser.parse_args().chunks)
