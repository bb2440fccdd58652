"""Envelopes: what is sent arrives as sent, and a bad one is refused by the name of its field."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from headrace.protocol import jobs
from headrace.protocol.jobs import (
    Cancel,
    ChunkEvent,
    DerenderJob,
    EnvelopeError,
    ErrorEvent,
    FinalEvent,
    GenerateJob,
    ProgressEvent,
    RenderJob,
    Replay,
)

BODY = Raw(b'{"model":"m", "messages":[{"role":"user","content":"\xe4\xbd\xa0"}], "unknown": 1}')
WHO = {"client": "c", "request_id": "r", "model": "m"}
ENVELOPES = [
    RenderJob(**WHO, endpoint="/v1/chat/completions", body=BODY),
    GenerateJob(**WHO, request=Raw(b'{"token_ids":[1],"sampling_params":{}}'), source=BODY),
    DerenderJob(**WHO, delivery="final", submitted_at=1.5, deadline=2.5, replay_ttl=60, topic="t"),
    Cancel(client="c", request_id="r", reason="enough"),
    Replay(**WHO, seq=4, topic="t", via="redis"),
]
EVENTS = [
    ChunkEvent(client="c", request_id="r", seq=0, chunk=BODY),
    FinalEvent(client="c", request_id="r", event_id="e", response=BODY, chunks=3),
    ErrorEvent(client="c", request_id="r", event_id="e", code="cancelled", status=499, error=Raw(b"{}")),
    ProgressEvent(client="c", request_id="r", tokens=7),
]


def plain(envelope: msgspec.Struct) -> dict[str, object]:
    return {
        name: bytes(v) if isinstance(v := getattr(envelope, name), Raw) else v for name in envelope.__struct_fields__
    }


@pytest.mark.parametrize("envelope", ENVELOPES, ids=lambda e: type(e).__name__)
def test_an_envelope_arrives_as_it_was_sent(envelope: msgspec.Struct) -> None:
    arrived = jobs.decode(jobs.encode(envelope))
    assert type(arrived) is type(envelope)
    assert plain(arrived) == plain(envelope)


def test_the_clients_json_travels_byte_for_byte() -> None:
    arrived = jobs.decode(jobs.encode(ENVELOPES[0]))
    assert isinstance(arrived, RenderJob)
    assert bytes(arrived.body) == bytes(BODY)


def test_a_producer_by_hand_may_leave_out_what_has_a_default() -> None:
    sent = {"type": "render", **WHO, "endpoint": "/v1/completions", "body": {"prompt": "x"}}
    job = jobs.decode(json.dumps(sent).encode())
    assert isinstance(job, RenderJob)
    job = jobs.stamp(job, now=100.0)
    assert (job.v, job.delivery, job.submitted_at, job.deadline) == (1, "stream", 100.0, 100.0 + 24 * 3600)
    assert job.created == 100


def test_stamping_keeps_what_the_producer_said() -> None:
    job = RenderJob(**WHO, endpoint="/v1/completions", body=BODY, submitted_at=5.0, deadline=6.0)
    assert jobs.stamp(job, now=100.0) == job


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"client": "a.b"}, "client"),
        ({"client": "a*"}, "client"),
        ({"client": ""}, "client"),
        ({"client": "x" * 65}, "client"),
        ({"client": "c\n"}, "client"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"model": ""}, "model"),
        ({"model": "x" * 201}, "model"),
        ({"delivery": "fast"}, "delivery"),
        ({"deadline": -1}, "deadline"),
        ({"submitted_at": "now"}, "submitted_at"),
        ({"replay_ttl": 0.9}, "replay_ttl"),
        ({"replay_ttl": 7 * 24 * 3600 + 0.1}, "replay_ttl"),
        ({"topic": "a.b"}, "topic"),
        ({"endpoint": "/v2"}, "endpoint"),
        ({"v": 0}, "v"),
        ({"type": "sing"}, "type"),
    ],
)
def test_a_bad_envelope_is_refused_by_the_name_of_its_field(change: dict[str, object], says: str) -> None:
    sent = {"type": "render", **WHO, "endpoint": "/v1/completions", "body": {}} | change
    with pytest.raises(EnvelopeError, match=rf"^{says}: "):
        jobs.decode(json.dumps(sent).encode())


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("cancel", {"reason": "x" * 201}, "reason"),
        ("cancel", {"model": ""}, "model"),
        ("replay", {"model": "m", "seq": -1}, "seq"),
        ("replay", {"model": "m", "topic": ""}, "topic"),
        ("generate", {"model": "m"}, "Object missing required field `request`"),
    ],
)
def test_a_bad_control_is_refused_by_the_name_of_its_field(kind: str, change: dict[str, object], says: str) -> None:
    sent = {"type": kind, "client": "c", "request_id": "r"} | change
    with pytest.raises(EnvelopeError, match=rf"^{says}"):
        jobs.decode(json.dumps(sent).encode())


def test_a_chunk_before_the_first_is_refused() -> None:
    sent = {"type": "chunk", "client": "c", "request_id": "r", "seq": -1, "chunk": {}}
    with pytest.raises(EnvelopeError, match=r"^seq: "):
        jobs.decode_events(json.dumps(sent).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"client": "x" * 64},
        {"request_id": "x" * 256},
        {"model": "x" * 200},
        {"replay_ttl": 1},
        {"replay_ttl": 7 * 24 * 3600},
        {"submitted_at": 0, "deadline": 0},
    ],
)
def test_the_edge_of_a_bound_is_inside(change: dict[str, object]) -> None:
    sent = {"type": "render", **WHO, "endpoint": "/v1/completions", "body": {}} | change
    assert plain(jobs.decode(json.dumps(sent).encode())).items() >= change.items()


@pytest.mark.parametrize("missing", ["client", "request_id", "model", "endpoint", "body", "type"])
def test_a_missing_field_is_named(missing: str) -> None:
    sent = {"type": "render", **WHO, "endpoint": "/v1/completions", "body": {}}
    del sent[missing]
    with pytest.raises(EnvelopeError, match=missing):
        jobs.decode(json.dumps(sent).encode())


@pytest.mark.parametrize("body", [b"", b"x", b"[]", b"1", b"\xff\xfe", b'{"type":"render"', b"[" * 100_000])
def test_garbage_is_an_envelope_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(EnvelopeError):
        jobs.decode(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(EnvelopeError):
        jobs.decode(body)
    jobs.sender(body)


def test_a_newer_version_is_told_from_a_bad_envelope() -> None:
    body = jobs.encode(RenderJob(**WHO, endpoint="/v1/completions", body=BODY, v=2))
    with pytest.raises(EnvelopeError) as caught:
        jobs.decode(body)
    assert caught.value.newer


@pytest.mark.parametrize(
    "change", [{"type": "embed"}, {"via": "mqtt"}, {"deadline": {"soft": 5}}, {"body": None, "parts": []}, {"v": 2**70}]
)
def test_what_only_a_newer_version_knows_is_told_from_a_bad_envelope(change: dict[str, object]) -> None:
    sent = {"type": "render", **WHO, "endpoint": "/v1/completions", "body": {}, "v": 2} | change
    with pytest.raises(EnvelopeError) as caught:
        jobs.decode(json.dumps(sent).encode())
    assert caught.value.newer


def test_unknown_fields_do_no_harm() -> None:
    sent = {"type": "render", **WHO, "endpoint": "/v1/completions", "body": {}, "future": [1]}
    assert isinstance(jobs.decode(json.dumps(sent).encode()), RenderJob)


def test_a_broken_envelope_still_says_whose_it_is() -> None:
    sender = jobs.sender(b'{"type":"render","client":"c","request_id":"r","topic":"t","via":"redis","body":{}}')
    assert sender is not None
    assert (sender.client, sender.request_id, sender.topic, sender.via) == ("c", "r", "t", "redis")
    assert jobs.sender(b'{"client":"a.b","request_id":"r"}') is None


@pytest.mark.parametrize("topic", ["a.b", "", "#", "t\n", 5, None, ["t"]])
def test_a_topic_that_cannot_be_one_does_not_hide_whose_an_envelope_is(topic: object) -> None:
    sender = jobs.sender(json.dumps({"type": "cancel", **WHO, "topic": topic}).encode())
    assert sender is not None
    assert (sender.client, sender.request_id, sender.topic) == (WHO["client"], WHO["request_id"], None)
    assert sender.about == "cancel"


@pytest.mark.parametrize("via", ["", "mqtt", "REDIS", 5, None, ["redis"]])
def test_a_way_that_there_is_not_is_refused_and_its_sender_told_by_the_usual_one(via: object) -> None:
    body = json.dumps({"type": "cancel", **WHO, "via": via}).encode()
    with pytest.raises(EnvelopeError, match=r"^via: "):
        jobs.decode(body)
    sender = jobs.sender(body)
    assert sender is not None
    assert sender.via == "amqp"


@pytest.mark.parametrize(
    ("kind", "about"),
    [("cancel", "cancel"), ("replay", "replay"), ("generate", None), (5, None), (["cancel"], None)],
)
def test_a_broken_envelope_says_whether_it_only_speaks_of_a_request(kind: object, about: str | None) -> None:
    sender = jobs.sender(json.dumps({"type": kind, **WHO, "seq": -1}).encode())
    assert sender is not None
    assert sender.about == about


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_pack_gives_its_events_in_order(count: int) -> None:
    body = jobs.pack([jobs.encode(event) for event in EVENTS[:count]])
    assert [plain(event) for event in jobs.decode_events(body)] == [plain(event) for event in EVENTS[:count]]


@pytest.mark.parametrize("event", EVENTS[1:3], ids=lambda e: type(e).__name__)
def test_a_stored_outcome_is_read_as_it_was_written(event: msgspec.Struct) -> None:
    assert plain(jobs.decode_terminal(jobs.encode(event))) == plain(event)


def test_runs_of_two_clients_never_meet() -> None:
    assert jobs.run_of("a", "b") != jobs.run_of("b", "a")
    assert jobs.run_of("a", "x\0b") != jobs.run_of("ab", "x")
    assert RenderJob(**WHO, endpoint="/v1/completions", body=BODY).run == jobs.run_of("c", "r")


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_partition_is_one_of_64(client: str, request_id: str) -> None:
    assert 0 <= jobs.partition_of(jobs.run_of(client, request_id)) < jobs.PARTITIONS


def test_the_digest_tells_bodies_apart_and_ignores_when_they_were_sent() -> None:
    job = RenderJob(**WHO, endpoint="/v1/completions", body=Raw(b'{"prompt":"a"}'))
    later = msgspec.structs.replace(job, submitted_at=9.0, topic="t")
    other = msgspec.structs.replace(job, body=Raw(b'{"prompt":"b"}'))
    assert jobs.digest_of(job) == jobs.digest_of(later)
    assert jobs.digest_of(job) != jobs.digest_of(other)


@pytest.mark.parametrize(("topic", "key"), [(None, "c.chunk"), ("t", "c.chunk.t")])
def test_routing_keys_are_client_kind_topic(topic: str | None, key: str) -> None:
    assert jobs.routing_key("c", "chunk", topic) == key
