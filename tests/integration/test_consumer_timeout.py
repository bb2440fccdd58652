"""RabbitMQ takes back what is held for too long, here for two seconds: runs go on, and are renewed before that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from headrace.broker.contract.queues import a_queue, message, take
from headrace.broker.ports import Broker
from headrace.broker.rabbitmq import RabbitMQ
from headrace.broker.redis import connect_redis
from headrace.protocol import GenerateRequest
from headrace.protocol.jobs import FinalEvent
from headrace.protocol.wire import TokenChunk
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.generate.engine import Admission
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.terms import Terms
from tests import servers
from tests.line import Listener, demo_spec, listening, working
from tests.servers import Redis

pytestmark = pytest.mark.servers

ALLOWED_S = 2.0
TOKENS = 100
SLOWLY = NullSettings(tokens_per_second=20)
"""The run takes more than twice the time for which a message may be held."""
WANTED: dict[str, object] = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def hasty_rabbitmq(private_rabbitmq: servers.RabbitMQ) -> servers.RabbitMQ:
    """Channels that are opened from now on are looked at twice a second."""
    settings = {"consumer_timeout": int(ALLOWED_S * 1000), "channel_tick_interval": 500}
    for name, value in settings.items():
        private_rabbitmq.ctl("eval", f"application:set_env(rabbit, {name}, {value}).")
    return private_rabbitmq


async def test_what_is_held_for_too_long_comes_back_and_a_late_ack_of_it_harms_nothing(
    hasty_rabbitmq: servers.RabbitMQ,
) -> None:
    queue = a_queue()
    async with RabbitMQ.connect(hasty_rabbitmq.url) as rabbit:
        await rabbit.queues.declare([queue])
        await rabbit.queues.publish(queue, message(1))
        async with rabbit.queues.consume(queue, prefetch=2) as deliveries:
            (held,) = await take(deliveries, 1)
            (again,) = await take(deliveries, 1)
            assert again.redelivered
            assert again.body == held.body
            await rabbit.queues.ack(held)
            assert rabbit.counters.stale_settlements == 1
            await rabbit.queues.ack(again)
        assert await rabbit.queues.depth(queue) == 0
        assert rabbit.counters.resubscribed == 1
        assert rabbit.counters.connections_lost == 0


@pytest.mark.parametrize(
    ("believed", "taken_back"),
    [
        pytest.param(3600.0, True, id="a worker that knows nothing of it"),
        pytest.param(ALLOWED_S, False, id="a worker that was told"),
    ],
)
async def test_a_run_that_takes_longer_is_written_and_told_once(
    hasty_rabbitmq: servers.RabbitMQ, redis_db: Redis, believed: float, taken_back: bool
) -> None:
    terms, name = Terms(heartbeat=1.5, consumer_timeout=believed), f"slow-{int(believed)}"
    async with (
        connected(hasty_rabbitmq, redis_db) as (ours, listened),
        connected(hasty_rabbitmq, redis_db) as (theirs, rabbit),
        listening(ours) as client,
        working(
            [
                GenerateWorker(theirs, demo_spec(), engine=NullEngine(SLOWLY), terms=terms),
                DerenderWorker(theirs, demo_spec(), terms=terms),
            ]
        ),
    ):
        await client.generate(name, sampling_params=WANTED)
        outcome = await client.outcome(name)
        assert (rabbit.counters.resubscribed > 0) == taken_back
        assert listened.counters.resubscribed == 0
    assert isinstance(outcome, FinalEvent)
    assert tokens_of(client, name) == await undisturbed()


@asynccontextmanager
async def connected(rabbitmq: servers.RabbitMQ, redis: Redis) -> AsyncIterator[tuple[Broker, RabbitMQ]]:
    async with RabbitMQ.connect(rabbitmq.url) as rabbit, connect_redis(redis.url) as stores:
        yield Broker(rabbit.queues, rabbit.topics, stores.log, stores.runs, stores.topics), rabbit


def tokens_of(client: Listener, request_id: str) -> list[int]:
    """What was told, by number: a chunk that came twice was the same both times."""
    told: dict[int, bytes] = {}
    for event in client.chunks(request_id):
        assert told.setdefault(event.seq, bytes(event.chunk)) == bytes(event.chunk)
    assert sorted(told) == list(range(TOKENS))
    chunks = [msgspec.json.decode(told[seq], type=TokenChunk) for seq in range(TOKENS)]
    return [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]


async def undisturbed() -> list[int]:
    engine = NullEngine()
    engine.admit(Admission("run", GenerateRequest.model_validate({"token_ids": [5, 6, 7], "sampling_params": WANTED})))
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        for output in await engine.step():
            tokens += [token for chunk in output.chunks for token in chunk.choices[0].token_ids or ()]
    return tokens
