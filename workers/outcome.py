"""How a run ends: what the log's ``end`` says, the one outcome, and telling it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
from msgspec import Raw, Struct

from headrace.broker.ports import Broker, MessageTooLarge, TopicMessage
from headrace.protocol import errors, jobs
from headrace.protocol.jobs import (
    About,
    Cancel,
    ChunkEvent,
    ErrorCode,
    ErrorEvent,
    FinalEvent,
    Identity,
    Job,
    PartEvent,
    Replay,
    Sender,
    Terminal,
    Via,
)
from headrace.protocol.wire import Usage
from headrace.workers.probe import probe

_CODES: Final[dict[type[errors.HeadraceError], ErrorCode]] = {
    errors.BadRequest: "bad_request",
    errors.NotFound: "not_found",
    errors.Conflict: "conflict",
    errors.TooLarge: "too_large",
    errors.Cancelled: "cancelled",
    errors.DeadlineExceeded: "expired",
    errors.Interrupted: "interrupted",
    errors.StreamLost: "stream_lost",
    errors.QueueFull: "queue_full",
    errors.Exhausted: "exhausted",
}


_MOST: Final = 10**6
_LEAST_TEXT: Final = 16
"""Bytes of text in a part, however small the limit: the longest character as JSON fits."""


class Recipient(Protocol):
    """Where a client hears of a request: what its job says, or its replay, or a cancellation."""

    @property
    def topic(self) -> str | None: ...

    @property
    def via(self) -> Via: ...


class Failure(Struct, frozen=True, omit_defaults=True):
    """Why a run has no answer, as it travels from the worker that knows to the one that tells."""

    code: ErrorCode
    status: int
    error: Raw
    retryable: bool = False
    retry_after: float | None = None

    @classmethod
    def of(cls, error: errors.HeadraceError) -> Failure:
        body = Raw(error.error.error.model_dump_json().encode())
        code = _CODES.get(type(error), "internal")
        return cls(code, error.status, body, error.retryable, error.retry_after)


class End(Struct, frozen=True, omit_defaults=True):
    """Payload of a log's ``end``: the usage of the whole run, and further fields of its response; or the failure."""

    usage: Usage | None = None
    failure: Failure | None = None
    extra: dict[str, Raw] = {}


def failed(request: Identity, error: errors.HeadraceError | Failure, *, chunks: int = 0) -> ErrorEvent:
    """The outcome of a request that has no answer; ``chunks`` is how many seqs its stream has."""
    failure = Failure.of(error) if isinstance(error, errors.HeadraceError) else error
    return ErrorEvent(
        client=request.client,
        request_id=request.request_id,
        event_id=request.event_id,
        code=failure.code,
        status=failure.status,
        error=failure.error,
        retryable=failure.retryable,
        retry_after=failure.retry_after,
        chunks=chunks,
        finished_at=time.time(),
    )


def answered(request: Identity, response: bytes, *, chunks: int) -> FinalEvent:
    """The outcome of a request that has an answer."""
    return FinalEvent(
        client=request.client,
        request_id=request.request_id,
        event_id=request.event_id,
        response=Raw(response),
        chunks=chunks,
        finished_at=time.time(),
    )


async def conclude(
    broker: Broker, event: Terminal, *, to: Recipient, replay_ttl: float = jobs.DEFAULT_REPLAY_TTL_S
) -> None:
    """Makes the event the run's outcome, unless there is one already, and tells the one that stands."""
    ours = jobs.encode(event)
    stands = await broker.runs.outcome(event.run, ours, replay_ttl)
    await _tell_what_stands(broker, event, ours, stands, to)


async def turn_away(broker: Broker, request: Sender, error: errors.HeadraceError) -> None:
    """Makes the error the outcome of a request that nobody has taken, and tells the one that stands.

    Where the run is that of another request under the same id, only this client hears of it.
    """
    event = failed(request, error)
    ours = jobs.encode(event)
    if request.digest:
        stands = await broker.runs.refuse(event.run, request.digest, ours, request.replay_ttl)
    else:  # a job about a run that was taken before
        stands = await broker.runs.outcome(event.run, ours, request.replay_ttl)
    if stands is None:
        await tell_only(broker, request, error, to=request)
    else:
        await _tell_what_stands(broker, event, ours, stands, request)


async def _tell_what_stands(broker: Broker, event: Terminal, ours: bytes, stands: bytes, to: Recipient) -> None:
    probe("outcome.written")
    await _tell(broker, event if stands == ours else jobs.decode_terminal(stands), stands, to)
    probe("outcome.told")


async def tell(broker: Broker, outcome: bytes, *, to: Recipient) -> None:
    """Publishes a stored outcome, at least once, always under its one event_id.

    Whoever wrote it may have died before its job was counted no more: that is made up for.
    """
    await _tell(broker, jobs.decode_terminal(outcome), outcome, to)


async def _tell(broker: Broker, event: Terminal, outcome: bytes, to: Recipient) -> None:
    if isinstance(to, Job | Sender) and to.counted:
        await broker.runs.leave(event.client, event.run)
    await _publish(broker, event, outcome, to)


async def tell_only(broker: Broker, request: Identity, error: errors.HeadraceError, *, to: Recipient) -> None:
    """Tells a client of an error that is not the run's outcome: of what it has sent about the run, or of another
    request under its request_id."""
    event = msgspec.structs.replace(failed(request, error), event_id=secrets.token_hex(16), about=_about(to))
    await _publish(broker, event, jobs.encode(event), to)


def _about(to: Recipient) -> About | None:
    match to:
        case Cancel():
            return "cancel"
        case Replay():
            return "replay"
        case Sender(about=about):
            return about
        case _:
            return None


async def _publish(broker: Broker, event: Terminal, body: bytes, to: Recipient) -> None:
    topics = broker.via(to.via)
    kind = "final" if isinstance(event, FinalEvent) else "error"
    key = jobs.routing_key(event.client, kind, to.topic)
    try:
        await topics.publish([TopicMessage(key, body, durable=True, request_id=event.request_id)])
    except MessageTooLarge as over:
        parts = parts_of(body, over.limit)
        await topics.publish([TopicMessage(key, part, durable=True, request_id=event.request_id) for part in parts])


def parts_of(event: bytes, limit: int) -> list[bytes]:
    """The JSON of a chunk or of an outcome as numbered parts of at most about ``limit`` bytes each.

    Parts of the same event that were cut for another limit have another ``of``: they do not fit together.
    """
    (whole,) = jobs.decode_events(event)
    of = f"{whole.run}:{whole.seq}" if isinstance(whole, ChunkEvent) else whole.event_id
    blank = PartEvent(
        client=whole.client, request_id=whole.request_id, of=f"{of}/{limit}", part=_MOST, parts=_MOST, text=""
    )
    pieces = list(_pieces(event.decode(), max(_LEAST_TEXT, limit - len(jobs.encode(blank)))))
    return [
        jobs.encode(msgspec.structs.replace(blank, part=number, parts=len(pieces), text=piece))
        for number, piece in enumerate(pieces)
    ]


def _pieces(text: str, size: int) -> Iterator[str]:
    """The text cut at characters, so that each piece has at most ``size`` bytes as a JSON string."""
    start = 0
    while start < len(text):
        count = size  # a character has at least one byte
        while _json_size(piece := text[start : start + count]) > size:
            count = max(1, min(count - 1, count * size // _json_size(piece)))
        yield piece
        start += count


def _json_size(text: str) -> int:
    """Bytes of the text within a JSON string."""
    return len(msgspec.json.encode(text)) - 2


encode_end = msgspec.json.Encoder().encode
decode_end = msgspec.json.Decoder(End).decode
