"""The door: a client's request is checked here and becomes a job. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct
from pydantic import BaseModel, TypeAdapter, ValidationError

from headrace.protocol.base import WireModel
from headrace.protocol.chat import ChatCompletionRequest, ChatCompletionResponse, ChatCompletionStreamResponse
from headrace.protocol.completion import CompletionRequest, CompletionResponse, CompletionStreamResponse
from headrace.protocol.errors import BadRequest, NotFound, TooLarge, bad_request
from headrace.protocol.generate import (
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    GenerateTextResponse,
    GenerateTextStreamResponse,
    GenerateTokensResponse,
    GenerateTokensStreamResponse,
)
from headrace.protocol.jobs import GenerateJob, RenderJob, lane_of, queue_of

Body: TypeAlias = bytes | str | Raw | Mapping[str, object] | WireModel
"""A request as JSON text, as a mapping, or as an object of the protocol."""

E = TypeVar("E")

Response: TypeAlias = ChatCompletionResponse | CompletionResponse | GenerateTokensResponse | GenerateTextResponse
StreamChunk: TypeAlias = (
    ChatCompletionStreamResponse | CompletionStreamResponse | GenerateTokensStreamResponse | GenerateTextStreamResponse
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an endpoint takes and gives, whose queue it goes to first, and where the job holds the request."""

    role: Literal["render", "generate"]
    request: type[BaseModel]
    field: Literal["body", "request"]
    response: TypeAdapter[Response]
    chunk: TypeAdapter[StreamChunk]


ENDPOINTS: Final[dict[str, Kind]] = {
    "/v1/chat/completions": Kind(
        "render",
        ChatCompletionRequest,
        "body",
        TypeAdapter(ChatCompletionResponse),
        TypeAdapter(ChatCompletionStreamResponse),
    ),
    "/v1/completions": Kind(
        "render", CompletionRequest, "body", TypeAdapter(CompletionResponse), TypeAdapter(CompletionStreamResponse)
    ),
    "/inference/v1/generate": Kind(
        "generate", GenerateRequest, "request", TypeAdapter(GenerateResponse), TypeAdapter(GenerateStreamResponse)
    ),
}


class _Priority(Struct):
    priority: int | None = 0


_priority = msgspec.json.Decoder(_Priority)
_head = msgspec.json.Decoder(dict[str, Raw])
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Request:
    """One request of many, for ``Headrace.map``. ``key`` comes back with the answer and is the caller's own."""

    endpoint: str
    body: Body
    model: str | None = None
    request_id: str | None = None
    deadline: float | None = None
    key: object = None


def json_of(body: Body) -> bytes:
    """The JSON text of a request: as it was sent, if it was text."""
    match body:
        case bytes():
            return body
        case str():
            return _unicode("The body", body)
        case Raw():
            return bytes(body)
        case WireModel():
            return body.model_dump_json(exclude_unset=True).encode()
        case _:
            try:
                return _encoder.encode(body)
            except (TypeError, ValueError, RecursionError) as error:
                raise BadRequest(f"The body is not JSON: {error}.") from None


def job_of(request: Request, *, default_model: str, max_bytes: int, **terms: object) -> RenderJob | GenerateJob:
    """The job that asks for this request, its body untouched; ``terms`` are the other fields of the envelope.

    Raises BadRequest naming the field, NotFound for an unknown endpoint, TooLarge.
    """
    kind = ENDPOINTS.get(request.endpoint)
    if kind is None:
        raise NotFound(f"url must be one of {', '.join(ENDPOINTS)}, got {request.endpoint[:80]!r}.", param="url")
    body = json_of(request.body)
    if len(body) > max_bytes:
        raise TooLarge(f"The request has {len(body)} bytes, at most {max_bytes} are taken.")
    named = _check(kind, body)
    fields = {
        "type": kind.role,
        "endpoint": request.endpoint,
        "model": next(name for name in (request.model, named, default_model) if name is not None),
        kind.field: Raw(body),
        **terms,
    }
    return envelope_of(RenderJob, fields) if kind.role == "render" else envelope_of(GenerateJob, fields)


def envelope_of(kind: type[E], fields: Mapping[str, object]) -> E:
    """The envelope with these fields. Raises BadRequest naming the one that cannot be."""
    for name, value in fields.items():
        if isinstance(value, str):
            _unicode(name, value, param=name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`")
        raise BadRequest(f"{field}: {text}.", param=field) from None


def told_as(job: RenderJob | GenerateJob) -> Kind:
    """How chunks and response of a job are to be read: raw tokens are those of the generate endpoint."""
    return ENDPOINTS["/inference/v1/generate" if job.delivery == "tokens" else job.endpoint]


def queue_for(job: RenderJob | GenerateJob) -> str:
    """The queue that the job goes to first, in the lane of its priority."""
    kind = ENDPOINTS[job.endpoint]
    body = bytes(getattr(job, kind.field))
    priority = _priority.decode(body).priority if b'"priority"' in body else 0
    return queue_of(kind.role, job.model, lane_of(priority or 0))


def _check(kind: Kind, body: bytes) -> str | None:
    """Validates the body; returns the model that it names."""
    try:
        head = _head.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a JSON object: {error}.") from None
    try:
        kind.request.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None
    return None if "model" not in head else msgspec.json.decode(head["model"], type=str | None)


def _unicode(subject: str, text: str, *, param: str | None = None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        message = f"{subject} is not Unicode text: half a surrogate pair stands at character {error.start}."
        raise BadRequest(message, param=param) from None
