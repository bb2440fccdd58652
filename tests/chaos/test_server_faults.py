"""RabbitMQ and Redis misbehave while requests are under way: each still has its one outcome, and the right one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pytest
import redis

from headrace.protocol import jobs
from tests.chaos.asks import ASKS, MODEL, Ask
from tests.chaos.driver import Driver, Round
from tests.chaos.stage import QUEUES, Stage, stage
from tests.proxy import Mood, Proxy
from tests.servers import RabbitMQ, Redis

OF_SERVERS: Final = tuple(ask for ask in ASKS if ask.kind.twist not in ("unserved", "rejected", "broken", "late"))
"""Those that need no more of the servers than to be there."""
LOST: Final = frozenset({"stream_lost"})


class Between:
    """A proxy that lives in a thread of its own, for as long as the workers behind it."""

    def __init__(self, proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        self.proxy = proxy
        self._loop = loop

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self.proxy.cut)

    @classmethod
    @contextmanager
    def to(cls, host: str, port: int) -> Iterator[Between]:
        loop = asyncio.new_event_loop()
        ready, end = threading.Event(), asyncio.Event()
        opened: list[Proxy] = []

        async def live() -> None:
            async with Proxy.to(host, port) as proxy:
                opened.append(proxy)
                ready.set()
                await end.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
        thread.start()
        try:
            assert ready.wait(10), "the proxy does not start"
            yield cls(opened[0], loop)
        finally:
            loop.call_soon_threadsafe(end.set)
            thread.join(20)
            loop.close()


@dataclass(frozen=True, slots=True)
class World:
    """The servers, what stands between them and the workers, and the workers."""

    stage: Stage
    rabbitmq: RabbitMQ
    redis: Redis
    to_rabbitmq: Between
    to_redis: Between

    def command(self, *words: str | int) -> None:
        with redis.Redis.from_url(self.redis.url) as store:
            store.execute_command(*words)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a server while requests are under way; ``short`` ones are part of every test run.

    ``complete``: a plain consumer, whose own connection is not touched, still hears every chunk by itself.
    """

    name: str
    strike: Callable[[World], Awaitable[None]]
    short: bool = False
    complete: bool = False


async def _moody(between: Between, mood: Mood, seconds: float) -> None:
    between.proxy.mood = mood
    await asyncio.sleep(seconds)
    between.proxy.mood = Mood.FAIR
    between.cut()


async def _slow(between: Between) -> None:
    between.proxy.delay = 0.03
    await asyncio.sleep(2.0)
    between.proxy.delay = 0.0


async def _cut_often(between: Between) -> None:
    for _ in range(4):
        between.cut()
        await asyncio.sleep(0.25)


async def _still(server: RabbitMQ | Redis) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(2.0)
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def _restart(server: RabbitMQ | Redis) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


async def _crash(server: RabbitMQ | Redis) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def _close_all(world: World) -> None:
    await asyncio.to_thread(world.rabbitmq.ctl, "close_all_connections", "--vhost", "/", "chaos")


async def _alarm(world: World) -> None:
    await asyncio.to_thread(world.rabbitmq.ctl, "set_vm_memory_high_watermark", "0.00001")
    await asyncio.sleep(2.0)
    await asyncio.to_thread(world.rabbitmq.ctl, "set_vm_memory_high_watermark", "0.4")


async def _command(world: World, *words: str | int) -> None:
    await asyncio.to_thread(world.command, *words)


async def _kill_clients(world: World) -> None:
    for _ in range(4):
        await _command(world, "CLIENT", "KILL", "TYPE", "normal")
        await asyncio.sleep(0.25)


FAULTS: Final = (
    Fault("rabbitmq is slow", lambda world: _slow(world.to_rabbitmq), complete=True),
    Fault("rabbitmq is cut off again and again", lambda world: _cut_often(world.to_rabbitmq), short=True),
    Fault("rabbitmq does not answer", lambda world: _moody(world.to_rabbitmq, Mood.FORGETFUL, 3.0)),
    Fault("rabbitmq is gone without a word", lambda world: _moody(world.to_rabbitmq, Mood.DEAF, 3.0), short=True),
    Fault("redis is slow", lambda world: _slow(world.to_redis), complete=True),
    Fault("redis is cut off again and again", lambda world: _cut_often(world.to_redis), short=True, complete=True),
    Fault(
        "redis does not answer", lambda world: _moody(world.to_redis, Mood.FORGETFUL, 2.0), short=True, complete=True
    ),
    Fault("redis is gone without a word", lambda world: _moody(world.to_redis, Mood.DEAF, 2.0), complete=True),
    Fault("redis stands still", lambda world: _still(world.redis), short=True, complete=True),
    Fault("rabbitmq stands still", lambda world: _still(world.rabbitmq)),
    Fault("redis closes all connections", _kill_clients, short=True, complete=True),
    Fault("redis pauses", lambda world: _command(world, "CLIENT", "PAUSE", 2000), complete=True),
    Fault("redis is restarted", lambda world: _restart(world.redis), short=True, complete=True),
    Fault("redis crashes", lambda world: _crash(world.redis), complete=True),
    Fault("rabbitmq is restarted", lambda world: _restart(world.rabbitmq)),
    Fault("rabbitmq crashes", lambda world: _crash(world.rabbitmq)),
    Fault("rabbitmq closes all connections", _close_all),
    Fault("rabbitmq has no memory", _alarm),
)


@pytest.fixture(scope="module")
def world(
    private_rabbitmq: RabbitMQ, private_redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with ExitStack() as stack:
        to_rabbitmq = stack.enter_context(Between.to(private_rabbitmq.host, private_rabbitmq.port))
        to_redis = stack.enter_context(Between.to(private_redis.host, private_redis.port))
        opened = stack.enter_context(
            stage(
                replace(private_rabbitmq, port=to_rabbitmq.proxy.port),
                replace(private_redis, port=to_redis.proxy.port),
                tmp_path_factory.mktemp("workers"),
            )
        )
        direct = {"amqp_url": private_rabbitmq.url, "redis_url": private_redis.url}
        opened.settings = opened.settings.model_copy(update=direct)
        yield World(opened, private_rabbitmq, private_redis, to_rabbitmq, to_redis)


async def _sent_during(
    world: World, driver: Driver, strike: Callable[[World], Awaitable[None]], asks: tuple[Ask, ...]
) -> list[Round]:
    """Round after round while the fault lasts, and one that begins before it."""
    rounds: list[Round] = []
    striking: asyncio.Future[None] | None = None
    while striking is None or not striking.done():
        rounds.append(replace(world.stage.next_round(), asks=asks))
        sending = asyncio.create_task(driver.send(rounds[-1]))
        if striking is None:
            await asyncio.sleep(0.05)  # in the midst of it; nothing depends on how far it has come
            striking = asyncio.ensure_future(strike(world))
        async with asyncio.timeout(60):
            await sending
    await striking
    return rounds


async def _suffer(world: World, fault: Fault) -> None:
    async with Driver.at_work(world.stage.settings, world.stage.heard) as driver:
        rounds = await _sent_during(world, driver, fault.strike, OF_SERVERS)
        await driver.settled(*rounds, hear=fault.complete)
        await driver.emptied(QUEUES)
        broken = [what for round_ in rounds for what in await driver.audit(round_, complete=fault.complete)]
        broken += [f"dead: {name} lies there" for name in await driver.buried()]
    broken += world.stage.keys_for_ever()
    assert not broken, "\n".join(broken)


@pytest.mark.servers
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.short or "HEADRACE_CHAOS" in os.environ], ids=lambda fault: fault.name
)
def test_everything_is_answered_although(fault: Fault, world: World) -> None:
    asyncio.run(_suffer(world, fault))


@pytest.mark.servers
def test_everything_is_answered_although_its_queues_are_deleted_under_the_workers(world: World) -> None:
    """Jobs that wait in a queue go with it. What is sent afterwards is served: the workers make their queues anew."""

    async def tell() -> None:
        async with Driver.at_work(world.stage.settings, world.stage.heard) as driver:
            for role in ("render", "generate", "derender"):
                name = jobs.queue_of(role, MODEL)
                await asyncio.to_thread(world.rabbitmq.api, "DELETE", f"/api/queues/%2F/{name}")
            round_ = replace(world.stage.next_round(), asks=OF_SERVERS)
            await asyncio.sleep(3.0)
            async with asyncio.timeout(60):
                await driver.send(round_)
            await driver.settled(round_)
            broken = await driver.audit(round_)
        assert not broken, "\n".join(broken)

    asyncio.run(tell())


@pytest.mark.servers
def test_what_redis_has_forgotten_is_made_anew_or_reported(world: World) -> None:
    """FLUSHALL under way: every request of the SDK ends; no seq ever has two chunks; what was told is an answer, or
    says that it was lost."""

    async def tell() -> list[str]:
        async with Driver.at_work(world.stage.settings, world.stage.heard) as driver:
            asks = tuple(ask for ask in OF_SERVERS if ask.kind.twist == "" and ask.kind.by == "sdk")
            rounds = await _sent_during(world, driver, _flush_often, asks)
            return [what for round_ in rounds for ask in asks for what in _silent_or_doubled(world, round_, ask)]

    broken = asyncio.run(tell())
    assert not broken, "\n".join(broken)


async def _flush_often(world: World) -> None:
    for _ in range(6):
        await _command(world, "FLUSHALL")
        await asyncio.sleep(0.25)


def _silent_or_doubled(world: World, round_: Round, ask: Ask) -> Iterator[str]:
    received = round_.received[ask.request_id]
    if received.final is None and received.error not in LOST:
        yield f"{round_.client}/{ask.request_id}: the SDK said {received.error}"
    chunks = dict(received.chunks)
    for event in world.stage.heard.get((round_.client, ask.request_id), ()):
        if isinstance(event, jobs.ChunkEvent):
            body = bytes(event.chunk)
            if chunks.setdefault(event.seq, body) != body:
                yield f"{round_.client}/{ask.request_id}: two chunks under seq {event.seq}"
