"""One request's stream at the client: every chunk once, in order, without a gap, then the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import Enum, auto
from functools import cached_property
from typing import Final, Generic, NoReturn, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from headrace.client.door import Response, StreamChunk, told_as
from headrace.client.order import Order
from headrace.client.parts import Parts
from headrace.logs import get_logger
from headrace.protocol.errors import (
    DeadlineExceeded,
    ErrorInfo,
    ErrorResponse,
    HeadraceError,
    StreamLost,
    error_from_response,
)
from headrace.protocol.jobs import (
    ChunkEvent,
    EnvelopeError,
    ErrorEvent,
    Event,
    FinalEvent,
    GenerateJob,
    PartEvent,
    RenderJob,
    Terminal,
    decode_events,
)
from headrace.protocol.wire import ToolCallDelta

log = get_logger()

R = TypeVar("R", bound=Response)

REPLAYS: Final = 6
"""Times that missing chunks are asked for without one of them coming."""
PATIENCE_S: Final = 0.3
"""Seconds that a gap may last before its chunks are asked for; doubled with each try."""
LONGEST_SILENCE: Final = 8
"""Looking for a silent stream's result is done after twice the silence each time, up to so many times of it."""
LAST_CALL_S: Final = 30.0
"""Seconds after a request's deadline in which its outcome may still be told."""


class _Delta(Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] = []


class _Choice(Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Said(Struct):
    choices: list[_Choice] = []


_read_said = msgspec.json.Decoder(_Said).decode


class Chunk:
    """One chunk of a stream: at most one choice, ``index``, and what it adds."""

    def __init__(self, event: ChunkEvent, job: RenderJob | GenerateJob) -> None:
        self.seq = event.seq
        self.raw = bytes(event.chunk)
        """The chunk's JSON as it came."""
        self._reader = told_as(job).chunk

    def __repr__(self) -> str:
        return f"Chunk({self.seq}, {self.raw.decode()})"

    @cached_property
    def chunk(self) -> StreamChunk:
        """The whole chunk, as an object of the protocol."""
        return self._reader.validate_json(self.raw)

    @cached_property
    def _choice(self) -> _Choice:
        choices = _read_said(self.raw).choices
        return choices[0] if choices else _Choice()

    @property
    def index(self) -> int:
        """Number of the choice; 0 for a chunk that only carries usage."""
        return self._choice.index

    @property
    def text(self) -> str:
        """Text of the answer."""
        delta = self._choice.delta
        return (self._choice.text if delta is None else delta.content) or ""

    @property
    def reasoning(self) -> str:
        """Text of the thought before the answer; chat only."""
        return (self._choice.delta.reasoning if self._choice.delta is not None else None) or ""

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """Pieces of tool calls; chat only."""
        return self._choice.delta.tool_calls if self._choice.delta is not None else []

    @property
    def token_ids(self) -> list[int]:
        """Ids of the new tokens, where the chunk tells them."""
        return self._choice.token_ids or []

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, in its last chunk."""
        return self._choice.finish_reason


class Need(Enum):
    """What a stream cannot do by itself."""

    REPLAY = auto()
    """Have its chunks told again, from ``next_seq`` on."""
    RESULT = auto()
    """Look for its outcome in the run store."""


class Line(Protocol):
    """The way back from a stream to the servers."""

    async def cancel(self, request_id: str, *, reason: str, model: str | None) -> None: ...


class Stream(Generic[R]):
    """What comes back for one request. Iterate it for the chunks, await ``result()`` for the response; or only one.

    Chunks wait here for the reader, at most ``limit`` of them: those beyond are dropped, and told again by the servers
    once the reader has come that far. Neither the servers nor other streams ever wait for a slow reader.
    """

    def __init__(self, job: RenderJob | GenerateJob, line: Line, *, limit: int, silence: float, now: float) -> None:
        self.job = job
        self._line = line
        self._silence = silence
        self._chunks: Order[ChunkEvent] = Order(limit)
        self._parts = Parts()
        self._terminal: Terminal | None = None
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._reading = False
        self._heard_at = now
        self._hush = 1
        self._gap_since: float | None = None
        self._progress = 0
        self._replays = 0

    @property
    def request_id(self) -> str:
        return self.job.request_id

    # ------------------------------------------------------------------------------------------- for the user

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises the error that ended the request once the chunks before it are out."""
        while (event := self._chunks.get()) is None:
            if self._told_all or self._failure is not None:
                self._end()
            await self._wait()
        return Chunk(event, self.job)

    async def result(self) -> R:
        """The whole response. Raises the HeadraceError that ended the request. Needs no iteration."""
        event = await self.outcome()
        return cast("R", told_as(self.job).response.validate_json(bytes(event.response)))

    async def outcome(self) -> FinalEvent:
        """The final event, with the response as JSON. Raises as ``result`` does."""
        while self._terminal is None:
            if self._failure is not None:
                raise self._failure
            await self._news_comes()
        if isinstance(self._terminal, ErrorEvent):
            raise error_of(self._terminal)
        return self._terminal

    async def cancel(self, reason: str = "cancelled by the client") -> None:
        """Asks for the request to be stopped; the stream then ends with Cancelled, unless it was done before."""
        await self._line.cancel(self.request_id, reason=reason, model=self.job.model)

    # ------------------------------------------------------------------------------------------- for the client

    @property
    def next_seq(self) -> int:
        """The first chunk that has not come."""
        return self._chunks.expected

    @property
    def settled(self) -> bool:
        """Whether nothing more can come that matters."""
        return self._failure is not None or (self._terminal is not None and not self._chunks.missing)

    def accept(self, event: Event, now: float) -> None:
        """Takes an event in; what was here before changes nothing."""
        self._heard_at, self._hush = now, 1
        match event:
            case PartEvent():
                if (whole := self._parts.add(event)) is not None:
                    self._accept_whole(whole, now)
            case ChunkEvent(seq=seq):
                self._chunks.put(seq, event)
            case FinalEvent() | ErrorEvent() if self._terminal is None:
                self._terminal = event
                if self.job.delivery != "final":
                    self._chunks.heard_of(event.chunks)
        self._news.set()

    def _accept_whole(self, event: bytes, now: float) -> None:
        try:
            for each in decode_events(event):
                if not isinstance(each, PartEvent):
                    self.accept(each, now)
        except EnvelopeError as error:
            log.warning("event.unreadable", request_id=self.request_id, error=str(error))

    def fail(self, error: Exception) -> None:
        """Ends the stream from this side."""
        self._failure = error
        self._news.set()

    def needs(self, now: float, unix_now: float) -> Need | None:
        """What is to be done for the stream at this moment; ``now`` is a monotonic clock."""
        if self._terminal is None and unix_now > (self.job.deadline or unix_now) + LAST_CALL_S:
            self.fail(DeadlineExceeded("The deadline passed and nothing was heard of the request."))
        if self.settled:
            return None
        if self._reading and self._chunks.missing:
            return self._mend(now)
        self._gap_since = None
        if self._terminal is None and now - self._heard_at >= self._silence * self._hush:
            self._heard_at, self._hush = now, min(LONGEST_SILENCE, 2 * self._hush)
            return Need.RESULT
        return None

    # ------------------------------------------------------------------------------------------- inside

    @property
    def _told_all(self) -> bool:
        return self._terminal is not None and self._chunks.taken >= self._chunks.horizon

    def _end(self) -> NoReturn:
        """Ends an iteration: what the servers said of the request counts more than what went wrong here."""
        if isinstance(self._terminal, ErrorEvent):
            raise error_of(self._terminal)
        raise StopAsyncIteration if self._told_all else self._failure or StopAsyncIteration

    def _mend(self, now: float) -> Need | None:
        """Bounded tries, each after twice the patience; every chunk that comes gives all of them back."""
        if self._gap_since is None or self._progress < self._chunks.expected:
            self._gap_since, self._progress, self._replays = now, self._chunks.expected, 0
        if now - self._gap_since < PATIENCE_S * 2**self._replays:
            return None
        if self._replays == REPLAYS:
            self.fail(StreamLost(f"Chunk {self.next_seq} did not come, though it was asked for {REPLAYS} times."))
            return None
        self._gap_since = now
        self._replays += 1
        return Need.REPLAY

    async def _wait(self) -> None:
        self._reading = True
        try:
            await self._news_comes()
        finally:
            self._reading = False

    async def _news_comes(self) -> None:
        self._news.clear()
        await self._news.wait()


def error_of(event: ErrorEvent) -> HeadraceError:
    """The exception for an error event, with its body."""
    info = ErrorInfo.model_validate_json(bytes(event.error))
    return error_from_response(ErrorResponse(error=info), retry_after=event.retry_after)
