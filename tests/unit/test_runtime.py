"""The life of a worker, and what becomes of a job whose handling fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import (
    Broker,
    BrokerUnavailable,
    Delivery,
    HeaderValue,
    Message,
    MessageTooLarge,
    QueueFull,
    Unroutable,
)
from headrace.protocol import jobs
from headrace.protocol.errors import BadRequest
from headrace.protocol.jobs import DEAD_QUEUE, EnvelopeError, ErrorEvent, FinalEvent
from headrace.workers import runtime
from headrace.workers.outcome import answered, conclude
from headrace.workers.runtime import MAX_FAILURES, backoff, guarded, serve, take, worker_name
from tests.line import CLIENT, Listener, listening, render_job, roles, working

JOB = jobs.encode(render_job("r1", {"messages": [{"role": "user", "content": "Hi"}]}))
FAILURES = "x-headrace-failures"


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare(["render.demo"])
    yield home
    home.close()


async def delivered(broker: Broker, failures: HeaderValue = 0, body: bytes = JOB) -> Delivery:
    await broker.queues.publish("render.demo", Message(body, "r1", {FAILURES: failures} if failures else {}))
    async with broker.queues.consume("render.demo", 1) as deliveries:
        return await anext(deliveries)


async def fail_with(home: Embedded, error: Exception, delivery: Delivery) -> None:
    async def handle(_: Delivery) -> None:
        raise error

    await guarded(home.broker, delivery, handle)


async def outcomes(client: Listener) -> ErrorEvent:
    event = await client.outcome("r1")
    assert isinstance(event, ErrorEvent)
    return event


async def test_a_refused_request_is_told_and_settled(home: Embedded) -> None:
    async with listening(home.broker) as client:
        await fail_with(home, BadRequest("messages: no", param="messages"), await delivered(home.broker))
        event = await outcomes(client)
    assert (event.code, event.status) == ("bad_request", 400)
    assert await home.broker.queues.depth("render.demo") == 0
    assert await home.broker.queues.depth(DEAD_QUEUE) == 0


async def test_what_is_too_large_to_pass_on_is_told_at_once(home: Embedded) -> None:
    async with listening(home.broker) as client:
        await fail_with(home, MessageTooLarge("9 bytes, at most 5"), await delivered(home.broker))
        event = await outcomes(client)
    assert (event.code, event.status) == ("too_large", 413)


async def test_an_unexpected_failure_is_tried_again_a_bounded_number_of_times(home: Embedded) -> None:
    async with listening(home.broker) as client:
        await fail_with(home, KeyError("x"), await delivered(home.broker, failures=MAX_FAILURES - 2))
        assert client.heard == {}
        await fail_with(home, KeyError("x"), await delivered(home.broker, failures=MAX_FAILURES - 1))
        event = await outcomes(client)
    assert event.code == "exhausted"
    assert "5 times" in json.loads(bytes(event.error))["message"]
    assert await home.broker.queues.depth(DEAD_QUEUE) == 1


@pytest.mark.parametrize("failures", ["many", "", 1.5, -(2**62), True])
async def test_a_count_of_failures_that_is_not_ours_bounds_the_tries_all_the_same(
    home: Embedded, failures: HeaderValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "backoff", lambda tries: 0.0)

    async def handle(_: Delivery) -> None:
        raise KeyError("x")

    async with listening(home.broker) as client, home.broker.queues.consume("render.demo", 1) as deliveries:
        await home.broker.queues.publish("render.demo", Message(JOB, "r1", {FAILURES: failures}))
        for _ in range(MAX_FAILURES):
            if client.heard:
                break
            async with asyncio.timeout(5):
                await guarded(home.broker, await anext(deliveries), handle)
        event = await outcomes(client)
    assert event.code == "exhausted"


async def test_whatever_goes_wrong_in_settling_a_job_its_worker_goes_on(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_AWAY_S", 0.0)

    async def defective(*_: object) -> None:
        raise ValueError("this header cannot be written")

    with monkeypatch.context() as broken:
        broken.setattr(home.broker.queues, "retry", defective)
        await fail_with(home, KeyError("x"), await delivered(home.broker))
    assert await home.broker.queues.depth("render.demo") == 1


@pytest.mark.parametrize("error", [EnvelopeError("seq: no"), BadRequest("no"), KeyError("x")])
@pytest.mark.parametrize("kind", ["cancel", "replay"])
async def test_what_is_wrong_with_a_message_about_a_request_is_not_the_requests_outcome(
    home: Embedded, kind: str, error: Exception
) -> None:
    body = json.dumps({"type": kind, "client": CLIENT, "request_id": "r1", "model": "demo", "seq": -1}).encode()
    run = jobs.run_of(CLIENT, "r1")
    async with listening(home.broker) as client:
        await fail_with(home, error, await delivered(home.broker, failures=MAX_FAILURES - 1, body=body))
        event = await outcomes(client)
    assert event.event_id != run
    assert await home.broker.runs.result(run) is None


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), QueueFull("full", 0.5), Unroutable("no queue")])
async def test_a_broker_in_trouble_uses_no_attempt(home: Embedded, error: Exception) -> None:
    async with listening(home.broker) as client:
        for _ in range(MAX_FAILURES + 1):
            await fail_with(home, error, await delivered(home.broker))
        assert client.heard == {}
    assert await home.broker.queues.depth(DEAD_QUEUE) == 0


async def test_a_delivery_that_cannot_be_settled_goes_back_to_its_queue(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_AWAY_S", 0.0)

    async def away(*_: object) -> None:
        raise BrokerUnavailable("away")

    delivery = await delivered(home.broker)
    with monkeypatch.context() as broken:
        broken.setattr(home.broker.queues, "retry", away)
        await fail_with(home, BrokerUnavailable("away"), delivery)
    async with home.broker.queues.consume("render.demo", 1) as deliveries, asyncio.timeout(5):
        again = await anext(deliveries)
    assert (again.body, again.redelivered) == (JOB, True)


async def test_stopping_waits_for_what_was_taken(home: Embedded) -> None:
    taken, go_on, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    settled: list[Delivery] = []

    async def handle(delivery: Delivery) -> None:
        taken.set()
        await go_on.wait()
        await home.broker.queues.ack(delivery)
        settled.append(delivery)

    await home.broker.queues.publish("render.demo", Message(JOB))
    taking = asyncio.create_task(take(home.broker, "render.demo", 1, handle, stop))
    await taken.wait()
    await home.broker.queues.publish("render.demo", Message(b"later"))
    stop.set()
    for _ in range(10):  # turns of the loop in which the taking ends, while the handler still holds its job
        await asyncio.sleep(0)
    assert not taking.done()
    go_on.set()
    async with asyncio.timeout(5):
        await taking
    assert [delivery.body for delivery in settled] == [JOB]
    assert await home.broker.queues.depth("render.demo") == 1


def test_a_worker_that_was_started_again_has_another_name() -> None:
    assert len({worker_name("generate") for _ in range(100)}) == 100


async def test_a_role_that_fails_ends_the_process(home: Embedded) -> None:
    class Failing:
        name = "failing"

        async def start(self) -> None: ...

        async def run(self, stop: asyncio.Event, grace: float) -> None:
            raise RuntimeError("no")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await serve([*roles(home.broker), Failing()], stop=asyncio.Event())
    assert caught.group_contains(RuntimeError, match="no")


async def test_the_line_starts_and_stops_again_and_again(home: Embedded) -> None:
    for _ in range(20):
        async with home.connect() as broker, working(roles(broker)):
            pass


async def test_a_rendered_job_over_the_limit_is_told_to_its_client() -> None:
    home = Embedded(max_body=4096)
    async with listening(home.broker) as client, working(roles(home.broker)):
        await client.chat("r1", messages=[{"role": "user", "content": "x " * 1000}])
        event = await outcomes(client)
    home.close()
    assert event.code == "too_large"


async def test_a_response_over_the_limit_is_told_in_parts(home: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = home.broker.topics.publish

    async def limited(messages: list[object]) -> None:
        if any(len(message.body) > 1000 for message in messages):  # type: ignore[attr-defined]
            raise MessageTooLarge("over 1000 bytes", 1000)
        await publish(messages)  # type: ignore[arg-type]

    monkeypatch.setattr(home.broker.topics, "publish", limited)
    request = render_job("r1", {})
    async with listening(home.broker) as client:
        await conclude(home.broker, answered(request, b'"%s"' % (b"x" * 2000), chunks=0), to=request)
        event = await client.outcome("r1")
    assert isinstance(event, FinalEvent)
    assert client.parted == 1
    assert jobs.encode(event) == await home.broker.runs.result(jobs.run_of(CLIENT, "r1"))


def test_the_wait_doubles_up_to_a_bound() -> None:
    assert [backoff(tries) for tries in (1, 2, 3, 4, 20)] == [1, 2, 4, 8, 60]
