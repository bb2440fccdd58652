"""How a run ends: what the log's ``end`` says, the one outcome, and telling it."""

from __future__ import annotations

import secrets
import time
from typing import Final, Protocol

import msgspec
from msgspec import Raw, Struct

from headrace.broker.ports import Broker, MessageTooLarge, TopicMessage
from headrace.protocol import errors, jobs
from headrace.protocol.jobs import ErrorCode, ErrorEvent, FinalEvent, Identity, Terminal, Via
from headrace.protocol.wire import Usage

_CODES: Final[dict[type[errors.HeadraceError], ErrorCode]] = {
    errors.BadRequest: "bad_request",
    errors.NotFound: "not_found",
    errors.Conflict: "conflict",
    errors.TooLarge: "too_large",
    errors.Cancelled: "cancelled",
    errors.DeadlineExceeded: "expired",
    errors.Interrupted: "interrupted",
    errors.StreamLost: "stream_lost",
    errors.Exhausted: "exhausted",
}


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
        event_id=request.run,
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
        event_id=request.run,
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
    if stands == ours:
        await _publish(broker, event, ours, to)
    else:
        await tell(broker, stands, to=to)


async def tell(broker: Broker, outcome: bytes, *, to: Recipient) -> None:
    """Publishes a stored outcome, at least once, always under its one event_id."""
    event = jobs.decode_terminal(outcome)
    await _publish(broker, event, outcome, to)


async def tell_only(broker: Broker, request: Identity, error: errors.HeadraceError, *, to: Recipient) -> None:
    """Tells a client of an error that is not the run's outcome: the run under this request_id is another request."""
    event = msgspec.structs.replace(failed(request, error), event_id=secrets.token_hex(16))
    await _publish(broker, event, jobs.encode(event), to)


async def _publish(broker: Broker, event: Terminal, body: bytes, to: Recipient) -> None:
    topics = broker.via(to.via)
    kind = "final" if isinstance(event, FinalEvent) else "error"
    key = jobs.routing_key(event.client, kind, to.topic)
    try:
        await topics.publish([TopicMessage(key, body, durable=True, request_id=event.request_id)])
    except MessageTooLarge as error:
        # The outcome stands, and can be read from the run store; an event of this size cannot be sent.
        kept = errors.TooLarge(f"the response is kept, but too large to be sent: {error}")
        told = failed(event, kept, chunks=event.chunks)
        key = jobs.routing_key(event.client, "error", to.topic)
        await topics.publish([TopicMessage(key, jobs.encode(told), durable=True, request_id=event.request_id)])


encode_end = msgspec.json.Encoder().encode
decode_end = msgspec.json.Decoder(End).decode
