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

from headrace.protocol.errors import StreamLost

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
    "queue_full",
    "exhausted",
    "internal",
]

About = Literal["cancel", "replay"]
"""What an error is about that is not the outcome of its request."""


class Identity(Struct, kw_only=True, omit_defaults=True):
    """Whose request it is."""

    client: Name
    request_id: RequestId

    @property
    def run(self) -> str:
        """Name of the run in the log and the run store."""
        return run_of(self.client, self.request_id)

    @property
    def event_id(self) -> str:
        """Id of the run's one outcome."""
        return self.run


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
    redrive: Annotated[int, Meta(ge=0)] = 0
    """How often an operator has sent the request on its way again: each time has an outcome of its own."""
    counted: bool = False
    """Whether it counts among what its client has under way, until its outcome."""

    @property
    def event_id(self) -> str:
        """Id of the run's one outcome: another one each time that an operator sends the request on its way again."""
        return _event_id(self.run, self.redrive)

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


class Ref(Job, tag="ref", kw_only=True, omit_defaults=True):
    """Stands on a queue for a job that is too large for it: its body is in the run store under ``name``."""

    name: Name
    bytes: Annotated[int, Meta(ge=0)]
    digest: str = ""
    """That of the job."""


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

    It is no outcome where ``event_id`` is not the run's: it tells only whoever sent a message that could not be served.
    ``about`` says which, unless that was a request: another one under the same request_id.
    """

    event_id: str
    code: ErrorCode
    status: int
    error: Raw
    retryable: bool = False
    retry_after: float | None = None
    chunks: int = 0
    finished_at: float = 0.0
    about: About | None = None


class ProgressEvent(Envelope, tag="progress", kw_only=True, omit_defaults=True):
    """A sign of life: ``tokens`` is how many the engine has written so far."""

    state: Literal["running"] = "running"
    tokens: int = 0


class PartEvent(Envelope, tag="part", kw_only=True, omit_defaults=True):
    """One of the ``parts`` pieces, numbered from 0, of an event that is too large for one message.

    ``text`` of all pieces of the same ``of``, one behind the other, is the event's JSON.
    """

    of: Annotated[str, Meta(min_length=1, max_length=100)]
    part: Annotated[int, Meta(ge=0)]
    parts: Annotated[int, Meta(ge=1)]
    text: str


class Pack(Struct, tag_field="type", tag="pack", kw_only=True):
    """Several events in one message, in order."""

    events: list[Raw]
    v: int = VERSION


class Sender(Identity):
    """Who sent an envelope that cannot be served, and where it wants to hear of it.

    ``about``: it only speaks of a request, so what is wrong with it is not that request's outcome. ``digest`` is the
    fingerprint of what it asks for, if it says that. ``replay_ttl`` is in seconds.
    """

    about: About | None = None
    digest: str = ""
    topic: Name | None = None
    via: Via = "amqp"
    replay_ttl: float = DEFAULT_REPLAY_TTL_S
    redrive: int = 0
    counted: bool = False

    @property
    def event_id(self) -> str:
        return _event_id(self.run, self.redrive)


class _Letterhead(Identity):
    """As much of an envelope as answering it needs, whatever else is wrong with it."""

    type: object = None
    topic: object = None
    via: object = None


class _Versioned(Struct):
    """The version of an envelope, whatever else it says."""

    v: int = VERSION


AnyJob = RenderJob | GenerateJob | DerenderJob
Control = Cancel | Replay
Event = ChunkEvent | FinalEvent | ErrorEvent | ProgressEvent | PartEvent
Terminal = FinalEvent | ErrorEvent

_encoder = msgspec.json.Encoder()
_envelopes = msgspec.json.Decoder(RenderJob | GenerateJob | DerenderJob | Ref | Cancel | Replay)
_terminals = msgspec.json.Decoder(Terminal)
_told = msgspec.json.Decoder(ChunkEvent | FinalEvent | ErrorEvent | ProgressEvent | PartEvent | Pack)
_events = msgspec.json.Decoder(Event)
_letterheads = msgspec.json.Decoder(_Letterhead)
_versions = msgspec.json.Decoder(_Versioned)

J = TypeVar("J", bound=Job)


class EnvelopeError(ValueError):
    """The envelope cannot be read: its sentence names the field. ``newer`` when its version is too new for us."""

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
    """Reads a job or a control message.

    Raises EnvelopeError; StreamLost for one that stands for a large job: whoever holds it has not found its body.
    """
    try:
        envelope: AnyJob | Ref | Control = _read(_envelopes, body)
    except EnvelopeError:  # a newer version may have types, and values, that this one does not know
        _check_version(_version_of(body))
        raise
    _check_version(envelope.v)
    if isinstance(envelope, Ref):
        raise StreamLost(f"the request's {envelope.bytes} bytes are not stored any more; send the request again")
    return envelope


def _check_version(version: int) -> None:
    if version > VERSION:
        raise EnvelopeError(f"v: envelope version {version} is newer than {VERSION}", newer=True) from None


def _version_of(body: bytes) -> int:
    try:
        return _versions.decode(body).v
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return VERSION


def body_name(body: bytes) -> str:
    """Name under which a body too large for a queue is kept."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def is_ref(body: bytes) -> bool:
    """Whether a message looks like what stands for a large job, as ``encode`` writes it."""
    return body.startswith(b'{"type":"ref"')


def ref_of(body: bytes) -> Ref | None:
    """What stands for a large job, if the message is that."""
    if not is_ref(body):
        return None
    try:
        envelope = _envelopes.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return envelope if isinstance(envelope, Ref) else None


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
    sent = Sender(client=said.client, request_id=said.request_id, topic=topic, via=via)
    match said.type:
        case "cancel" | "replay" as about:
            return msgspec.structs.replace(sent, about=about)
    try:
        job = _envelopes.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.structs.replace(sent, digest=hashlib.blake2b(body, digest_size=16).hexdigest())
    assert not isinstance(job, Cancel | Replay), "they were answered above"
    rest = {"replay_ttl": job.replay_ttl, "redrive": job.redrive, "counted": job.counted}
    return msgspec.structs.replace(sent, digest=job.digest if isinstance(job, Ref) else digest_of(job), **rest)


def _event_id(run: str, redrive: int) -> str:
    return run if redrive == 0 else f"{run}.{redrive}"


@lru_cache(maxsize=1024)
def run_of(client: str, request_id: str) -> str:
    """Name of a run, 32 hex digits. A request_id is the client's choice: it must not reach another client's run."""
    return hashlib.blake2b(f"{client}\0{request_id}".encode(), digest_size=16).hexdigest()


def partition_of(run: str) -> int:
    """Partition of a run, 0 to 63: its keys share one cluster slot."""
    return int(run[:8], 16) % PARTITIONS


def digest_of(job: AnyJob) -> str:
    """Fingerprint of what the client asks for, to tell the same request sent twice from another under the same id.

    The same for every role of the run: that of the request as the client sent it. Empty for a job that does not say it.
    """
    match job:
        case RenderJob(body=asked):
            content = bytes(asked)
        case GenerateJob(request=request, source=source):
            content = bytes(request if source is UNSET else source)
        case _:
            return ""
    return hashlib.blake2b(f"{job.endpoint}\0{job.model}\0".encode() + content, digest_size=16).hexdigest()


Lane = Literal["high", "normal", "low"]
LANES: Final[tuple[Lane, ...]] = ("high", "normal", "low")
BANDS: Final = 4
"""Queues for the backlog of clients that send more than their share: each client's goes to one of them."""


def lane_of(priority: int) -> Lane:
    """The lane of a request's priority (a lower one is served earlier, 0 is the default)."""
    return "normal" if priority == 0 else "high" if priority < 0 else "low"


def queue_of(role: Literal["render", "generate", "derender"], model: str, lane: Lane = "normal") -> str:
    """Queue of a role for a model; that of the normal lane is the one that everybody may send to."""
    return f"{role}.{model}" if lane == "normal" else f"{role}-{lane}.{model}"


def backlog_of(role: Literal["generate"], model: str, client: str) -> str:
    """Queue for what a client has sent beyond its share."""
    return backlogs_of(role, model)[int(hashlib.blake2b(client.encode(), digest_size=4).hexdigest(), 16) % BANDS]


def backlogs_of(role: Literal["generate"], model: str) -> list[str]:
    """All queues of that kind."""
    return [f"{role}-backlog{band}.{model}" for band in range(BANDS)]


def replays_of(model: str) -> str:
    """Queue for what clients want to be told again, apart from what is to be told the first time."""
    return f"derender-replays.{model}"


def queues_of(model: str) -> list[str]:
    """Every queue of a model."""
    return [
        *(queue_of("render", model, lane) for lane in LANES),
        *(queue_of("generate", model, lane) for lane in LANES),
        *backlogs_of("generate", model),
        queue_of("derender", model),
        replays_of(model),
    ]


CONTROL_QUEUE: Final = "control"
DEAD_QUEUE: Final = "dead"
INTAKE_QUEUE: Final = "intake"


def routing_key(client: str, kind: str, topic: str | None) -> str:
    """Routing key of an event on the topic exchange: ``<client>.<kind>[.<topic>]``."""
    return f"{client}.{kind}" if topic is None else f"{client}.{kind}.{topic}"
