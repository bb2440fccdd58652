"""A broker that does what a test says: everything sent is kept, everything told is written by the test."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from typing import NoReturn

import msgspec
from msgspec import Raw, Struct

from headrace.broker.entries import Entry, Position
from headrace.broker.ports import (
    Appended,
    Batch,
    Broker,
    BrokerError,
    Checkpoint,
    Claim,
    ClaimRequest,
    Delivery,
    HeaderValue,
    Message,
    Release,
    TopicMessage,
)
from headrace.protocol import jobs
from headrace.protocol.jobs import AnyJob, ChunkEvent, Control, ErrorCode, ErrorEvent, FinalEvent, Job, Pack, Terminal

BOUND = 10.0
"""Seconds that a test waits for what must come."""


def not_asked_for() -> NoReturn:
    raise AssertionError("a client has no business with this")


class Queues:
    """Takes what is published; ``refuse`` names errors for the next publishes, in order."""

    def __init__(self) -> None:
        self.refuse: deque[BrokerError | None] = deque()
        self._sent: asyncio.Queue[tuple[str, AnyJob | Control]] = asyncio.Queue()

    async def publish(self, queue: str, message: Message) -> None:
        error = self.refuse.popleft() if self.refuse else None
        if error is not None:
            raise error
        self._sent.put_nowait((queue, jobs.decode(message.body)))

    async def sent(self) -> tuple[str, AnyJob | Control]:
        """The next envelope that was published, with its queue."""
        return await asyncio.wait_for(self._sent.get(), BOUND)

    @property
    def waiting(self) -> int:
        return self._sent.qsize()

    async def declare(self, queues: Iterable[str]) -> None:
        not_asked_for()

    def consume(self, queue: str, prefetch: int) -> NoReturn:
        not_asked_for()

    async def ack(self, delivery: Delivery) -> None:
        not_asked_for()

    async def release(self, delivery: Delivery) -> None:
        not_asked_for()

    async def retry(self, delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue] | None = None) -> None:
        not_asked_for()

    async def bury(self, delivery: Delivery, reason: str) -> None:
        not_asked_for()

    async def depth(self, queue: str) -> int:
        not_asked_for()


class Topics:
    """Hands what is told to the one subscriber. ``end`` ends the subscription."""

    def __init__(self) -> None:
        self.pattern = ""
        self._told: asyncio.Queue[TopicMessage | None] = asyncio.Queue()

    def tell(self, key: str, body: bytes) -> None:
        if fnmatchcase(key, self.pattern):
            self._told.put_nowait(TopicMessage(key, body))

    def end(self) -> None:
        self._told.put_nowait(None)

    @asynccontextmanager
    async def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        self.pattern = pattern
        yield self._messages()

    async def _messages(self) -> AsyncIterator[TopicMessage]:
        while (message := await self._told.get()) is not None:
            yield message

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        not_asked_for()

    async def flush(self) -> None:
        not_asked_for()


class Runs:
    """Outcomes by run; ``away`` is raised by the next look-ups, in order."""

    def __init__(self) -> None:
        self.outcomes: dict[str, bytes] = {}
        self.digests: dict[str, str] = {}
        self.away: deque[BrokerError] = deque()
        self.asked = asyncio.Event()

    async def result(self, run: str) -> bytes | None:
        self.asked.set()
        if self.away:
            raise self.away.popleft()
        return self.outcomes.get(run)

    async def digest(self, run: str) -> str:
        return self.digests.get(run, "")

    async def claim(self, request: ClaimRequest) -> Claim:
        not_asked_for()

    async def release(self, run: str, role: str, epoch: int, how: Release) -> None:
        not_asked_for()

    async def beat(self, worker: str, runs: Sequence[str], heartbeat: float) -> dict[str, str]:
        not_asked_for()

    async def cancel(self, run: str, reason: str, ttl: float) -> bool:
        not_asked_for()

    async def outcome(self, run: str, event: bytes, replay_ttl: float) -> bytes:
        not_asked_for()

    async def job(self, run: str) -> bytes | None:
        not_asked_for()

    async def save(self, checkpoints: Sequence[Checkpoint]) -> list[bool]:
        not_asked_for()

    async def load(self, run: str) -> bytes | None:
        not_asked_for()


class Log:
    """A client has no business with the log."""

    async def append(self, batches: Sequence[Batch]) -> list[Appended]:
        not_asked_for()

    async def read(self, cursors: Mapping[str, Position], *, wait: float, count: int = 64) -> dict[str, list[Entry]]:
        not_asked_for()

    def wake(self) -> None:
        not_asked_for()

    async def exists(self, runs: Sequence[str]) -> list[bool]:
        not_asked_for()


class Scripted:
    """The four ports, and words for a test to play the servers with."""

    def __init__(self) -> None:
        self.queues = Queues()
        self.topics, self.streams = Topics(), Topics()
        self.runs = Runs()
        self.broker = Broker(self.queues, self.topics, Log(), self.runs, self.streams)

    async def job(self) -> Job:
        """The next thing sent, which must be a job."""
        _, envelope = await self.queues.sent()
        assert isinstance(envelope, Job)
        return envelope

    def tell(self, job: Job, *events: Struct, pack: bool = False) -> None:
        """Publishes events under the job's topic; as one pack if told so."""
        key = f"{job.client}.any.{job.topic}"
        bodies = [jobs.encode(event) for event in events]
        if pack:
            bodies = [jobs.encode(Pack(events=[Raw(body) for body in bodies]))]
        for body in bodies:
            (self.streams if job.via == "redis" else self.topics).tell(key, body)

    def keep(self, event: Terminal) -> None:
        """Makes the event the stored outcome of its run, without telling it."""
        self.runs.outcomes[event.run] = jobs.encode(event)


def chunk(job: Job, seq: int, text: str = "") -> ChunkEvent:
    """Chunk ``seq`` of a chat stream, saying ``text`` or its own number."""
    body = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": job.model,
        "choices": [{"index": 0, "delta": {"content": text or f"{seq} "}}],
    }
    return ChunkEvent(client=job.client, request_id=job.request_id, seq=seq, chunk=Raw(msgspec.json.encode(body)))


def final(job: Job, *, chunks: int = 0, text: str = "done") -> FinalEvent:
    """The outcome of a chat that was answered."""
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": job.model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    return FinalEvent(
        client=job.client,
        request_id=job.request_id,
        event_id=job.run,
        response=Raw(msgspec.json.encode(body)),
        chunks=chunks,
    )


def error(
    job: Job,
    code: ErrorCode,
    status: int,
    kind: str,
    *,
    message: str = "It failed.",
    param: str | None = None,
    retryable: bool = False,
    chunks: int = 0,
) -> ErrorEvent:
    """The outcome of a request that was not answered."""
    body = {"message": message, "type": kind, "param": param, "code": status}
    return ErrorEvent(
        client=job.client,
        request_id=job.request_id,
        event_id=job.run,
        code=code,
        status=status,
        error=Raw(msgspec.json.encode(body)),
        retryable=retryable,
        chunks=chunks,
    )
