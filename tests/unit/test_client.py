"""The SDK against a broker that does what the test says."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec import Raw

import headrace.client.headrace
import headrace.client.many
import headrace.client.stream
from headrace import Headrace
from headrace.broker.ports import BrokerUnavailable, MessageTooLarge, QueueFull, TopicMessage, Unroutable
from headrace.client import Broken
from headrace.client.door import Request
from headrace.client.many import Done
from headrace.protocol import errors
from headrace.protocol.jobs import Cancel, FinalEvent, GenerateJob, Job, RenderJob, Replay
from headrace.settings import Settings
from tests.unit.scripted import BOUND, Scripted, chunk, error, final

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.client.headrace, "TICK_S", 0.002)
    monkeypatch.setattr(headrace.client.stream, "PATIENCE_S", 0.002)
    monkeypatch.setattr(headrace.client.many, "pause", lambda tries, at_least: 0.0)


@asynccontextmanager
async def connected(servers: Scripted, **settings: object) -> AsyncIterator[Headrace]:
    async with (
        asyncio.timeout(BOUND),
        Headrace.connect(Settings(**settings), broker=servers.broker) as hr,  # type: ignore[arg-type]
    ):
        yield hr


def chat(key: object = None, **fields: object) -> Request:
    return Request("/v1/chat/completions", {"messages": HELLO} | fields, key=key)


# ----------------------------------------------------------------------------------------------- submitting


async def test_the_body_travels_as_it_was_sent() -> None:
    sent = b'{ "messages": [{"role":"user","content":"hi"}],  "my_own": 1.50, "model":"m1" }'
    servers = Scripted()
    async with connected(servers, client="evals") as hr:
        await hr.submit("/v1/chat/completions", sent, request_id="r1")
        queue, job = await servers.queues.sent()
    assert isinstance(job, RenderJob)
    assert (queue, job.client, job.request_id, job.model) == ("render.m1", "evals", "r1", "m1")
    assert bytes(job.body) == sent
    assert job.submitted_at is not None and job.deadline == pytest.approx(job.submitted_at + 24 * 3600)


async def test_token_requests_go_straight_to_the_generate_queue() -> None:
    servers = Scripted()
    async with connected(servers, model="m2") as hr:
        await hr.generate(token_ids=[1, 2], sampling_params={"max_tokens": 3}, delivery="tokens")
        queue, job = await servers.queues.sent()
    assert queue == "generate.m2"
    assert isinstance(job, GenerateJob)
    assert job.delivery == "tokens"


async def test_the_model_argument_wins_over_the_body_and_the_body_over_the_setting() -> None:
    servers = Scripted()
    async with connected(servers, model="c") as hr:
        for body, model in (({"model": "b"}, "a"), ({"model": "b"}, None), ({}, None)):
            await hr.submit("/v1/completions", {"prompt": "x"} | body, model=model)
        assert [(await servers.job()).model for _ in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/inference/v1/generate", {"token_ids": [1, -2], "sampling_params": {}}, "token_ids.1"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
        ("/v1/chat/completions", {"messages": HELLO, "model": ""}, "model"),
        ("/v1/embeddings", {}, "url"),
    ],
)
async def test_a_malformed_request_is_refused_at_the_door_by_its_field(
    endpoint: str, body: dict[str, object], param: str
) -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        with pytest.raises((errors.BadRequest, errors.NotFound)) as refused:
            await hr.submit(endpoint, body)
    assert refused.value.param == param
    assert param.split(".", maxsplit=1)[0] in refused.value.message
    assert servers.queues.waiting == 0


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"messages": NaN}', b"\xff", Raw(b"1"), "null", "\ud800"])
async def test_a_body_that_is_no_json_object_is_refused(body: bytes | str | Raw) -> None:
    async with connected(Scripted()) as hr:
        with pytest.raises(errors.BadRequest, match="body"):
            await hr.submit("/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("request_id", "delivery", "param"),
    [
        ("", "stream", "request_id"),
        ("x" * 257, "stream", "request_id"),
        ("half \ud800", "stream", "request_id"),
        ("r", "by hand", "delivery"),
    ],
)
async def test_a_bad_term_is_refused_by_its_name(request_id: str, delivery: str, param: str) -> None:
    async with connected(Scripted()) as hr:
        with pytest.raises(errors.BadRequest) as refused:
            await hr.chat(messages=HELLO, request_id=request_id, delivery=delivery)  # type: ignore[arg-type]
    assert refused.value.param == param


async def test_a_request_over_the_bound_is_refused_with_the_bound() -> None:
    async with connected(Scripted(), max_request_bytes=1024) as hr:
        with pytest.raises(errors.TooLarge, match="1024"):
            await hr.completion(prompt="x" * 2000)


@pytest.mark.parametrize(
    ("refusal", "raised"),
    [
        (Unroutable("no queue"), errors.NotFound),
        (QueueFull("full", retry_after=7.0), errors.QueueFull),
        (MessageTooLarge("big"), errors.TooLarge),
        (BrokerUnavailable("away"), errors.Unavailable),
    ],
)
async def test_what_the_broker_refuses_is_said_in_the_words_of_the_protocol(
    refusal: Exception, raised: type[errors.HeadraceError]
) -> None:
    servers = Scripted()
    servers.queues.refuse.append(refusal)  # type: ignore[arg-type]
    async with connected(servers) as hr:
        with pytest.raises(raised) as caught:
            await hr.chat(model="nobody", messages=HELLO, request_id="r1")
        if raised is errors.NotFound:
            assert (caught.value.param, caught.value.status) == ("model", 404)
            assert "'nobody'" in caught.value.message
        if raised is errors.QueueFull:
            assert caught.value.retry_after == 7.0
        await hr.chat(messages=HELLO, request_id="r1")


async def test_a_request_id_that_is_under_way_is_refused_until_it_is_done() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        stream = await hr.chat(messages=HELLO, request_id="r1")
        with pytest.raises(errors.Conflict, match="r1"):
            await hr.chat(messages=HELLO, request_id="r1")
        job = await servers.job()
        servers.tell(job, final(job))
        await stream.result()
        await hr.chat(messages=HELLO, request_id="r1")


# ----------------------------------------------------------------------------------------------- streams


async def test_one_subscription_carries_many_streams_each_in_its_order() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        streams = [await hr.chat(messages=HELLO) for _ in range(3)]
        told = [await servers.job() for _ in streams]
        for seq in (1, 0, 2):
            for job in told:
                servers.tell(job, chunk(job, seq), chunk(job, seq))
        for job in told:
            servers.tell(job, final(job, chunks=3))
        for stream in streams:
            assert [piece.text async for piece in stream] == ["0 ", "1 ", "2 "]
            assert (await stream.result()).choices[0].message.content == "done"


async def test_packs_are_opened_across_requests() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        one, two = await hr.chat(messages=HELLO), await hr.chat(messages=HELLO)
        first, second = await servers.job(), await servers.job()
        servers.tell(
            first,
            chunk(first, 0),
            chunk(second, 0),
            final(first, chunks=1),
            final(second, chunks=1),
            pack=True,
        )
        assert [piece.seq async for piece in one] == [0]
        assert [piece.seq async for piece in two] == [0]


async def test_an_unreadable_event_harms_nobody() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        stream = await hr.chat(messages=HELLO)
        job = await servers.job()
        servers.topics.tell(f"{job.client}.chunk.{job.topic}", b"no event")
        servers.tell(job, final(job))
        await stream.result()


async def test_a_lost_chunk_is_replayed_through_the_control_queue() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        stream = await hr.chat(messages=HELLO)
        job = await servers.job()
        reading = asyncio.create_task(_texts(stream))
        servers.tell(job, chunk(job, 0), chunk(job, 2), final(job, chunks=3))
        queue, replay = await servers.queues.sent()
        assert queue == "control"
        assert isinstance(replay, Replay)
        assert (replay.request_id, replay.model, replay.seq, replay.topic) == (job.request_id, job.model, 1, job.topic)
        servers.tell(job, chunk(job, 1), chunk(job, 2))
        assert await reading == ["0 ", "1 ", "2 "]


async def test_chunks_that_never_come_end_in_stream_lost_but_the_response_stands() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        stream = await hr.chat(messages=HELLO)
        job = await servers.job()
        servers.tell(job, chunk(job, 1), final(job, chunks=2))
        with pytest.raises(errors.StreamLost):
            await _texts(stream)
        assert (await stream.result()).choices[0].message.content == "done"


async def test_a_lost_final_event_is_found_in_the_run_store() -> None:
    servers = Scripted()
    async with connected(servers, silence=0.01) as hr:
        servers.runs.away.append(BrokerUnavailable("away for a moment"))
        stream = await hr.chat(messages=HELLO)
        servers.keep(final(await servers.job()))
        assert (await stream.result()).choices[0].message.content == "done"
        assert not servers.runs.away


async def test_what_is_found_under_its_id_is_not_its_outcome_where_the_run_is_another_request() -> None:
    servers = Scripted()
    async with connected(servers, silence=0.01) as hr:
        stream = await hr.chat(messages=HELLO)
        job = await servers.job()
        servers.runs.digests[job.run] = "that of another body"
        servers.keep(final(job))
        with pytest.raises(errors.Conflict, match="request_id"):
            await stream.result()


async def test_a_slow_reader_holds_back_nobody_and_has_its_rest_replayed() -> None:
    servers = Scripted()
    async with connected(servers, stream_buffer=4) as hr:
        slow, other = await hr.chat(messages=HELLO), await hr.chat(messages=HELLO)
        job, next_job = await servers.job(), await servers.job()
        servers.tell(job, *(chunk(job, seq) for seq in range(10)), final(job, chunks=10))
        servers.tell(next_job, final(next_job))
        await other.result()
        reading = asyncio.create_task(_texts(slow))
        while not reading.done():
            _, replay = await servers.queues.sent()
            assert isinstance(replay, Replay)
            servers.tell(job, *(chunk(job, seq) for seq in range(replay.seq, 10)))
            await asyncio.wait([reading], timeout=0.01)
        assert await reading == [f"{seq} " for seq in range(10)]


async def test_cancelling_a_stream_asks_through_the_control_queue() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        stream = await hr.chat(messages=HELLO)
        job = await servers.job()
        await stream.cancel("no longer wanted")
        queue, cancel = await servers.queues.sent()
        assert queue == "control"
        assert isinstance(cancel, Cancel)
        assert (cancel.run, cancel.reason, cancel.topic) == (job.run, "no longer wanted", job.topic)
        servers.tell(job, error(job, "cancelled", 499, "CancelledError"))
        with pytest.raises(errors.Cancelled):
            await stream.result()


@pytest.mark.parametrize(
    ("request_id", "reason", "param"),
    [("", "no", "request_id"), ("\ud800", "no", "request_id"), ("r", "\ud800", "reason")],
)
async def test_a_cancellation_that_nobody_could_read_is_refused_by_its_field(
    request_id: str, reason: str, param: str
) -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        with pytest.raises(errors.BadRequest) as refused:
            await hr.cancel(request_id, reason=reason)
    assert refused.value.param == param
    assert servers.queues.waiting == 0


async def test_a_stream_that_the_user_dropped_is_forgotten() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        await hr.chat(messages=HELLO, request_id="r1")
        gc.collect()
        await hr.chat(messages=HELLO, request_id="r1")


async def test_when_the_subscription_ends_nobody_waits_on() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        stream = await hr.chat(messages=HELLO)
        servers.topics.end()
        with pytest.raises(Broken, match="subscription"):
            await stream.result()
        with pytest.raises(Broken):
            await hr.chat(messages=HELLO)


async def test_a_connection_given_up_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, asked = Scripted(), asyncio.Event()

    @asynccontextmanager
    async def never(*_: object, **__: object) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        asked.set()
        await asyncio.Event().wait()
        yield servers.topics._messages()

    async def connecting() -> None:
        async with connected(servers):
            raise AssertionError("there is no subscription")

    monkeypatch.setattr(servers.topics, "subscribe", never)
    task = asyncio.create_task(connecting())
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)  # the turn in which a task that was cancelled ends
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_user_leaves_the_context_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with connected(Scripted()):
            raise ZeroDivisionError


async def test_closing_ends_the_streams_that_are_still_open() -> None:
    async with connected(Scripted()) as hr:
        stream = await hr.chat(messages=HELLO)
    with pytest.raises(Broken, match="closed"):
        await stream.result()


async def test_an_outcome_is_found_by_request_id() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        await hr.chat(messages=HELLO, request_id="r1")
        assert await hr.result("r1") is None
        servers.keep(final(await servers.job()))
        assert isinstance(await hr.result("r1"), FinalEvent)


async def _texts(stream: headrace.client.stream.Stream) -> list[str]:  # type: ignore[type-arg]
    return [piece.text async for piece in stream]


# ----------------------------------------------------------------------------------------------- map


async def answer_each(servers: Scripted, answer: Callable[[Job], FinalEvent | None]) -> None:
    while True:
        job = await servers.job()
        event = answer(job)
        if event is not None:
            servers.tell(job, event)


@asynccontextmanager
async def answering(servers: Scripted, answer: Callable[[Job], FinalEvent | None] = final) -> AsyncIterator[None]:
    task = asyncio.create_task(answer_each(servers, answer))
    try:
        yield
    finally:
        task.cancel()


async def test_map_answers_each_request_once_with_one_final_event_each() -> None:
    servers = Scripted()
    async with connected(servers) as hr, answering(servers):
        done = [done async for done in hr.map(chat(key) for key in range(50))]
    assert sorted(one.request.key for one in done) == list(range(50))  # type: ignore[type-var]
    assert all(one.error is None and one.response().usage for one in done)


async def test_map_yields_in_the_order_of_completion() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        ends = hr.map([chat(0), chat(1)])
        first = asyncio.ensure_future(anext(ends))
        jobs = [await servers.job() for _ in range(2)]
        servers.tell(jobs[1], final(jobs[1]))
        assert (await first).request.key == 1
        servers.tell(jobs[0], final(jobs[0]))
        assert (await anext(ends)).request.key == 0
        await ends.aclose()


async def test_map_reads_no_further_than_there_is_room() -> None:
    read = 0

    def endless() -> AsyncIterator[Request]:
        async def each() -> AsyncIterator[Request]:
            nonlocal read
            while True:
                read += 1
                yield chat(read)

        return each()

    servers = Scripted()
    async with connected(servers) as hr, answering(servers):
        ends = hr.map(endless(), max_in_flight=4)
        for seen in range(1, 20):
            await anext(ends)
            assert read <= seen + 5
        await ends.aclose()


async def test_map_tells_each_failure_and_goes_on() -> None:
    servers = Scripted()
    async with connected(servers) as hr, answering(servers):
        done = [done async for done in hr.map([chat(0), chat(1, temperature=-1), Request("/v1/nothing", b"{}", key=2)])]
    by_key: dict[object, Done] = {one.request.key: one for one in done}
    assert by_key[0].final is not None
    assert isinstance(by_key[1].error, errors.BadRequest)
    assert isinstance(by_key[2].error, errors.NotFound)
    with pytest.raises(errors.BadRequest):
        by_key[1].response()


async def test_map_waits_where_the_queue_is_full_or_the_broker_away() -> None:
    servers = Scripted()
    servers.queues.refuse.extend([QueueFull("full"), BrokerUnavailable("away"), QueueFull("full"), None])
    async with connected(servers) as hr, answering(servers):
        done = [done async for done in hr.map([Request("/v1/completions", {"prompt": "x"}, request_id="r")])]
    assert [(one.request_id, one.error) for one in done] == [("r", None)]


async def test_map_gives_up_on_a_full_queue_at_the_deadline() -> None:
    servers = Scripted()
    servers.queues.refuse.extend([QueueFull("full")] * 100_000)
    async with connected(servers) as hr:
        asked = Request("/v1/completions", {"prompt": "x"}, deadline=0.02)
        done = [done async for done in hr.map([asked], attempts=1_000)]
    assert isinstance(done[0].error, errors.QueueFull)


async def test_map_tries_a_retryable_failure_again_under_a_new_id_up_to_its_bound() -> None:
    servers = Scripted()
    asked: list[str] = []

    def interrupted(job: Job) -> None:
        asked.append(job.request_id)
        servers.tell(job, error(job, "interrupted", 500, "InterruptedError", retryable=True))

    async with connected(servers) as hr, answering(servers, interrupted):
        done = [
            done async for done in hr.map([Request("/v1/completions", {"prompt": "x"}, request_id="r")], attempts=3)
        ]
    assert asked == ["r", "r.1", "r.2"]
    assert isinstance(done[0].error, errors.Interrupted)


async def test_map_does_not_try_again_what_cannot_do_better() -> None:
    servers = Scripted()
    asked: list[str] = []

    def refused(job: Job) -> None:
        asked.append(job.request_id)
        servers.tell(job, error(job, "bad_request", 400, "BadRequestError", param="messages"))

    async with connected(servers) as hr, answering(servers, refused):
        done = [done async for done in hr.map([chat()], attempts=3)]
    assert len(asked) == 1
    assert done[0].error is not None and done[0].error.param == "messages"


async def test_an_error_in_the_source_ends_the_map_with_that_error() -> None:
    def broken() -> AsyncIterator[Request]:
        async def each() -> AsyncIterator[Request]:
            yield chat(0)
            raise OSError("the disk is gone")

        return each()

    servers = Scripted()
    async with connected(servers) as hr, answering(servers):
        with pytest.raises(OSError, match="the disk is gone"):
            async for _ in hr.map(broken()):
                pass


async def test_when_the_client_breaks_the_map_stops_instead_of_failing_each_request() -> None:
    servers = Scripted()
    async with connected(servers) as hr:
        ends = hr.map([chat(0), chat(1)])
        first = asyncio.ensure_future(anext(ends))
        await servers.job()
        servers.topics.end()
        with pytest.raises(Broken):
            await first


@pytest.mark.parametrize("setting", [True, False])
async def test_a_client_is_told_by_the_way_that_it_chose(setting: bool) -> None:
    servers = Scripted()
    settings = Settings(via="redis") if setting else Settings()
    async with (
        asyncio.timeout(BOUND),
        Headrace.connect(settings, broker=servers.broker, via=None if setting else "redis") as hr,
    ):
        assert (servers.topics.pattern, bool(servers.streams.pattern)) == ("", True)
        stream = await hr.chat(messages=HELLO)
        job = await servers.job()
        assert job.via == "redis"
        reading = asyncio.create_task(anext(stream))
        servers.tell(job, chunk(job, 1))
        _, replay = await servers.queues.sent()
        assert isinstance(replay, Replay)
        assert (replay.via, replay.topic, replay.seq) == ("redis", job.topic, 0)
        servers.tell(job, chunk(job, 0), final(job, chunks=2))
        assert (await reading).seq == 0
        await stream.outcome()
        await stream.cancel()
        _, cancel = await servers.queues.sent()
        assert isinstance(cancel, Cancel)
        assert (cancel.via, cancel.topic) == ("redis", job.topic)
