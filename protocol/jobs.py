"""The envelopes: what travels on the queues and on the client topics.

Every envelope is a JSON object with a ``type`` tag and a version ``v``. A producer that has nothing but an AMQP
library writes them by hand, so everything that has a sensible default may be left out; ``stamp`` fills it in.
The client's own JSON travels as it was sent (``msgspec.Raw``): which keys it set is part of its meaning.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

VERSION: Final = 1
"""Version of the envelopes that this code writes; it reads every version up to this one."""

DEFAULT_DEADLINE_S: Final = 24 * 3600.0
DEFAULT_REPLAY_TTL_S: Final = 600.0
PARTITIONS: Final = 64

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
"""One word of a routing key: no dot, no wildcard."""
RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
ModelName = Annotated[str, Meta(min_length=1, max_length=200)]
Seconds = Annotated[float, Meta(ge=0)]

Delivery = Literal["stream", "final", "tokens"]
"""stream: chunk events, then the final one. final: one event. tokens: the raw token chunks, then the final one."""

Via = Literal["amqp", "redis"]
"""What brings a request's events to its client: the topic exchange of RabbitMQ, or streams on Redis."""

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]

ErrorCode = Literal[
    "bad_request",
    "not_found",
    "conflict",
    "too_large",
    "cancelled",
    "expired",
    "interrupted",
    "stream_lost",
    "exhausted",
    "internal",
]


class Identity(Struct, kw_only=True, omit_defaults=True):
    """Whose request it is."""

    client: Name
    request_id: RequestId

    @property
    def run(self) -> str:
        """Name of the run in the log and the run store."""
        return run_of(self.client, self.request_id)


class Envelope(Identity, kw_only=True, omit_defaults=True, tag_field="type"):
    """What every envelope says: whose request it is, and in which version the envelope is written."""

    v: Annotated[int, Meta(ge=1)] = VERSION


class Job(Envelope, kw_only=True, omit_defaults=True):
    """What every job says.

    submitted_at and deadline are Unix seconds; replay_ttl is how long, in seconds, the result and the chunks stay
    readable after the outcome. ``topic`` is a word that the client adds to the routing key of its events, ``via`` is
    where it listens.
    """

    model: ModelName
    delivery: Delivery = "stream"
    submitted_at: Seconds | None = None
    deadline: Seconds | None = None
    replay_ttl: Annotated[float, Meta(ge=1, le=7 * 24 * 3600)] = DEFAULT_REPLAY_TTL_S
    topic: Name | None = None
    via: Via = "amqp"

    @property
    def created(self) -> int:
        """Unix second that goes into every response of the run: from the job, so that a recomputed chunk is equal."""
        return int(self.submitted_at or 0)


class RenderJob(Job, tag="render", kw_only=True, omit_defaults=True):
    """A chat or completion request, to be turned into token ids."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    body: Raw


class GenerateJob(Job, tag="generate", kw_only=True, omit_defaults=True):
    """Token ids, to be continued by an engine.

    ``request`` is a GenerateRequest. ``source`` is the chat or completion request it was rendered from, as the
    client sent it: the derender worker needs it. Absent for a client that speaks tokens (endpoint generate).
    """

    request: Raw
    endpoint: Endpoint = "/inference/v1/generate"
    source: Raw | UnsetType = UNSET


class DerenderJob(Job, tag="derender", kw_only=True, omit_defaults=True):
    """A run whose log is to be told to its client. What it needs besides stands in the run store (``job``)."""

    endpoint: Endpoint = "/inference/v1/generate"


class Cancel(Envelope, tag="cancel", kw_only=True, omit_defaults=True):
    """Stop this request, wherever it is."""

    reason: Annotated[str, Meta(max_length=200)] = "cancelled by the client"
    model: ModelName | None = None
    topic: Name | None = None
    via: Via = "amqp"


class Replay(Envelope, tag="replay", kw_only=True, omit_defaults=True):
    """Tell the chunks of this request again, from ``seq`` on, under ``topic`` and by way of ``via``."""

    model: ModelName
    seq: Annotated[int, Meta(ge=0)] = 0
    topic: Name | None = None
    via: Via = "amqp"


class ChunkEvent(Envelope, tag="chunk", kw_only=True, omit_defaults=True):
    """One chunk of a stream. ``seq`` is dense from 0 over the whole life of the request, over all its choices.

    ``chunk`` is a chat.completion.chunk, a text_completion chunk, or a GenerateTokensStreamResponse.
    """

    seq: Annotated[int, Meta(ge=0)]
    chunk: Raw


class FinalEvent(Envelope, tag="final", kw_only=True, omit_defaults=True):
    """The outcome of a request that was answered. ``chunks`` is how many seqs its stream has."""

    event_id: str
    response: Raw
    chunks: int = 0
    finished_at: float = 0.0


class ErrorEvent(Envelope, tag="error", kw_only=True, omit_defaults=True):
    """The outcome of a request that was not answered.

    ``error`` is the body that the scale-out endpoints would send: {"message", "type", "param", "code"}; ``status`` the
    HTTP status that fits; ``retryable`` whether the same request may do better later, ``retry_after`` in seconds.
    """

    event_id: str
    code: ErrorCode
    status: int
    error: Raw
    retryable: bool = False
    retry_after: float | None = None
    chunks: int = 0
    finished_at: float = 0.0


class ProgressEvent(Envelope, tag="progress", kw_only=True, omit_defaults=True):
    """A sign of life: ``tokens`` is how many the engine has written so far."""

    state: Literal["running"] = "running"
    tokens: int = 0


class Pack(Struct, tag_field="type", tag="pack", kw_only=True):
    """Several events in one message, in order."""

    events: list[Raw]
    v: int = VERSION


class Sender(Identity):
    """Who sent an envelope, and where it wants to hear of it.

    ``controls``: it only speaks of a request, so what is wrong with it is not that request's outcome.
    """

    topic: Name | None = None
    via: Via = "amqp"
    controls: bool = False


class _Letterhead(Identity):
    """As much of an envelope as answering it needs, whatever else is wrong with it."""

    type: object = None
    topic: object = None
    via: object = None


AnyJob = RenderJob | GenerateJob | DerenderJob
Control = Cancel | Replay
Event = ChunkEvent | FinalEvent | ErrorEvent | ProgressEvent
Terminal = FinalEvent | ErrorEvent

_encoder = msgspec.json.Encoder()
_envelopes = msgspec.json.Decoder(RenderJob | GenerateJob | DerenderJob | Cancel | Replay)
_terminals = msgspec.json.Decoder(Terminal)
_told = msgspec.json.Decoder(ChunkEvent | FinalEvent | ErrorEvent | ProgressEvent | Pack)
_events = msgspec.json.Decoder(Event)
_letterheads = msgspec.json.Decoder(_Letterhead)

J = TypeVar("J", RenderJob, GenerateJob, DerenderJob)


class EnvelopeError(ValueError):
    """The envelope cannot be read: its sentence names the field. ``newer`` when only its version is too new."""

    def __init__(self, message: str, *, newer: bool = False) -> None:
        super().__init__(message)
        self.newer = newer


def encode(envelope: Struct) -> bytes:
    """JSON of an envelope, defaults left out."""
    return _encoder.encode(envelope)


def pack(events: list[bytes]) -> bytes:
    """JSON of a topic message: the one event as it is, or a pack of several."""
    return events[0] if len(events) == 1 else b'{"type":"pack","events":[%b],"v":%d}' % (b",".join(events), VERSION)


def decode(body: bytes) -> AnyJob | Control:
    """Reads a job or a control message. Raises EnvelopeError."""
    envelope: AnyJob | Control = _read(_envelopes, body)
    if envelope.v > VERSION:
        raise EnvelopeError(f"v: envelope version {envelope.v} is newer than {VERSION}", newer=True)
    return envelope


def decode_terminal(body: bytes) -> Terminal:
    """Reads a stored outcome. Raises EnvelopeError."""
    return _read(_terminals, body)


def decode_events(body: bytes) -> list[Event]:
    """Reads a message of a client topic: one event, or a pack of them. Raises EnvelopeError."""
    told = _read(_told, body)
    if isinstance(told, Pack):
        return [_read(_events, bytes(event)) for event in told.events]
    return [told]


T = TypeVar("T")


def _read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EnvelopeError(_plain(str(error))) from None


def _plain(message: str) -> str:
    """msgspec ends its sentence with "- at `$.field`"; ours begins with the field."""
    text, _, place = message.partition(" - at `")
    field = place.rstrip("`").removeprefix("$").removeprefix(".")
    return f"{field}: {text}" if field else text


def stamp(job: J, now: float) -> J:
    """The job with submitted_at and deadline (Unix seconds) filled in where the producer left them out."""
    submitted_at = now if job.submitted_at is None else job.submitted_at
    deadline = submitted_at + DEFAULT_DEADLINE_S if job.deadline is None else job.deadline
    return msgspec.structs.replace(job, submitted_at=submitted_at, deadline=deadline)


def follow_on(job: Job) -> dict[str, Any]:
    """What the next role's job says like this one: everything that every job says."""
    return {name: getattr(job, name) for name in Job.__struct_fields__ if name != "v"}


def sender(body: bytes) -> Sender | None:
    """Who sent an envelope that cannot be read as a whole, if it says at least that much."""
    try:
        said = _letterheads.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    try:
        topic = msgspec.convert(said.topic, Name | None)
    except msgspec.ValidationError:
        topic = None
    via: Via = "redis" if said.via == "redis" else "amqp"
    controls = said.type in ("cancel", "replay")
    return Sender(client=said.client, request_id=said.request_id, topic=topic, via=via, controls=controls)


@lru_cache(maxsize=1024)
def run_of(client: str, request_id: str) -> str:
    """Name of a run, 32 hex digits. A request_id is the client's choice: it must not reach another client's run."""
    return hashlib.blake2b(f"{client}\0{request_id}".encode(), digest_size=16).hexdigest()


def partition_of(run: str) -> int:
    """Partition of a run, 0 to 63: its keys share one cluster slot."""
    return int(run[:8], 16) % PARTITIONS


def digest_of(job: AnyJob) -> str:
    """Fingerprint of what a job asks for, to tell the same request sent twice from another under the same id."""
    match job:
        case RenderJob(body=asked) | GenerateJob(request=asked):
            content = bytes(asked)
        case _:
            content = b""
    return hashlib.blake2b(f"{job.endpoint}\0{job.model}\0".encode() + content, digest_size=16).hexdigest()


def queue_of(role: Literal["render", "generate", "derender"], model: str) -> str:
    """Queue of a role for a model."""
    return f"{role}.{model}"


CONTROL_QUEUE: Final = "control"
DEAD_QUEUE: Final = "dead"
INTAKE_QUEUE: Final = "intake"


def routing_key(client: str, kind: str, topic: str | None) -> str:
    """Routing key of an event on the topic exchange: ``<client>.<kind>[.<topic>]``."""
    return f"{client}.{kind}" if topic is None else f"{client}.{kind}.{topic}"
