"""The AMQP 0-9-1 frames of the hot path, packed by hand; everything rare goes through pamqp.

pamqp builds objects first, at four times the price, and writes a float header as a single: a Unix time would be off by
a minute. Frame: type, channel, size, payload, end mark. All integers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.broker.ports import HeaderValue

SHORT_MAX: Final = 255
"""Bytes of a short string: a queue name, a routing key, a correlation id."""
FRAME_OVERHEAD: Final = 8
_FRAME_MIN: Final = 4096
"""What every peer takes."""
_PROPERTIES: Final = 1024
"""More than all properties but the headers take, in the one frame that they share."""

_FRAME = struct.Struct(">BHI")
_END: Final = b"\xce"
_METHOD, _HEADER, _BODY = 1, 2, 3

_PUBLISH: Final = struct.pack(">HHH", 60, 40, 0)
_CONTENT = struct.Struct(">HHQH")
_SETTLE = struct.Struct(">BHIHHQBB")
_BASIC, _ACK, _NACK = 60, 80, 120
_MULTIPLE, _REQUEUE = 1, 2

_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE, _CORRELATION_ID = 0x8000, 0x2000, 0x1000, 0x0400
_EXPIRATION, _MESSAGE_ID, _USER_ID = 0x0100, 0x0080, 0x0010
_JSON: Final = b"\x10application/json"
_PERSISTENT, _TRANSIENT = b"\x02", b"\x01"


def publish(
    channel: int,
    exchange: str,
    key: str,
    body: bytes,
    *,
    durable: bool,
    message_id: str,
    correlation_id: str,
    headers: Mapping[str, HeaderValue] | None,
    frame_max: int,
    user_id: str = "",
    expiration_ms: int | None = None,
) -> bytes:
    """basic.publish with its content: persistent and mandatory if ``durable``, the type application/json.

    The broker refuses a ``user_id`` that is not the connection's own, so whoever reads it can rely on it. Headers that
    do not fit into the frame beside those before them are left out: the broker would close the connection.
    """
    method = b"".join((_PUBLISH, _short(exchange), _short(key), b"\x01" if durable else b"\x00"))
    flags = _CONTENT_TYPE | _DELIVERY_MODE | _MESSAGE_ID
    fields = [_JSON]
    if headers:
        flags |= _HEADERS
        fields.append(_table(headers, max(frame_max, _FRAME_MIN) - _PROPERTIES))
    fields.append(_PERSISTENT if durable else _TRANSIENT)
    if correlation_id:
        flags |= _CORRELATION_ID
        fields.append(_short(correlation_id))
    if expiration_ms is not None:
        flags |= _EXPIRATION
        fields.append(_short(str(expiration_ms)))
    fields.append(_short(message_id))
    if user_id:
        flags |= _USER_ID
        fields.append(_short(user_id))
    header = _CONTENT.pack(_BASIC, 0, len(body), flags) + b"".join(fields)
    pieces = (_frame(_BODY, channel, piece) for piece in _cut(body, frame_max - FRAME_OVERHEAD))
    return b"".join((_frame(_METHOD, channel, method), _frame(_HEADER, channel, header), *pieces))


def ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    return _SETTLE.pack(_METHOD, channel, 13, _BASIC, _ACK, tag, _MULTIPLE if multiple else 0, _END[0])


def requeue(channel: int, tag: int) -> bytes:
    """basic.nack that gives the message back to its queue."""
    return _SETTLE.pack(_METHOD, channel, 13, _BASIC, _NACK, tag, _REQUEUE, _END[0])


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"".join((_FRAME.pack(kind, channel, len(payload)), payload, _END))


def _cut(body: bytes, size: int) -> Iterator[bytes]:
    if len(body) <= size:
        return iter((body,) if body else ())
    return (body[start : start + size] for start in range(0, len(body), size))


def _short(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > SHORT_MAX:
        raise ValueError(f"{text[:40]!r}...: {len(raw)} bytes are over AMQP's limit of {SHORT_MAX}")
    return bytes((len(raw),)) + raw


def _table(headers: Mapping[str, HeaderValue], room: int) -> bytes:
    entries: list[bytes] = []
    for name, value in headers.items():
        entry = _short(name) + _value(value)
        if len(entry) <= room:
            room -= len(entry)
            entries.append(entry)
    packed = b"".join(entries)
    return struct.pack(">I", len(packed)) + packed


def _value(value: HeaderValue) -> bytes:
    if isinstance(value, str):
        raw = value.encode()
        return struct.pack(">cI", b"S", len(raw)) + raw
    if isinstance(value, bool):
        return struct.pack(">c?", b"t", value)
    if isinstance(value, int):
        return struct.pack(">cq", b"l", value)
    return struct.pack(">cd", b"d", value)
