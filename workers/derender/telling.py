"""One run as it is told to its client: what each of its chunks becomes, and what its final response is."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw
from pydantic import ValidationError

from headrace.protocol import ChatCompletionRequest, CompletionRequest, jobs
from headrace.protocol.errors import bad_request
from headrace.protocol.jobs import ChunkEvent, GenerateJob, Job
from headrace.protocol.wire import TokenChunk
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.gather import Gathered, with_fields
from headrace.workers.derender.session import Session
from headrace.workers.outcome import End

_encode = msgspec.json.Encoder().encode
R = TypeVar("R", ChatCompletionRequest, CompletionRequest)


class Telling(Protocol):
    """How a run is told. A run with ``delivery`` final has no chunks to tell, so none are derendered."""

    @property
    def tokens(self) -> int:
        """Output tokens so far."""

    def chunk(self, chunk: TokenChunk, payload: bytes) -> bytes | None:
        """JSON of the chunk as the client sees it; None where it hears of no chunks. Raises BadRequest."""

    def final(self, end: End) -> bytes:
        """JSON of the whole response. Raises BadRequest."""


class ChunkEvents:
    """The chunk events of one run, as JSON: one differs from the next in its number and its chunk only."""

    __slots__ = ("_head",)

    def __init__(self, job: Job) -> None:
        event = jobs.encode(ChunkEvent(client=job.client, request_id=job.request_id, seq=0, chunk=Raw(b"null")))
        self._head, _, _ = event.rpartition(b'0,"chunk":null}')

    def event(self, seq: int, chunk: bytes) -> bytes:
        return b'%b%d,"chunk":%b}' % (self._head, seq, chunk)


class _Prompt(msgspec.Struct):
    """As much of a GenerateRequest as telling needs."""

    token_ids: list[int]


_prompt = msgspec.json.Decoder(_Prompt).decode


def telling_of(derenderer: Derenderer, job: GenerateJob) -> Telling:
    """How the job's client wants to be told: in text, or in tokens. Raises BadRequest."""
    if job.endpoint == "/inference/v1/generate" or job.delivery == "tokens" or job.source is UNSET:
        return InTokens(job)
    return InText(derenderer, job)


class InTokens:
    """The client speaks tokens: chunks pass as they are."""

    def __init__(self, job: GenerateJob) -> None:
        self._job = job
        self._gathered = Gathered()

    @property
    def tokens(self) -> int:
        return self._gathered.tokens

    def chunk(self, chunk: TokenChunk, payload: bytes) -> bytes | None:
        self._gathered.add(chunk)
        return None if self._job.delivery == "final" else payload

    def final(self, end: End) -> bytes:
        job = self._job
        response = self._gathered.response(job.request_id, model=job.model, created=job.created, usage=end.usage)
        return with_fields(_encode(response), end.extra)


class InText:
    """The client speaks chat or completions."""

    def __init__(self, derenderer: Derenderer, job: GenerateJob) -> None:
        assert job.source is not UNSET, "text is derendered for the request it was rendered from"
        source, chat = bytes(job.source), job.endpoint == "/v1/chat/completions"
        self._session = Session(
            derenderer,
            _parsed(ChatCompletionRequest, source) if chat else _parsed(CompletionRequest, source),
            run=job.run,
            id=f"{'chatcmpl' if chat else 'cmpl'}-{job.request_id}",
            created=job.created,
            model=job.model,
            prompt_token_ids=_prompt(bytes(job.request)).token_ids,
        )
        self._silent = job.delivery == "final"
        self._gathered = Gathered()

    @property
    def tokens(self) -> int:
        return self._gathered.tokens

    def chunk(self, chunk: TokenChunk, payload: bytes) -> bytes | None:
        self._gathered.add(chunk)
        return None if self._silent else _encode(self._session.step(chunk))

    def final(self, end: End) -> bytes:
        response = self._session.final(self._gathered.choices(), usage=end.usage)
        return with_fields(response.model_dump_json().encode(), end.extra)


def _parsed(kind: type[R], body: bytes) -> R:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None
