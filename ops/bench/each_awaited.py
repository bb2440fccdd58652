"""The loop that ops.bench.line measures the derender worker against: a confirmed aio-pika publish for each chunk.

It reads the same logs, checks and derenders in the same way and makes the same events; only the sending differs.
Run by ops.bench.line; prints the CPU microseconds that the telling took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import cycle, islice

import aio_pika
import msgspec
import structlog
import uvloop
from msgspec import Raw
from tokenizers import Tokenizer

from headrace.broker.entries import Position
from headrace.broker.ports import Broker, ClaimRequest
from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, Endpoint, GenerateJob, run_of
from headrace.protocol.wire import TokenChoice, TokenChunk, Usage
from headrace.settings import Settings
from headrace.workers.derender import Derenderer
from headrace.workers.derender.telling import Telling, telling_of
from headrace.workers.follow import Follower
from headrace.workers.generate.writer import Writing
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import End

CLIENT = "bench"
CHAT: Endpoint = "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog, 你好，世界！ then it rests (and x < 2). "
THOUGHT = "<think>\nThe user wants the notes. I write them.\n</think>\n\n"
REQUEST = {"messages": [{"role": "user", "content": "Write the notes."}], "stream": True}
PROMPT_IDS = 40


def tokens(count: int) -> tuple[list[int], list[int]]:
    """Ids of a prompt, and so many of a chat that thinks and answers."""
    tokenizer = Tokenizer.from_file(str(ModelSpec.of("demo").path / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT * 8, add_special_tokens=False).ids[:PROMPT_IDS]
    thought, text = (tokenizer.encode(said, add_special_tokens=False).ids for said in (THOUGHT, TEXT))
    return prompt, list(islice([*thought, *islice(cycle(text), count)], count))


def job_of(request_id: str, model: str, prompt: list[int]) -> GenerateJob:
    return GenerateJob(
        client=CLIENT,
        request_id=request_id,
        model=model,
        submitted_at=1.0,
        deadline=time.time() + 600,
        request=Raw(msgspec.json.encode({"token_ids": prompt, "sampling_params": {}})),
        endpoint=CHAT,
        source=Raw(json.dumps(REQUEST).encode()),
    )


async def filled(broker: Broker, prefix: str, streams: int, chunks: int, model: str) -> None:
    """Writes whole logs of such a chat, one token in each chunk, as a generate worker does."""
    prompt, ids = tokens(chunks)
    for n in range(streams):
        request_id = f"{prefix}-{n}"
        job = job_of(request_id, model, prompt)
        claim = await broker.runs.claim(
            ClaimRequest(
                run=job.run,
                role="generate",
                worker=CLIENT,
                digest=jobs.digest_of(job),
                deadline=job.deadline or 0.0,
                replay_ttl=job.replay_ttl,
                heartbeat=60.0,
                job=jobs.encode(job),
            )
        )
        position = Position(claim.epoch, 0)
        writing = Writing(job.run, after=position, chunks=0, running=Follower(position).running)
        usage = Usage(prompt_tokens=len(prompt), total_tokens=len(prompt) + chunks, completion_tokens=chunks)
        writing.add([chunk(request_id, token, last=k == chunks) for k, token in enumerate(ids, 1)], End(usage))
        await broker.log.append([writing.batch()])


def chunk(request_id: str, token: int, *, last: bool) -> TokenChunk:
    return TokenChunk(
        request_id=request_id,
        choices=[TokenChoice(index=0, token_ids=[token], finish_reason="length" if last else None)],
    )


async def tell(broker: Broker, exchange: aio_pika.abc.AbstractExchange, prefix: str, request_ids: list[str]) -> None:
    """Reads the logs in rounds; awaits each chunk."""
    derenderer = Derenderer.load(ModelSpec.of("demo").path, reasoning_parser="qwen3", tool_parser="hermes")
    tellings: dict[str, tuple[str, Telling, Follower]] = {}
    for request_id in request_ids:
        run = run_of(CLIENT, request_id)
        job = jobs.decode(await broker.runs.job(run) or b"")
        assert isinstance(job, GenerateJob)
        tellings[run] = request_id, telling_of(derenderer, job), Follower()
    cursors = dict.fromkeys(tellings, Position())
    began = time.process_time()
    while cursors:
        for run, entries in (await broker.log.read(cursors, wait=1.0, count=32)).items():
            request_id, telling, follower = tellings[run]
            for entry in entries:
                followed = follower.follow(entry)
                if entry.kind == "end":
                    del cursors[run]
                elif followed is not None:
                    body = telling.chunk(followed, entry.payload)
                    assert body is not None
                    event = ChunkEvent(client=CLIENT, request_id=request_id, seq=entry.seq, chunk=Raw(body))
                    message = aio_pika.Message(jobs.encode(event), correlation_id=request_id)
                    await exchange.publish(message, f"{CLIENT}.chunk.{prefix}", mandatory=False)
            if run in cursors:
                cursors[run] = follower.position
    print((time.process_time() - began) * 1e6)


async def main(prefix: str, streams: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    settings = Settings.load()
    async with servers(settings) as broker, await aio_pika.connect(settings.amqp_urls[0]) as connection:
        channel = await connection.channel(publisher_confirms=True)
        exchange = await channel.get_exchange(TOPIC_EXCHANGE)
        await tell(broker, exchange, prefix, [f"{prefix}-{n}" for n in range(streams)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix")
    parser.add_argument("streams", type=int)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(given.prefix, given.streams))
