"""One run as it is told to its client: what each of its chunks becomes, and what its final response is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw
from pydantic import TypeAdapter, ValidationError

from headrace.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest, jobs
from headrace.protocol.errors import bad_request
from headrace.protocol.jobs import ChunkEvent, GenerateJob, Job
from headrace.protocol.logprobs import PromptLogprobs
from headrace.protocol.wire import TokenChunk
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.gather import Gathered, with_fields
from headrace.workers.derender.session import Session
from headrace.workers.derender.text_session import TextSession
from headrace.workers.outcome import End

_encode = msgspec.json.Encoder().encode
R = TypeVar("R", ChatCompletionRequest, CompletionRequest, GenerateRequest)


class Telling(Protocol):
    """How a run is told. A run with ``delivery`` final has no chunks to tell, so none are derendered."""

    @property
    def tokens(self) -> int:
        """Output tokens so far."""

    def chunk(self, chunk: TokenChunk, payload: bytes) -> bytes | None:
        """JSON of the chunk as the client sees it; None where it hears of no chunks. Raises BadRequest."""

    def final(self, end: End) -> bytes:
        """JSON of the whole response. Raises BadRequest."""

    def checkpoint(self) -> bytes:
        """JSON of what later chunks depend on, to go on from; the response needs the chunks before it besides."""

    def recall(self, chunks: Iterable[TokenChunk]) -> None:
        """These are all the run's chunks: a telling that went on from a checkpoint has not seen the first of them."""


class ChunkEvents:
    """The chunk events of one run, as JSON: one differs from the next in its number and its chunk only."""

    __slots__ = ("form",)

    def __init__(self, job: Job) -> None:
        event = jobs.encode(ChunkEvent(client=job.client, request_id=job.request_id, seq=0, chunk=Raw(b"null")))
        head, _, _ = event.rpartition(b'0,"chunk":null}')
        self.form = head.replace(b"%", b"%%") + b'%d,"chunk":%b}'
        """The event once it is filled in: ``form % (seq, chunk)``."""


class _Asked(msgspec.Struct):
    """As much of a GenerateRequest as telling needs."""

    token_ids: list[int]
    output_mode: str = "tokens"


_asked = msgspec.json.Decoder(_Asked).decode
_prompt_logprobs: Final = TypeAdapter(PromptLogprobs).validate_json


def telling_of(derenderer: Derenderer, job: GenerateJob, checkpoint: bytes | None = None) -> Telling:
    """How the job's client wants to be told: in text, or in tokens. Raises BadRequest, and ValueError for a checkpoint
    that is none of this telling."""
    if job.delivery == "tokens":
        return InTokens(job)
    if job.endpoint != "/inference/v1/generate" and job.source is not UNSET:
        return InText(_session(derenderer, job, bytes(job.source), checkpoint), job)
    body = bytes(job.request)
    if _asked(body).output_mode == "text":
        request = _parsed(GenerateRequest, body)
        session = TextSession(
            derenderer, request, id=job.request_id, created=job.created, model=job.model, checkpoint=checkpoint
        )
        return InText(session, job)
    return InTokens(job)


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

    def checkpoint(self) -> bytes:
        return b"null"

    def recall(self, chunks: Iterable[TokenChunk]) -> None:
        self._gathered = Gathered.of(chunks)


class InText:
    """The client speaks chat or completions, or wants the text of its generate request."""

    def __init__(self, session: Session | TextSession, job: GenerateJob) -> None:
        self._session = session
        self._silent = job.delivery == "final"
        self._gathered = Gathered()

    @property
    def tokens(self) -> int:
        return self._gathered.tokens

    def chunk(self, chunk: TokenChunk, payload: bytes) -> bytes | None:
        self._gathered.add(chunk)
        return None if self._silent else _encode(self._session.step(chunk))

    def final(self, end: End) -> bytes:
        extra = dict(end.extra)
        logprobs = extra.pop("prompt_logprobs", None)
        response = self._session.final(
            self._gathered.choices(),
            usage=end.usage,
            metrics=self._gathered.metrics,
            prompt_logprobs=None if logprobs is None else _prompt_logprobs(bytes(logprobs)),
        )
        return with_fields(response.model_dump_json().encode(), extra)

    def checkpoint(self) -> bytes:
        return self._session.checkpoint()

    def recall(self, chunks: Iterable[TokenChunk]) -> None:
        self._gathered = Gathered.of(chunks)


def _session(derenderer: Derenderer, job: GenerateJob, source: bytes, checkpoint: bytes | None) -> Session:
    chat = job.endpoint == "/v1/chat/completions"
    return Session(
        derenderer,
        _parsed(ChatCompletionRequest, source) if chat else _parsed(CompletionRequest, source),
        run=job.run,
        id=f"{'chatcmpl' if chat else 'cmpl'}-{job.request_id}",
        created=job.created,
        model=job.model,
        prompt_token_ids=_asked(bytes(job.request)).token_ids,
        checkpoint=checkpoint,
    )


def _parsed(kind: type[R], body: bytes) -> R:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None
