"""The whole line, requests in, events out, with the null engine: on the embedded broker, and on real servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import Broker
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.protocol.jobs import Cancel, ErrorEvent, FinalEvent, Replay
from headrace.settings import Settings
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.runtime import serve
from tests.line import CLIENT, Listener, listening, render_job, roles, working

Connect = Callable[[], AbstractAsyncContextManager[Broker]]


@pytest.fixture(params=["embedded", "servers"])
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


@pytest.fixture
async def client(connect: Connect) -> AsyncIterator[Listener]:
    async with connect() as broker, connect() as other, listening(broker) as listener, working(roles(other)):
        yield listener


async def test_a_chat_is_streamed_and_its_chunks_add_up_to_the_final(client: Listener) -> None:
    await client.chat("r1", max_tokens=20, seed=1)
    outcome = await client.outcome("r1")
    assert isinstance(outcome, FinalEvent)
    response = json.loads(bytes(outcome.response))
    chunks = [json.loads(bytes(event.chunk)) for event in client.chunks("r1")]
    assert [event.seq for event in client.chunks("r1")] == list(range(outcome.chunks))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    message = response["choices"][0]["message"]
    for part in ("reasoning", "content"):
        told = "".join(choice["delta"].get(part) or "" for chunk in chunks for choice in chunk["choices"])
        assert told == (message[part] or "")
    assert response["usage"]["completion_tokens"] == 20
    assert {chunk["id"] for chunk in chunks} == {response["id"]}
    assert {chunk["created"] for chunk in chunks} == {response["created"]}


async def test_final_delivery_tells_no_chunks(client: Listener) -> None:
    await client.chat("r1", delivery="final", max_tokens=5)
    assert isinstance(await client.outcome("r1"), FinalEvent)
    assert client.chunks("r1") == []


async def test_tokens_pass_as_the_engine_made_them(client: Listener) -> None:
    await client.generate("r1", sampling_params={"max_tokens": 6, "n": 2, "temperature": 1.0})
    outcome = await client.outcome("r1")
    assert isinstance(outcome, FinalEvent)
    response = json.loads(bytes(outcome.response))
    assert [len(choice["token_ids"]) for choice in response["choices"]] == [6, 6]
    for index in (0, 1):
        told = [
            token
            for event in client.chunks("r1")
            for choice in json.loads(bytes(event.chunk))["choices"]
            if choice["index"] == index
            for token in choice["token_ids"]
        ]
        assert told == response["choices"][index]["token_ids"]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids.1"),
        ({"token_ids": [1, 99999]}, "token_ids.1"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"logprobs": 1}}, "sampling_params.logprobs"),
        ({"model": "other"}, "model"),
    ],
)
async def test_a_bad_generate_request_is_refused_by_name_and_its_neighbour_unharmed(
    request_: dict[str, object], param: str, client: Listener
) -> None:
    await client.generate("bad", **request_)
    await client.generate("good")
    refused = await client.outcome("bad")
    assert isinstance(refused, ErrorEvent)
    error = json.loads(bytes(refused.error))
    assert error["param"] == param
    assert error["code"] == refused.status
    assert any(name in error["message"] for name in param.split("."))
    assert isinstance(await client.outcome("good"), FinalEvent)


async def test_an_empty_messages_list_is_refused_by_name(client: Listener) -> None:
    await client.chat("bad", messages=[])
    refused = await client.outcome("bad")
    assert isinstance(refused, ErrorEvent)
    assert (refused.code, json.loads(bytes(refused.error))["param"]) == ("bad_request", "messages")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 99999}, "max_completion_tokens"),
        ({"max_tokens": 99999}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_a_chat_hears_of_a_sampling_parameter_by_the_name_it_used(
    body: dict[str, object], param: str, client: Listener
) -> None:
    await client.chat("bad", **body)
    refused = await client.outcome("bad")
    error = json.loads(bytes(refused.error)) if isinstance(refused, ErrorEvent) else {}
    assert error["param"] == param
    assert param in error["message"]
    assert "sampling_params" not in error["message"]


async def test_a_malformed_envelope_is_buried_and_its_sender_told(client: Listener) -> None:
    body = json.dumps({"type": "render", "client": CLIENT, "request_id": "bad", "model": "demo"}).encode()
    await client.send("render.demo", body)
    refused = await client.outcome("bad")
    assert isinstance(refused, ErrorEvent)
    assert "endpoint" in json.loads(bytes(refused.error))["message"]
    await client.send("render.demo", b"garbage")
    await client.generate("good")
    await client.outcome("good")
    assert await client.broker.queues.depth(jobs.DEAD_QUEUE) == 2


async def test_a_topic_that_cannot_be_one_is_told_without_it(client: Listener) -> None:
    body = {"type": "render", "client": CLIENT, "request_id": "bad", "model": "demo", "topic": "two.words"}
    await client.send("render.demo", json.dumps(body).encode())
    refused = await client.outcome("bad")
    assert isinstance(refused, ErrorEvent)
    assert json.loads(bytes(refused.error))["message"].startswith("topic: ")


async def test_a_bad_message_about_a_running_request_is_told_and_harms_it_not(connect: Connect) -> None:
    go_on = asyncio.Event()

    async def held(seconds: float) -> None:
        await go_on.wait()

    engine = NullEngine(NullSettings(tokens_per_second=50), sleep=held)
    bad: list[dict[str, object]] = [
        {"type": "replay", "model": "nowhere"},
        {"type": "replay", "model": "demo", "seq": -1},
        {"type": "cancel", "reason": 5},
        {"type": "cancel", "model": 7},
    ]
    async with (
        connect() as broker,
        connect() as other,
        listening(broker) as client,
        working(roles(other, engine=engine)),
    ):
        await client.generate("r1", sampling_params={"max_tokens": 20, "ignore_eos": True})
        await client.until(lambda: bool(client.chunks("r1")))
        for message in bad:
            await client.send("control", json.dumps(message | {"client": CLIENT, "request_id": "r1"}).encode())
        await client.until(lambda: len(client.outcomes("r1")) == len(bad))
        go_on.set()
        await client.until(lambda: len(client.outcomes("r1")) > len(bad))
    *told, outcome = client.outcomes("r1")
    assert all(isinstance(event, ErrorEvent) and event.event_id != jobs.run_of(CLIENT, "r1") for event in told)
    assert {json.loads(bytes(event.error))["code"] for event in told if isinstance(event, ErrorEvent)} == {400, 404}
    assert isinstance(outcome, FinalEvent)
    assert [event.seq for event in client.chunks("r1")] == list(range(20))


async def test_the_same_request_twice_runs_once(client: Listener) -> None:
    job = jobs.encode(render_job("r1", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}))
    await client.send("render.demo", job)
    first = await client.outcome("r1")
    await client.send("render.demo", job)
    await client.until(lambda: len(client.outcomes("r1")) == 2)
    assert jobs.encode(client.outcomes("r1")[1]) == jobs.encode(first)
    assert len(client.chunks("r1")) == first.chunks


async def test_another_body_under_the_same_id_is_a_conflict_and_the_first_stands(client: Listener) -> None:
    await client.generate("r1")
    first = await client.outcome("r1")
    await client.generate("r1", token_ids=[9])
    await client.until(lambda: len(client.outcomes("r1")) == 2)
    refused = client.outcomes("r1")[1]
    assert isinstance(refused, ErrorEvent)
    assert (refused.code, refused.event_id == first.event_id) == ("conflict", False)
    assert await client.broker.runs.result(jobs.run_of(CLIENT, "r1")) == jobs.encode(first)


async def test_two_clients_may_use_the_same_request_id(client: Listener) -> None:
    await client.generate("r1")
    async with client.broker.topics.subscribe("other.#") as messages:
        other = {"type": "generate", "client": "other", "request_id": "r1", "model": "demo", "delivery": "final"}
        request = {"token_ids": [9], "sampling_params": {"max_tokens": 2}}
        await client.send("generate.demo", json.dumps(other | {"request": request}).encode())
        await client.outcome("r1")
        async with asyncio.timeout(10):
            heard = [event async for event in finals(messages)]
    assert [event.client for event in heard] == ["other"]
    assert {event.client for event in client.heard["r1"]} == {CLIENT}


async def finals(messages: AsyncIterator[object]) -> AsyncIterator[FinalEvent]:
    async for message in messages:
        for event in jobs.decode_events(message.body):  # type: ignore[attr-defined]
            if isinstance(event, FinalEvent):
                yield event
                return


async def test_a_request_past_its_deadline_expires(client: Listener) -> None:
    job = render_job("late", {"messages": [{"role": "user", "content": "Hi"}]}, deadline=time.time() - 1)
    await client.send("render.demo", jobs.encode(job))
    outcome = await client.outcome("late")
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.status) == ("expired", 504)


async def test_chunks_are_replayed_from_a_number_on(client: Listener) -> None:
    await client.chat("r1", max_tokens=10)
    outcome = await client.outcome("r1")
    before = {event.seq: bytes(event.chunk) for event in client.chunks("r1")}
    replay = Replay(client=CLIENT, request_id="r1", model="demo", seq=4, topic="again")
    async with client.broker.topics.subscribe(f"{CLIENT}.*.again") as messages:
        await client.send("control", jobs.encode(replay))
        again: dict[int, bytes] = {}
        async with asyncio.timeout(10):
            async for message in messages:
                events = jobs.decode_events(message.body)
                again |= {e.seq: bytes(e.chunk) for e in events if isinstance(e, jobs.ChunkEvent)}
                if any(isinstance(event, FinalEvent) for event in events):
                    break
    assert again == {seq: chunk for seq, chunk in before.items() if seq >= 4}
    assert outcome.chunks == len(before)


async def test_a_replay_of_something_unknown_is_answered(client: Listener) -> None:
    await client.send("control", jobs.encode(Replay(client=CLIENT, request_id="never", model="demo")))
    outcome = await client.outcome("never")
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "not_found"


@pytest.mark.parametrize("body", [jobs.encode(render_job("given-up", {})), b"garbage"])
async def test_what_the_broker_gives_up_on_is_told_and_filed(body: bytes, client: Listener) -> None:
    await client.send(jobs.INTAKE_QUEUE, body)
    if body != b"garbage":
        outcome = await client.outcome("given-up")
        assert isinstance(outcome, ErrorEvent)
        assert outcome.code == "exhausted"
    async with asyncio.timeout(10), client.broker.queues.consume(jobs.DEAD_QUEUE, 1) as dead:
        assert (await anext(dead)).body == body


@pytest.mark.parametrize("kind", ["cancel", "replay"])
async def test_a_message_about_a_request_that_the_broker_gives_up_on_is_not_the_requests_outcome(
    kind: str, client: Listener
) -> None:
    body = {"type": kind, "client": CLIENT, "request_id": "r1", "model": "demo"}
    await client.send(jobs.INTAKE_QUEUE, json.dumps(body).encode())
    told = await client.outcome("r1")
    run = jobs.run_of(CLIENT, "r1")
    assert isinstance(told, ErrorEvent)
    assert (told.code, told.event_id == run) == ("exhausted", False)
    assert await client.broker.runs.result(run) is None


async def test_a_request_can_be_cancelled_before_anyone_has_claimed_it(connect: Connect) -> None:
    async with connect() as broker, listening(broker) as client:
        async with connect() as other, working(roles(other)[3:]):
            await client.send("control", jobs.encode(Cancel(client=CLIENT, request_id="r1", reason="enough")))
            outcome = await client.outcome("r1")
        assert isinstance(outcome, ErrorEvent)
        assert outcome.code == "cancelled"
        async with connect() as other, working(roles(other)):
            await client.generate("r1")
            await client.until(lambda: len(client.outcomes("r1")) == 2)
        assert jobs.encode(client.outcomes("r1")[1]) == jobs.encode(outcome)
        assert client.chunks("r1") == []


async def test_a_running_request_can_be_cancelled_and_frees_its_row(connect: Connect) -> None:
    engine = NullEngine(NullSettings(tokens_per_second=50))
    async with (
        connect() as broker,
        connect() as other,
        listening(broker) as client,
        working(roles(other, engine=engine)),
    ):
        await client.generate("r1", sampling_params={"max_tokens": 4000, "ignore_eos": True})
        await client.until(lambda: bool(client.chunks("r1")))
        await client.send("control", jobs.encode(Cancel(client=CLIENT, request_id="r1")))
        outcome = await client.outcome("r1")
        assert isinstance(outcome, ErrorEvent)
        assert outcome.code == "cancelled"
        capacity = engine.capacity()
        assert capacity.free_rows == capacity.rows


async def test_a_worker_that_drains_hands_over_and_another_goes_on_without_a_seam(connect: Connect) -> None:
    slow = NullSettings(tokens_per_second=100)
    wanted = {"max_tokens": 60, "ignore_eos": True, "seed": 3}
    async with connect() as broker, listening(broker) as client:
        async with connect() as leaving, working(roles(leaving, engine=NullEngine(slow)), grace=0.0):
            await client.generate("moved", sampling_params=wanted)
            await client.until(lambda: len(client.chunks("moved")) > 5)
        async with connect() as coming, working(roles(coming)):
            moved = await client.outcome("moved")
            await client.generate("whole", sampling_params=wanted)
            whole = await client.outcome("whole")
    assert isinstance(moved, FinalEvent)
    assert isinstance(whole, FinalEvent)
    tokens = [json.loads(bytes(event.response))["choices"][0]["token_ids"] for event in (moved, whole)]
    assert tokens[0] == tokens[1]
    assert_dense(client, "moved", 60)


async def test_a_worker_that_is_lost_is_replaced_once_its_heartbeat_is_gone(connect: Connect) -> None:
    async with connect() as broker, listening(broker) as client:
        async with connect() as doomed:
            lost = roles(doomed, engine=NullEngine(NullSettings(tokens_per_second=100)), heartbeat=0.6)
            ready = asyncio.Event()
            dying = asyncio.create_task(serve(lost, stop=asyncio.Event(), ready=ready, grace=0.0))
            await ready.wait()
            await client.generate("r1", sampling_params={"max_tokens": 80, "ignore_eos": True, "seed": 3})
            await client.until(lambda: len(client.chunks("r1")) > 5)
            for role in lost:
                role._broker = None  # type: ignore[attr-defined]  # nothing that it still tries reaches the broker
            dying.cancel()
            await asyncio.gather(dying, return_exceptions=True)
        async with connect() as coming, working(roles(coming, heartbeat=0.6)):
            outcome = await client.outcome("r1")
    assert isinstance(outcome, FinalEvent)
    assert outcome.chunks == 80
    assert_dense(client, "r1", 80)


def assert_dense(client: Listener, request_id: str, chunks: int) -> None:
    """Every chunk was told, and one that was told twice was the same both times."""
    told = {event.seq: bytes(event.chunk) for event in client.chunks(request_id)}
    assert sorted(told) == list(range(chunks))
    assert all(told[event.seq] == bytes(event.chunk) for event in client.chunks(request_id))
