"""The frames that we pack ourselves say to another AMQP library exactly what was meant."""

from typing import cast

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from headrace.broker.rabbitmq import frames

short = st.text(max_size=60)
headers = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.text(max_size=300) | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    max_size=5,
)


def read(data: bytes) -> list[tuple[int, object]]:
    """All frames of these bytes, with their channels, by pamqp."""
    found: list[tuple[int, object]] = []
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        found.append((channel, frame))
        data = data[size:]
    return found


@given(
    channel=st.integers(1, 65_535),
    exchange=short,
    key=short,
    body=st.binary(max_size=300),
    durable=st.booleans(),
    correlation_id=short,
    table=headers,
    frame_max=st.integers(9, 200),
)
def test_a_publish_reads_back_as_it_was_meant(
    channel: int,
    exchange: str,
    key: str,
    body: bytes,
    durable: bool,
    correlation_id: str,
    table: dict[str, str | int | float | bool],
    frame_max: int,
) -> None:
    data = frames.publish(
        channel,
        exchange,
        key,
        body,
        durable=durable,
        message_id="m-1",
        correlation_id=correlation_id,
        headers=table,
        frame_max=frame_max,
    )
    (on, method), (_, header), *pieces = read(data)
    assert on == channel
    assert isinstance(method, spec.Basic.Publish) and isinstance(header, ContentHeader)
    assert (method.exchange, method.routing_key, method.mandatory, method.immediate) == (exchange, key, durable, False)
    properties = header.properties
    assert properties.content_type == "application/json"
    assert properties.delivery_mode == (2 if durable else 1)
    assert properties.correlation_id == (correlation_id or None)
    assert properties.message_id == "m-1"
    assert properties.headers == (table or None)
    assert {name: type(value) for name, value in (properties.headers or {}).items()} == {
        name: type(value) for name, value in table.items()
    }
    assert header.body_size == len(body)
    assert b"".join(cast("ContentBody", piece).value for _, piece in pieces) == body
    assert all(len(cast("ContentBody", piece).value) + 8 <= frame_max for _, piece in pieces)


@given(st.integers(1, 65_535), st.integers(1, 2**63 - 1), st.booleans())
def test_settlements_read_back_as_they_were_meant(channel: int, tag: int, multiple: bool) -> None:
    ((on, ack),) = read(frames.ack(channel, tag, multiple=multiple))
    assert isinstance(ack, spec.Basic.Ack)
    assert (on, ack.delivery_tag, ack.multiple) == (channel, tag, multiple)
    ((on, nack),) = read(frames.requeue(channel, tag))
    assert isinstance(nack, spec.Basic.Nack)
    assert (on, nack.delivery_tag, nack.multiple, nack.requeue) == (channel, tag, False, True)


def test_a_unix_time_survives_as_a_header() -> None:
    data = frames.publish(
        1, "", "q", b"", durable=True, message_id="m", correlation_id="", headers={"at": 1764529983.625}, frame_max=4096
    )
    header = read(data)[1][1]
    assert isinstance(header, ContentHeader)
    assert header.properties.headers == {"at": 1764529983.625}


def test_a_key_over_255_bytes_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match="256 bytes are over AMQP's limit of 255"):
        frames.publish(
            1, "", "é" * 128, b"", durable=True, message_id="m", correlation_id="", headers=None, frame_max=4096
        )


@given(
    st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=3_000), max_size=8),
    st.sampled_from((4096, 8192)),
)
def test_headers_stay_within_the_frame_and_those_that_stand_first_are_kept(table: dict[str, str], most: int) -> None:
    first = {"x-headrace-reason": "why"}
    data = frames.publish(
        1,
        "",
        "k" * 255,
        b"",
        durable=True,
        message_id="m" * 50,
        correlation_id="c" * 255,
        headers=first | table,
        frame_max=most,
        user_id="u" * 255,
        expiration_ms=2**32 - 1,
    )
    (_, method), (_, header) = read(data)
    assert isinstance(method, spec.Basic.Publish) and isinstance(header, ContentHeader)
    kept = dict(header.properties.headers or {})
    assert kept.items() >= first.items()
    assert kept.items() <= (first | table).items()
    assert len(header.marshal()) + 8 <= most
    if sum(len(name.encode()) + len(text.encode()) + 6 for name, text in table.items()) < most - 1_100:
        assert kept == first | table
