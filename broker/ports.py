"""The four ports: everything that Headrace asks of a transport.

WorkQueue is RabbitMQ's part, TokenLog and RunStore are Redis's; ClientTopics both have, and a client chooses for each
request. ``broker.embedded`` is their twin in one process. ``broker.contract`` says in code what is promised here in
words; every implementation passes it. All raise ``BrokerUnavailable`` when the server stays away longer than the call
may take.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, Protocol, TypeAlias

from headrace.broker.entries import Entry, NewEntry, Position
from headrace.protocol.jobs import Via

Role = Literal["render", "generate", "derender"]
HeaderValue: TypeAlias = str | int | float | bool


class BrokerError(Exception):
    """A transport could not do what was asked."""


class BrokerUnavailable(BrokerError):
    """The server is away, or did not answer within the bound. Try again later; the write may have happened."""


class QueueFull(BrokerError):
    """The queue rejects more: its length limit is reached. Try again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unroutable(BrokerError):
    """No such queue: the role or the model is not served here."""


class MessageTooLarge(BrokerError):
    """The body is over the broker's limit of ``limit`` bytes; nothing was sent."""

    def __init__(self, message: str, limit: int = 0) -> None:
        super().__init__(message)
        self.limit = limit


class TopologyDrift(BrokerError):
    """A queue or exchange exists with other arguments than ours: names it and both values."""


# ------------------------------------------------------------------------------------------------- work queues


@dataclass(frozen=True, slots=True)
class Message:
    """A job on its way out: a JSON body; ``request_id`` becomes the correlation id.

    At ``expires``, in Unix seconds, the broker itself gives up a message that still waits: it goes to the intake queue.
    """

    body: bytes
    request_id: str = ""
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job that this process holds: nobody else has it until it is settled or the connection is lost.

    ``token`` is the transport's own (channel generation and tag); ``redelivered`` says that someone held it before.
    ``user`` is who published it, where the broker vouches for that; ``gave_up`` is why the broker put it into the
    intake queue: it had expired, or it had come back too often.
    """

    queue: str
    body: bytes
    request_id: str
    headers: Mapping[str, HeaderValue]
    redelivered: bool
    token: object
    user: str | None = None
    gave_up: Literal["expired", "rejected", "delivery_limit", "maxlen"] | None = None


class WorkQueue(Protocol):
    """Durable queues of jobs, at least once."""

    async def declare(self, queues: Iterable[str]) -> None:
        """Makes the queues exist, with everything around them (retry rungs, dead letters). Raises TopologyDrift."""

    async def publish(self, queue: str, message: Message) -> None:
        """Returns once the message is durable in the queue. Raises Unroutable, QueueFull, MessageTooLarge."""

    def consume(self, queue: str, prefetch: int) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """Deliveries, at most ``prefetch`` unsettled at a time. Goes on by itself after a lost connection.

        Leaving the context stops taking; what was taken can still be settled.
        """

    async def ack(self, delivery: Delivery) -> None:
        """Done with it. On a connection that is gone this is a counted no-op: the broker delivers it again."""

    async def release(self, delivery: Delivery) -> None:
        """Gives it back to its queue, at once."""

    async def retry(self, delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """Gives it back to its queue after about ``delay`` seconds (the nearest rung), headers added; then acks."""

    async def move(self, delivery: Delivery, queue: str, expires: float | None = None) -> None:
        """Hands it to another queue, with the headers that it has; then acks. Raises Unroutable, QueueFull."""

    async def bury(self, delivery: Delivery, reason: str, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """Files it under ``dead`` with the reason and where it came from, headers added; then acks."""

    async def depth(self, queue: str) -> int:
        """How many messages wait in the queue. Raises Unroutable."""


# ------------------------------------------------------------------------------------------------- client topics


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """An event, or a pack of them, under a routing key ``<client>.<kind>[.<topic>]``. Durable ones are confirmed."""

    key: str
    body: bytes
    durable: bool = False
    request_id: str = ""


class ClientTopics(Protocol):
    """Events to clients. Nobody listening is no error: the outcome stays in the run store."""

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        """Sends them in order. Returns once the durable ones are confirmed; one that nobody hears is counted."""

    async def flush(self) -> None:
        """Returns once the server has all that was published before. Raises BrokerUnavailable."""

    def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AbstractAsyncContextManager[AsyncIterator[TopicMessage]]:
        """Messages whose key matches the pattern (``*`` one word, ``#`` any number of words; the first is a client).

        The queue exists once the context is entered. Without a name it is this process's own and dies with it; with a
        name it is durable: its message is settled when the next one is asked for, or when the context is left without
        an error. It holds at most ``limit`` messages and drops the oldest: a slow client blocks nobody.
        """


# ------------------------------------------------------------------------------------------------- the token log


class Append(StrEnum):
    """What became of a batch."""

    STORED = "stored"
    ALREADY = "already"
    """It was there: an earlier reply was lost."""
    FENCED = "fenced"
    """Another epoch, or an outcome, has taken over. Stop."""
    LOST = "lost"
    """The log is gone or shorter than it was: acknowledged writes were lost. End with stream_lost."""


@dataclass(frozen=True, slots=True)
class Appended:
    answer: Append
    cancelled: str | None = None
    """The reason, if somebody asked for the run to be cancelled."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The entries that one run adds at once: all of them or none.

    ``after`` is the last entry that the writer knows of; the entries get the ids ``<after.epoch>-<k>``,
    ``<after.epoch>-<k + 1>``, ... where k - 1 is how many chunks precede them. An ``end`` may only come last.
    """

    run: str
    after: Position
    k: int
    entries: Sequence[NewEntry]

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("entries: a batch has at least one")
        if any(entry.kind == "end" for entry in self.entries[:-1]):
            raise ValueError("entries: an end may only come last")

    @property
    def last(self) -> Position:
        """The position of its last entry once it is stored: ``after`` of the next batch."""
        return Position(self.after.epoch, self.k + len(self.entries) - 1)


class TokenLog(Protocol):
    """One stream of entries per run: dense, fenced, never trimmed before the outcome."""

    async def append(self, batches: Sequence[Batch]) -> list[Appended]:
        """Adds each batch if its epoch is the current one and ``after`` is the last entry. One round trip for all."""

    async def read(self, cursors: Mapping[str, Position], *, wait: float, count: int = 64) -> dict[str, list[Entry]]:
        """Entries after each run's cursor, at most ``count`` a run; waits up to ``wait`` seconds for the first.

        A run whose log does not exist is left out; ``exists`` tells.
        """

    def wake(self) -> None:
        """Makes a waiting ``read`` of this process return at once (its set of runs has changed)."""

    async def exists(self, runs: Sequence[str]) -> list[bool]:
        """Whether each run's log is there. A deleted log never wakes a waiting read."""


# ------------------------------------------------------------------------------------------------- the run store


class ClaimAnswer(StrEnum):
    NEW = "new"
    """The run is yours, under the epoch given."""
    MINE = "mine"
    """You hold it already (the same worker, the same epoch): adopt this delivery in place of the old one.

    A worker that does not know of it had its last claim answered and did not hear the answer: it takes it as NEW.
    """
    ALIVE = "alive"
    """Another worker holds it and lives: park the delivery for one heartbeat. No attempt is used."""
    ENDED = "ended"
    """Role generate only: the log has its ``end``, so the hand-over is durable; settle the delivery."""
    DONE = "done"
    """It has an outcome: tell it again, settle the delivery."""
    CANCELLED = "cancelled"
    """Somebody cancelled it before it was claimed: write that outcome."""
    EXPIRED = "expired"
    """Its deadline has passed: write that outcome."""
    CONFLICT = "conflict"
    """The same request_id came with another body: the run's first digest stands, whichever role brought it."""
    SUSPECT = "suspect"
    """Its last holders died, and this worker is just trying another such run: park the delivery. No attempt is used."""
    EXHAUSTED = "exhausted"
    """Too many attempts or rescues: write that outcome and bury the delivery."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A worker asks for a run. Times are Unix seconds, spans seconds; the store's own clock decides.

    ``digest`` is the fingerprint of what the client asks for, the same for every role of the run; empty for a role
    whose job does not say it. ``job`` is what a later role needs once (kept under the run), ``redelivered`` whether the
    broker says that someone held the delivery before.

    When a worker dies, nobody knows which of its runs took it down. Each counts one rescue, up to ``suspect_after``;
    from then on a run is a suspect, is taken only under ``trial`` (the worker tries one suspect at a time), and only a
    death during its own trial counts. So a run that takes workers down is found, and its neighbours are not blamed.
    """

    run: str
    role: Role
    worker: str
    digest: str
    deadline: float
    replay_ttl: float
    heartbeat: float
    redelivered: bool = False
    job: bytes | None = None
    max_attempts: int = 5
    max_rescues: int = 3
    suspect_after: int = 2
    trial: bool = True

    @property
    def suspect_from(self) -> int:
        """Rescues from which on the run is a suspect: early enough that its last one is its own trial's."""
        return max(1, min(self.suspect_after, self.max_rescues))


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer. ``chunks`` is how many chunks are in the log: k of the next one is ``chunks + 1``.

    Under role generate the last entry is now ``begin``, at Position(epoch, 0), unless the answer is MINE.
    """

    answer: ClaimAnswer
    epoch: int = 0
    chunks: int = 0
    attempts: int = 0
    rescues: int = 0
    outcome: bytes | None = None
    reason: str | None = None
    job: bytes | None = None
    """Role derender: what an earlier claim stored for later roles."""
    trial: bool = False
    """The run is taken as a suspect: no other one is to be taken until it is let go of or has ended."""


class Release(StrEnum):
    """Why a worker lets go of a run that has no outcome."""

    HANDOVER = "handover"
    """Shutdown: no attempt is used."""
    FAILED = "failed"
    """It went wrong: one attempt is used."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a run has been told under a derender epoch; what ``state`` holds is the worker's own affair."""

    run: str
    epoch: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one client may have under way at a time; 0 is no limit. ``tokens`` counts prompts and what may come."""

    requests: int = 0
    tokens: int = 0

    def refusal(self, client: str, requests: int, tokens: int, more: int) -> str | None:
        """Why a request of ``more`` tokens may not join what the client has under way; None if it may."""
        if 0 < self.requests <= requests:
            return f"client {client!r} has {requests} requests under way, its limit is {self.requests}"
        if 0 < self.tokens < tokens + more:
            return f"client {client!r} has {tokens} tokens under way and asks for {more}, its limit is {self.tokens}"
        return None


MAX_REASON: Final = 200
"""Characters of the reason for a cancellation that are kept."""


class RunStore(Protocol):
    """Who holds a run, whether it lives, what was asked of it, and its one outcome."""

    async def claim(self, request: ClaimRequest) -> Claim:
        """Takes the run, or says why not. Role generate also starts its log (``begin``). One script, atomic.

        A holder is replaced only when its heartbeat is gone or it let go: never by time alone.
        """

    async def release(self, run: str, role: Role, epoch: int, how: Release) -> None:
        """Lets go of a run; no-op if the epoch is not the current one."""

    async def beat(self, worker: str, runs: Sequence[str], heartbeat: float) -> dict[str, str]:
        """Keeps the worker alive for ``heartbeat`` seconds in the partitions of these runs.

        Returns the runs that were asked to be cancelled, with the reason.
        """

    async def cancel(self, run: str, reason: str, ttl: float) -> bool:
        """Asks for a run to be cancelled. True: nobody alive holds it, so the caller writes the outcome.

        The first reason stands, its first ``MAX_REASON`` characters.
        """

    async def outcome(self, run: str, event: bytes, replay_ttl: float) -> bytes:
        """Writes the run's outcome; the first writer wins. Returns the outcome that stands."""

    async def refuse(self, run: str, digest: str, event: bytes, replay_ttl: float) -> bytes | None:
        """Writes the outcome of a request that cannot be served; the first writer wins. Returns the one that stands.

        None, and nothing is written, where the run is that of another request (another digest) under the same id;
        one without a digest is refused only where the run has none.
        """

    async def reopen(self, run: str, deadline: float, replay_ttl: float, *, fresh: bool) -> None:
        """Takes back a run's outcome and cancellation, and clears its ledger, so that it can be claimed again.

        ``fresh`` forgets its log and checkpoint too: it begins anew, under a later epoch than any before. Who held it
        is fenced. A run that is not known stays so.
        """

    async def result(self, run: str) -> bytes | None:
        """The outcome, if there is one."""

    async def digest(self, run: str) -> str:
        """Fingerprint of the request that the run is; empty while no claim or refusal has said it."""

    async def job(self, run: str) -> bytes | None:
        """What the claim stored for later roles."""

    async def save(self, checkpoints: Sequence[Checkpoint]) -> list[bool]:
        """Stores them, in one round trip. False for each whose derender epoch is not the current one."""

    async def load(self, run: str) -> bytes | None:
        """The state of the last checkpoint that was stored."""

    async def put_body(self, run: str, name: str, body: bytes, ttl: float | None) -> None:
        """Keeps a job's body that is too large for a queue, for ``ttl`` seconds; None is until it is dropped.

        ``name`` tells the bodies of one run apart. Kept already, only its time is prolonged; never shortened.
        """

    async def get_body(self, run: str, name: str) -> bytes | None:
        """The body, if it is still kept."""

    async def drop_body(self, run: str, name: str) -> None:
        """Forgets the body."""

    async def enter(self, client: str, run: str, tokens: int, until: float, allowance: Allowance) -> str | None:
        """Counts a run as under way for its client until ``leave``, at the latest until then (Unix seconds).

        Entering again changes nothing. Returns None, or why it may not, with the bound; then it is not counted. More
        tokens than the client may have at all are refused each time.
        """

    async def leave(self, client: str, run: str) -> None:
        """The run is under way no more."""

    async def report(self, model: str, worker: str, vitals: bytes, ttl: float) -> None:
        """Says how a worker is doing, a JSON object; kept for ``ttl`` seconds."""

    async def reports(self, model: str) -> dict[str, bytes]:
        """What the workers of a model have last said, by worker."""

    async def memory(self) -> float:
        """Share of the memory that the store may use which it does use, 0 to 1 and a little above."""


@dataclass(frozen=True, slots=True)
class Broker:
    """The four ports together; the client topics twice, once for each way that a client may choose."""

    queues: WorkQueue
    topics: ClientTopics
    log: TokenLog
    runs: RunStore
    streams: ClientTopics
    """The client topics on Redis."""
    troubles: Callable[[], Sequence[str]] = tuple
    """Says why it cannot be used at the moment, a sentence for each server; nothing if it can."""

    def via(self, way: Via) -> ClientTopics:
        """The client topics of this way."""
        return self.streams if way == "redis" else self.topics
