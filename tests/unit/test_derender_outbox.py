"""What leaves a derender worker: events as JSON, packed for those who hear them."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, DerenderJob
from headrace.workers.derender.outbox import PACK_BYTES, Outbox
from headrace.workers.derender.telling import ChunkEvents

ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
chunks = st.dictionaries(st.text(max_size=10), st.integers(), max_size=3).map(lambda value: json.dumps(value).encode())


def job(request_id: str = "r", topic: str | None = "here") -> DerenderJob:
    return DerenderJob(client="tester", request_id=request_id, model="demo", topic=topic)


@given(request_id=ids, seq=st.integers(0, 2**53), chunk=chunks)
def test_a_chunk_event_is_the_json_of_its_envelope(request_id: str, seq: int, chunk: bytes) -> None:
    said = ChunkEvents(job(request_id)).form % (seq, chunk)
    assert said == jobs.encode(ChunkEvent(client="tester", request_id=request_id, seq=seq, chunk=Raw(chunk)))


@given(bodies=st.lists(chunks, min_size=1, max_size=20), request_id=ids)
def test_a_pack_is_read_as_the_events_that_went_in(bodies: list[bytes], request_id: str) -> None:
    events = ChunkEvents(job(request_id))
    said = [events.form % (seq, body) for seq, body in enumerate(bodies)]
    heard = jobs.decode_events(jobs.pack(said))
    assert [msgspec.json.encode(event) for event in heard] == said


@given(sizes=st.lists(st.integers(1, PACK_BYTES), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_events_leave_in_order_in_packs_of_bounded_size(sizes: list[int], cut: int) -> None:
    outbox, events = Outbox(), ChunkEvents(job())
    said = [events.form % (seq, b'"%b"' % (b"x" * size)) for seq, size in enumerate(sizes)]
    outbox.add(job("a"), "chunk", said[:cut], job("a"))
    outbox.add(job("b"), "chunk", said[cut:], job("b"))
    messages = outbox.take()["amqp"]
    told = [event for message in messages for event in jobs.decode_events(message.body)]
    assert [event.seq for event in told if isinstance(event, ChunkEvent)] == list(range(len(sizes)))
    longest = max(map(len, said))
    assert all(len(message.body) <= PACK_BYTES + longest + 100 + len(said) for message in messages)
    assert outbox.take() == {}


def test_a_client_without_a_topic_gets_packs_of_one_request_with_its_id() -> None:
    outbox = Outbox()
    for request_id in ("a", "b"):
        asked = job(request_id, topic=None)
        outbox.add(asked, "chunk", [ChunkEvents(asked).form % (seq, b"{}") for seq in range(2)], asked)
    assert [(message.key, message.request_id) for message in outbox.take()["amqp"]] == [
        ("tester.chunk", "a"),
        ("tester.chunk", "b"),
    ]


def test_a_topic_gets_one_message_for_all_its_requests() -> None:
    outbox = Outbox()
    for request_id in ("a", "b"):
        outbox.add(job(request_id), "chunk", [ChunkEvents(job(request_id)).form % (0, b"{}")], job(request_id))
    (message,) = outbox.take()["amqp"]
    assert [event.request_id for event in jobs.decode_events(message.body)] == ["a", "b"]


def test_nothing_added_is_nothing_sent() -> None:
    outbox = Outbox()
    outbox.add(job(), "chunk", [], job())
    assert outbox.take() == {}


def test_each_way_gets_its_own_messages() -> None:
    outbox = Outbox()
    for number, via in enumerate(("amqp", "redis", "amqp", "redis")):
        asked = msgspec.structs.replace(job(f"r{number}"), via=via)
        outbox.add(asked, "chunk", [ChunkEvents(asked).form % (0, b"{}")], asked)
    told = {
        via: [event.request_id for message in messages for event in jobs.decode_events(message.body)]
        for via, messages in outbox.take().items()
    }
    assert told == {"amqp": ["r0", "r2"], "redis": ["r1", "r3"]}
