"""Derender workers on real servers: killed, stopped and replaced in the middle of a stream."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace import Headrace
from headrace.broker.ports import Broker, Message, TopicMessage
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, Event, FinalEvent, Via
from headrace.settings import Settings
from headrace.workers.control import ControlWorker
from headrace.workers.derender import checkpoint
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.render.worker import RenderWorker
from tests.integration.fleet import BOUND, Fleet, fleet
from tests.line import demo_spec, roles, working
from tests.servers import RabbitMQ, Redis

pytestmark = pytest.mark.servers

TOKENS = 700
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def headraces(vhost: RabbitMQ, redis_db: Redis, tmp_path: Path) -> Iterator[Fleet]:
    with fleet(vhost, redis_db, tmp_path) as started:
        yield started


@asynccontextmanager
async def generating(settings: Settings) -> AsyncIterator[Broker]:
    """All roles but the derender worker, which write some hundred tokens a second; yields a client's broker."""
    engine = NullEngine(NullSettings(tokens_per_second=250))
    async with servers(settings) as broker, servers(settings) as other:
        spec = demo_spec()
        writing = [RenderWorker(other, spec), GenerateWorker(other, spec, engine=engine), ControlWorker(other)]
        async with working(writing):
            yield broker


async def tell(messages: AsyncIterator[TopicMessage], told: list[ChunkEvent]) -> None:
    async for message in messages:
        told += [event for event in jobs.decode_events(message.body) if isinstance(event, ChunkEvent)]


async def saved_chunks(broker: Broker, request_id: str, at_least: int) -> int:
    """How many chunks the run's checkpoint covers, once it is so many."""
    run = jobs.run_of("tester", request_id)
    async with asyncio.timeout(BOUND):
        while True:
            state = await broker.runs.load(run)
            if state is not None and (chunks := json.loads(state)["chunks"]) >= at_least:
                return int(chunks)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("via", ["amqp", "redis"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_stream_goes_on_from_its_checkpoint_when_its_worker_is_gone(
    number: signal.Signals, via: Via, headraces: Fleet, vhost: RabbitMQ, redis_db: Redis
) -> None:
    settings = Settings(amqp_url=vhost.url, redis_url=redis_db.url, client="tester", via=via)
    headraces.env |= {"HEADRACE_GRACE": "0"}
    (doomed,) = await asyncio.to_thread(headraces.workers, ("derender",))
    told: list[ChunkEvent] = []
    async with (
        generating(settings) as broker,
        broker.via(via).subscribe("tester.#") as messages,
        Headrace.connect(settings, broker=broker) as hr,
    ):
        listening = asyncio.create_task(tell(messages, told))
        stream = await hr.chat(messages=HELLO, max_tokens=TOKENS, ignore_eos=True, seed=7)
        saved = await saved_chunks(broker, stream.request_id, checkpoint.EVERY_CHUNKS)
        doomed.send_signal(number)
        await asyncio.to_thread(doomed.wait, BOUND)
        if number is signal.SIGTERM:  # it left a checkpoint of all that it had told
            saved = await saved_chunks(broker, stream.request_id, len({event.seq for event in told}))
        (successor,) = await asyncio.to_thread(headraces.workers, ("derender",))
        async with asyncio.timeout(BOUND):
            chunks = [chunk async for chunk in stream]
            response = await stream.result()
        listening.cancel()
        assert successor.poll() is None

    assert [chunk.seq for chunk in chunks] == list(range(TOKENS))
    message = response.choices[0].message
    assert "".join(chunk.reasoning for chunk in chunks) == (message.reasoning or "")
    assert "".join(chunk.text for chunk in chunks) == (message.content or "")

    seqs = [event.seq for event in told]
    first = {event.seq: bytes(event.chunk) for event in reversed(told)}
    twice = {seq for seq, times in Counter(seqs).items() if times > 1}
    assert sorted(first) == list(range(TOKENS))
    assert all(first[event.seq] == bytes(event.chunk) for event in told)
    assert all(seq >= saved for seq in twice)
    if number is signal.SIGTERM:
        assert twice == set()


async def test_each_request_is_told_by_the_way_that_it_chose_and_by_no_other(vhost: RabbitMQ, redis_db: Redis) -> None:
    settings = Settings(amqp_url=vhost.url, redis_url=redis_db.url)
    async with (
        servers(settings) as broker,
        servers(settings) as other,
        broker.topics.subscribe("tester.#") as on_rabbitmq,
        broker.streams.subscribe("tester.#") as on_redis,
        working(roles(other)),
    ):
        wanted = {"messages": HELLO, "max_tokens": 5}
        for via in ("amqp", "redis"):
            who = {"client": "tester", "model": "demo", "via": via}
            render = {"type": "render", "endpoint": "/v1/chat/completions"} | who
            bad = render | {"request_id": f"bad {via}"}
            asked = render | {"request_id": via, "body": wanted}
            replay = {"type": "replay", "request_id": f"unknown {via}"} | who
            cancel = {"type": "cancel", "request_id": f"cancelled {via}"} | who
            for queue, job in (("render.demo", bad), ("control", replay), ("control", cancel), ("render.demo", asked)):
                await broker.queues.publish(queue, Message(json.dumps(job).encode()))
        heard = {"amqp": await until_four_ended(on_rabbitmq), "redis": await until_four_ended(on_redis)}
        replay = {"type": "replay", "request_id": "amqp", "client": "tester", "model": "demo", "via": "redis"}
        await broker.queues.publish("control", Message(json.dumps(replay).encode()))
        async with asyncio.timeout(BOUND):
            again = jobs.decode_events((await anext(on_redis)).body)
    for via, events in heard.items():
        ended = {event.request_id: event for event in events if not isinstance(event, ChunkEvent)}
        assert set(ended) == {via, f"bad {via}", f"unknown {via}", f"cancelled {via}"}
        assert isinstance(ended[via], FinalEvent)
        assert [event.seq for event in events if isinstance(event, ChunkEvent)] == list(range(5))
    chunks = [bytes(event.chunk) for event in heard["amqp"] if isinstance(event, ChunkEvent)]
    assert [bytes(event.chunk) for event in again if isinstance(event, ChunkEvent)] == chunks


async def until_four_ended(messages: AsyncIterator[TopicMessage]) -> list[Event]:
    """Everything up to the fourth outcome."""
    heard: list[Event] = []
    async with asyncio.timeout(BOUND):
        while sum(not isinstance(event, ChunkEvent) for event in heard) < 4:
            heard += jobs.decode_events((await anext(messages)).body)
    return heard
