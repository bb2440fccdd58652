"""A stream at the client: each chunk once, in order, without a gap, whatever is lost, doubled or late."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from headrace.client.door import Response
from headrace.client.stream import LAST_CALL_S, LONGEST_SILENCE, PATIENCE_S, REPLAYS, Chunk, Need, Stream
from headrace.protocol import errors
from headrace.protocol.chat import ChatCompletionResponse, ChatCompletionStreamResponse
from headrace.protocol.generate import GenerateTokensStreamResponse
from headrace.protocol.jobs import ChunkEvent, Delivery, Event, GenerateJob, ProgressEvent, RenderJob
from tests.unit.scripted import chunk, error, final

SILENCE = 5.0
DEADLINE = 1_000_000.0


class Nowhere:
    async def cancel(self, request_id: str, *, reason: str, model: str | None) -> None:
        raise AssertionError("nobody cancels here")


def chat_job(delivery: Delivery = "stream") -> RenderJob:
    return RenderJob(
        client="local",
        request_id="r1",
        model="demo",
        endpoint="/v1/chat/completions",
        body=Raw(b"{}"),
        delivery=delivery,
        deadline=DEADLINE,
        topic="t",
    )


def stream_of(job: RenderJob | GenerateJob, *, limit: int = 64) -> Stream[Response]:
    return Stream(job, Nowhere(), limit=limit, silence=SILENCE, now=0.0)


async def seqs(stream: Stream[Response]) -> list[int]:
    return [piece.seq async for piece in stream]


async def turn() -> None:
    """Lets every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def read_with_servers(
    stream: Stream[Response], arrival: list[Event], chunks: list[ChunkEvent], random: Random
) -> list[int]:
    """Reads to the end, with servers that answer each need: a replay may lose all but the chunk that is next."""
    reading = asyncio.create_task(seqs(stream))
    now = 0.0
    for event in arrival:
        stream.accept(event, now)
        if random.random() < 0.5:
            await turn()
    for _ in range(10_000):
        await turn()
        if reading.done():
            return reading.result()
        now += 0.1
        match stream.needs(now, 0.0):
            case Need.REPLAY:
                first = stream.next_seq
                for event in chunks[first:]:
                    if event.seq == first or random.random() < 0.5:
                        stream.accept(event, now)
            case Need.RESULT:
                stream.accept(final(stream.job, chunks=len(chunks)), now)
    raise AssertionError("the stream never ended")


@given(
    count=st.integers(0, 24),
    limit=st.integers(1, 32),
    lost=st.sets(st.integers(0, 24)),
    doubled=st.sets(st.integers(0, 24)),
    random=st.randoms(use_true_random=False),
)
def test_every_chunk_comes_once_and_in_order_whatever_is_lost_doubled_or_late(
    count: int, limit: int, lost: set[int], doubled: set[int], random: Random
) -> None:
    job = chat_job()
    chunks = [chunk(job, seq) for seq in range(count)]
    told: list[Event] = [*chunks, final(job, chunks=count)]
    arrival = [event for at, event in enumerate(told) if at not in lost]
    arrival += [event for at, event in enumerate(told) if at in doubled]
    random.shuffle(arrival)
    got = asyncio.run(read_with_servers(stream_of(job, limit=limit), arrival, chunks, random))
    assert got == list(range(count))


async def test_the_chunks_before_an_error_come_first() -> None:
    job = chat_job()
    stream = stream_of(job)
    stream.accept(chunk(job, 0), 0.0)
    stream.accept(error(job, "cancelled", 499, "CancelledError", chunks=1), 0.0)
    assert (await anext(stream)).seq == 0
    with pytest.raises(errors.Cancelled):
        await anext(stream)


@pytest.mark.parametrize(
    ("kind", "status", "raised"),
    [
        ("BadRequestError", 400, errors.BadRequest),
        ("NotFoundError", 404, errors.NotFound),
        ("ConflictError", 409, errors.Conflict),
        ("CancelledError", 499, errors.Cancelled),
        ("DeadlineExceededError", 504, errors.DeadlineExceeded),
        ("InterruptedError", 500, errors.Interrupted),
        ("StreamLostError", 500, errors.StreamLost),
        ("ExhaustedError", 500, errors.Exhausted),
    ],
)
async def test_an_error_event_becomes_the_exception_that_fits_with_its_body(
    kind: str, status: int, raised: type[errors.HeadraceError]
) -> None:
    job = chat_job()
    stream = stream_of(job)
    stream.accept(error(job, "internal", status, kind, message="So it is.", param="messages.0"), 0.0)
    with pytest.raises(raised, match="So it is") as caught:
        await stream.result()
    assert caught.value.error.error.model_dump() == {
        "message": "So it is.",
        "type": kind,
        "param": "messages.0",
        "code": status,
    }


async def test_the_response_needs_no_iteration() -> None:
    job = chat_job()
    stream = stream_of(job)
    waiting = asyncio.create_task(stream.result())
    await turn()
    stream.accept(final(job, chunks=3, text="hello"), 0.0)
    response = await waiting
    assert isinstance(response, ChatCompletionResponse)
    assert response.choices[0].message.content == "hello"


async def test_a_second_terminal_event_changes_nothing() -> None:
    job = chat_job()
    stream = stream_of(job)
    stream.accept(final(job, text="first"), 0.0)
    stream.accept(final(job, text="second"), 0.0)
    assert b"first" in bytes((await stream.outcome()).response)


async def test_with_delivery_final_no_chunks_are_waited_for() -> None:
    job = chat_job("final")
    stream = stream_of(job)
    stream.accept(final(job, chunks=9), 0.0)
    assert stream.settled
    assert await seqs(stream) == []


async def a_reader(stream: Stream[Response]) -> asyncio.Task[Chunk]:
    """A task that waits for the next chunk."""

    async def read() -> Chunk:
        return await anext(stream)

    reading = asyncio.create_task(read())
    await turn()
    return reading


async def test_a_gap_is_asked_for_after_a_little_patience() -> None:
    job = chat_job()
    stream = stream_of(job)
    reading = await a_reader(stream)
    stream.accept(chunk(job, 1), 0.0)
    await turn()
    assert stream.needs(0.0, 0.0) is None
    assert stream.needs(PATIENCE_S * 0.9, 0.0) is None
    assert stream.needs(PATIENCE_S, 0.0) is Need.REPLAY
    assert stream.next_seq == 0
    stream.accept(chunk(job, 0), 1.0)
    assert (await reading).seq == 0


async def test_a_gap_that_stays_ends_in_stream_lost_after_bounded_tries() -> None:
    job = chat_job()
    stream = stream_of(job)
    reading = await a_reader(stream)
    stream.accept(chunk(job, 1), 0.0)
    await turn()
    needs = [stream.needs(at * PATIENCE_S, 0.0) for at in range(200)]
    assert needs.count(Need.REPLAY) == REPLAYS
    with pytest.raises(errors.StreamLost, match=f"Chunk 0 .* {REPLAYS} times"):
        await reading


async def test_chunks_beyond_the_bound_are_dropped_and_asked_for_once_the_reader_is_there() -> None:
    job = chat_job()
    stream = stream_of(job, limit=2)
    for seq in range(5):
        stream.accept(chunk(job, seq), 0.0)
    assert stream.needs(100.0, 0.0) is not Need.REPLAY
    assert [(await anext(stream)).seq for _ in range(2)] == [0, 1]
    reading = await a_reader(stream)
    stream.needs(100.0, 0.0)
    assert stream.needs(101.0, 0.0) is Need.REPLAY
    assert stream.next_seq == 2
    stream.accept(chunk(job, 2), 101.0)
    assert (await reading).seq == 2


async def test_after_silence_the_result_is_looked_up_less_and_less_often() -> None:
    stream = stream_of(chat_job())
    looked_up = [at / 10 for at in range(1, 2_000) if stream.needs(at / 10, 0.0) is Need.RESULT]
    pauses = [after - before for before, after in zip([0.0, *looked_up], looked_up, strict=False)]
    assert pauses[0] == pytest.approx(SILENCE)
    assert max(pauses) == pytest.approx(SILENCE * LONGEST_SILENCE)
    stream.accept(ProgressEvent(client="local", request_id="r1"), 200.0)
    assert stream.needs(200.0 + SILENCE * 0.9, 0.0) is None
    assert stream.needs(200.0 + SILENCE, 0.0) is Need.RESULT


async def test_a_request_of_which_nothing_is_heard_ends_after_its_deadline() -> None:
    stream = stream_of(chat_job())
    assert stream.needs(0.0, DEADLINE + LAST_CALL_S - 1) is None
    stream.needs(0.0, DEADLINE + LAST_CALL_S + 1)
    with pytest.raises(errors.DeadlineExceeded):
        await stream.result()


def test_a_chunk_tells_text_reasoning_and_tool_calls() -> None:
    delta = (
        b'{"reasoning":"hm","content":"hi","tool_calls":'
        b'[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{"}}]}'
    )
    raw = (
        b'{"id":"x","object":"chat.completion.chunk","created":1,"model":"demo",'
        b'"choices":[{"index":1,"delta":' + delta + b',"finish_reason":"stop"}]}'
    )
    piece = Chunk(ChunkEvent(client="c", request_id="r", seq=4, chunk=Raw(raw)), chat_job())
    assert (piece.seq, piece.index, piece.text, piece.reasoning, piece.finish_reason) == (4, 1, "hi", "hm", "stop")
    call = piece.tool_calls[0]
    assert call.id == "c1"
    assert call.function is not None and (call.function.name, call.function.arguments) == ("f", "{")
    assert isinstance(piece.chunk, ChatCompletionStreamResponse)
    assert piece.chunk.choices[0].delta.content == "hi"


def test_a_chunk_of_usage_alone_adds_nothing() -> None:
    raw = b'{"id":"x","object":"chat.completion.chunk","created":1,"model":"demo","choices":[]}'
    piece = Chunk(ChunkEvent(client="c", request_id="r", seq=0, chunk=Raw(raw)), chat_job())
    assert (piece.index, piece.text, piece.reasoning, piece.tool_calls, piece.token_ids) == (0, "", "", [], [])


def test_delivery_tokens_gives_token_chunks_whatever_the_endpoint() -> None:
    raw = b'{"request_id":"r","output_mode":"tokens","choices":[{"index":0,"token_ids":[5,6]}]}'
    piece = Chunk(ChunkEvent(client="c", request_id="r", seq=0, chunk=Raw(raw)), chat_job("tokens"))
    assert piece.token_ids == [5, 6]
    assert isinstance(piece.chunk, GenerateTokensStreamResponse)
