"""Who is served when many wait, and what a request that takes workers down does to its neighbours: on both brokers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import Broker, Message
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.protocol.jobs import ErrorEvent, FinalEvent, GenerateJob, Raw, queue_of
from headrace.settings import Settings
from headrace.workers.generate import watch
from headrace.workers.generate.engine import Admission, Output
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, Listener, demo_spec, roles, working

Connect = Callable[[], AbstractAsyncContextManager[Broker]]
QUICK = Terms(heartbeat=0.6)


@pytest.fixture(params=["embedded", pytest.param("servers", marks=pytest.mark.servers)])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """One more connection to the same broker, as of another process."""
    if request.param == "embedded":
        home = Embedded()
        yield home.connect
        home.close()
    else:
        rabbitmq, redis = request.getfixturevalue("vhost"), request.getfixturevalue("redis_db")
        settings = Settings(amqp_url=rabbitmq.url, redis_url=redis.url)
        yield lambda: servers(settings)


def job(name: str, *, client: str = CLIENT, priority: int = 0, **params: object) -> GenerateJob:
    request = {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 1, "ignore_eos": True} | params,
        "priority": priority,
    }
    body = Raw(json.dumps(request).encode())
    return GenerateJob(client=client, request_id=name, model="demo", delivery="final", request=body, topic="t")


async def send(broker: Broker, asked: GenerateJob, lane: jobs.Lane = "normal") -> None:
    await broker.queues.publish(queue_of("generate", "demo", lane), Message(jobs.encode(asked), asked.request_id))


@pytest.fixture
async def everybody(connect: Connect) -> AsyncIterator[Listener]:
    """Hears what every client hears, in order."""
    async with connect() as broker, broker.topics.subscribe("#") as messages:
        listener = Listener(broker)
        task = asyncio.create_task(listener.listen(messages))
        yield listener
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def order_of(listener: Listener) -> list[str]:
    return [name for name, events in listener.heard.items() if any(isinstance(e, FinalEvent) for e in events)]


async def test_a_client_with_ten_requests_is_not_behind_a_flood_of_another(
    connect: Connect, everybody: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "CROWDED", 20)
    flood, few = 400, 10
    render, _, *others = roles(everybody.broker)
    engine = NullEngine(NullSettings(rows=4, tokens_per_second=40))
    async with connect() as broker:
        worker = GenerateWorker(broker, demo_spec(), engine=engine, terms=QUICK)
        async with working([render, worker, *others], grace=0.0):
            for number in range(flood):
                await send(broker, job(f"flood{number}", client="flood"))
            for number in range(few):
                await send(broker, job(f"few{number}", client="few"))
            async with asyncio.timeout(WAIT_S):
                await everybody.until(lambda: sum(name.startswith("few") for name in order_of(everybody)) == few)
    assert len(order_of(everybody)) < flood


async def test_every_lane_is_served_and_the_high_one_first(connect: Connect, everybody: Listener) -> None:
    engine = NullEngine(NullSettings(rows=2, tokens_per_second=100))
    async with connect() as broker:
        worker = GenerateWorker(broker, demo_spec(), engine=engine, terms=QUICK)
        await broker.queues.declare([queue_of("generate", "demo", lane) for lane in jobs.LANES])
        lanes: list[tuple[jobs.Lane, int]] = [("low", 5), ("normal", 0), ("high", -5)]
        for lane, priority in lanes:
            for number in range(40):
                await send(broker, job(f"{lane}{number}", priority=priority), lane)
        _, _, *others = roles(everybody.broker)
        async with working([worker, *others]):
            async with asyncio.timeout(WAIT_S * 2):
                await everybody.until(lambda: len(order_of(everybody)) == 120)
    first_half = order_of(everybody)[:60]
    counts = {lane: sum(name.startswith(lane) for name in first_half) for lane, _ in lanes}
    assert counts["high"] > counts["normal"] > counts["low"] > 0


class Deadly(NullEngine):
    """An engine that takes its process down when a certain request is served beside others."""

    def __init__(self, fall: Callable[[], None]) -> None:
        super().__init__(NullSettings(rows=8))
        self._fall = fall
        self._poisoned = False

    def admit(self, admission: Admission) -> None:
        self._poisoned = self._poisoned or admission.client == "poison"
        super().admit(admission)

    async def step(self) -> list[Output]:
        made = await super().step()
        if self._poisoned:
            self._fall()
            await asyncio.Event().wait()
        return made


async def test_only_the_request_that_takes_workers_down_is_given_up(connect: Connect, everybody: Listener) -> None:
    names = [f"good{number}" for number in range(5)]
    async with connect() as broker:
        await broker.queues.declare([queue_of("generate", "demo"), queue_of("derender", "demo")])
        for name in names[:3]:
            await send(broker, job(name))
        await send(broker, job("bad", client="poison"))
        for name in names[3:]:
            await send(broker, job(name))
    _, _, *others = roles(everybody.broker)
    terms = Terms(heartbeat=0.3, max_rescues=3)
    async with working(others):
        for _ in range(20):
            if await _one_life(connect, everybody, terms, names):
                break
    outcome = everybody.outcomes("bad")[0]
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "exhausted"
    assert all(isinstance(everybody.outcomes(name)[0], FinalEvent) for name in names)
    async with connect() as broker, asyncio.timeout(WAIT_S), broker.queues.consume(jobs.DEAD_QUEUE, 4) as dead:
        buried = await anext(dead)
        assert (buried.request_id, buried.headers["x-headrace-rescues"]) == ("bad", 3)
        assert await broker.queues.depth(jobs.DEAD_QUEUE) == 0


async def _one_life(connect: Connect, everybody: Listener, terms: Terms, names: list[str]) -> bool:
    """One worker, until it falls or all is told. Whether that is so."""
    fallen = asyncio.Event()
    wanted = [*names, "bad"]
    async with connect() as broker:
        worker = GenerateWorker(broker, demo_spec(), engine=Deadly(fallen.set), terms=terms)

        async def hand_over() -> None:
            """The dead let go of nothing."""

        worker._held.hand_over = hand_over  # type: ignore[method-assign]
        await worker.start()
        running = asyncio.create_task(worker.run(asyncio.Event(), 0.0))
        told = asyncio.create_task(everybody.until(lambda: all(everybody.outcomes(name) for name in wanted)))
        falls = asyncio.create_task(fallen.wait())
        try:
            await asyncio.wait((told, falls, running), return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
            return told.done()
        finally:
            for task in (told, falls, running):
                task.cancel()
            await asyncio.gather(told, falls, running, return_exceptions=True)


async def test_a_long_run_is_renewed_before_the_broker_takes_it_back_and_told_once(
    connect: Connect, everybody: Listener
) -> None:
    engine = NullEngine(NullSettings(rows=4, tokens_per_second=10))
    terms = Terms(heartbeat=0.3, consumer_timeout=0.6)
    async with connect() as broker:
        worker = GenerateWorker(broker, demo_spec(), engine=engine, terms=terms)
        _, _, *others = roles(everybody.broker)
        renewed = 0
        retry = broker.queues.retry

        async def counted(delivery: object, *rest: object) -> None:
            nonlocal renewed
            renewed += 1
            await retry(delivery, *rest)  # type: ignore[arg-type]

        broker.queues.retry = counted  # type: ignore[method-assign, assignment]
        async with working([worker, *others]):
            await send(broker, job("long", max_tokens=25))
            async with asyncio.timeout(WAIT_S):
                await everybody.until(lambda: bool(everybody.outcomes("long")))
        (outcome,) = everybody.outcomes("long")
        assert isinstance(outcome, FinalEvent)
        assert len(json.loads(bytes(outcome.response))["choices"][0]["token_ids"]) == 25
        assert renewed >= 3
