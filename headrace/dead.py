"""Requests that were given up, as an operator finds them under ``dead``: looked at, sent again, or thrown away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from headrace.broker.ports import (
    Broker,
    Delivery,
    HeaderValue,
    Message,
    MessageTooLarge,
    QueueFull,
    Role,
    Unroutable,
)
from headrace.protocol import jobs
from headrace.protocol.errors import StreamLost
from headrace.protocol.jobs import DEAD_QUEUE, LANES, DerenderJob, EnvelopeError, FinalEvent, Job, Ref, RenderJob
from headrace.workers.runtime import UNVOUCHED

MOST: Final = 10_000
"""Dead letters that are looked at in one go."""
_PATIENCE_S: Final = 10.0
_OURS: Final = "x-headrace-"
_PAST: Final = (_OURS, "x-delivery-count", "x-acquired-count")
"""Headers that tell of what happened to a message: one that is sent again has no past."""


class NotRedrivable(Exception):
    """The dead letter cannot be sent again: says why."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One of them. ``job`` is None where the body is no job that can be read, and a Ref where the body is gone;
    ``unreadable`` says what is wrong with it."""

    delivery: Delivery
    request_id: str
    client: str
    job: Job | None
    unreadable: str = ""

    @classmethod
    def of(cls, delivery: Delivery) -> DeadLetter:
        """What the delivery tells of itself."""
        job: Job | None = None
        unreadable = "its body is no job"
        try:
            envelope = jobs.decode(delivery.body)
        except (EnvelopeError, StreamLost) as error:
            job, unreadable = jobs.ref_of(delivery.body), str(error)
        else:
            if isinstance(envelope, Job):
                job, unreadable = envelope, ""
        said = jobs.sender(delivery.body)
        return cls(
            delivery=delivery,
            request_id=delivery.request_id if said is None else said.request_id,
            client="" if said is None else said.client,
            job=job,
            unreadable=unreadable,
        )

    def header(self, name: str) -> HeaderValue | None:
        """One of our headers."""
        return self.delivery.headers.get(_OURS + name)

    @property
    def model(self) -> str:
        """The model that was asked for."""
        return self.queue.partition(".")[2] if self.job is None else self.job.model

    @property
    def queue(self) -> str:
        """The queue that it was given up in."""
        return str(self.header("queue") or "")

    @property
    def reason(self) -> str:
        """Why it was given up."""
        gave_up = self.delivery.gave_up
        return str(self.header("reason") or (f"the broker gave it up: {gave_up}" if gave_up else ""))

    @property
    def at(self) -> float:
        """When."""
        at = self.header("at")
        return float(at) if isinstance(at, int | float) else 0.0

    def told(self) -> dict[str, object]:
        """Everything but the body, which may hold what only the client is to see."""
        history = {
            name.removeprefix(_OURS).replace("-", "_"): value
            for name, value in sorted(self.delivery.headers.items())
            if name.startswith(_OURS)
        }
        job = {} if self.job is None else _terms_of(self.job)
        return {
            "request_id": self.request_id,
            "client": self.client,
            "model": self.model,
            "reason": self.reason,
            **history,
            "traceparent": self.delivery.headers.get("traceparent"),
            "bytes": len(self.delivery.body),
            "job": job or None,
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which dead letters are meant: all that fit every term given. Times are Unix seconds."""

    request_ids: frozenset[str] = frozenset()
    client: str | None = None
    model: str | None = None
    reason: str | None = None
    before: float | None = None
    after: float | None = None

    def __contains__(self, letter: object) -> bool:
        return isinstance(letter, DeadLetter) and all(
            (
                not self.request_ids or letter.request_id in self.request_ids,
                self.client is None or letter.client == self.client,
                self.model is None or letter.model == self.model,
                self.reason is None or self.reason.lower() in letter.reason.lower(),
                self.before is None or letter.at < self.before,
                self.after is None or letter.at > self.after,
            )
        )


async def letters(broker: Broker) -> AsyncGenerator[DeadLetter, None]:
    """The dead letters, oldest first, at most ``MOST``. Those that are not acked meanwhile stay where they are.

    Raises BrokerError, Unroutable if nothing was ever declared.
    """
    count = min(await broker.queues.depth(DEAD_QUEUE), MOST)
    if not count:
        return
    seen: list[Delivery] = []
    async with broker.queues.consume(DEAD_QUEUE, prefetch=count) as deliveries:
        try:
            for _ in range(count):
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        delivery = await anext(deliveries)
                except TimeoutError:
                    return  # somebody else has taken the rest
                seen.append(replace(delivery, body=b""))
                yield DeadLetter.of(delivery)
        finally:  # one that was acked is not given back any more
            for each in seen:
                await broker.queues.release(each)


async def redrive(broker: Broker, letter: DeadLetter, *, deadline: float | None = None) -> None:
    """Sends a request on its way again, with its ledger cleared, under a new deadline: ``deadline`` seconds from now,
    or as many as it had. It gets one more outcome, with an event_id of its own.

    A request begins anew; a run that could only not be told goes on from its log. The letter is acked last: after a
    crash it is still there, and a job that was sent twice runs once. Raises NotRedrivable, BrokerError.
    """
    try:
        job = await _redrivable(broker, letter)
        again, queue = _again(job, time.time(), deadline), _queue_of(job, letter.queue)
        await broker.queues.depth(queue)  # where nobody serves it, its outcome stands
        await broker.runs.reopen(
            again.run, again.deadline or 0.0, again.replay_ttl, fresh=not isinstance(again, DerenderJob)
        )
        headers = {name: said for name, said in letter.delivery.headers.items() if not name.startswith(_PAST)}
        await broker.queues.publish(queue, Message(jobs.encode(again), again.request_id, headers, again.deadline))
    except (Unroutable, QueueFull, MessageTooLarge) as error:
        raise NotRedrivable(f"request {letter.request_id!r}: {error}") from None
    await purge(broker, letter)


async def purge(broker: Broker, letter: DeadLetter) -> None:
    """Throws a dead letter away, and first what was kept for it: nobody else knows of that."""
    if letter.client:
        name = letter.job.name if isinstance(letter.job, Ref) else jobs.body_name(letter.delivery.body)
        await broker.runs.drop_body(jobs.run_of(letter.client, letter.request_id), name)
    await broker.queues.ack(letter.delivery)


async def each(
    broker: Broker, wanted: Wanted, act: Callable[[DeadLetter], Awaitable[None]], *, limit: int | None = None
) -> int:
    """Awaits ``act`` for each that is wanted, one after the other, up to ``limit``. Returns how many there were."""
    done = 0
    async with aclosing(letters(broker)) as found:
        async for letter in found:
            if letter in wanted:
                await act(letter)
                done += 1
                if done == limit:
                    break
    return done


async def _redrivable(broker: Broker, letter: DeadLetter) -> Job:
    why = letter.unreadable
    if letter.delivery.headers.get(UNVOUCHED):
        why = "another user than the client that it names has sent it"
    elif not why and letter.job is not None:
        stands = await broker.runs.result(letter.job.run)
        if stands is None or not isinstance(jobs.decode_terminal(stands), FinalEvent):
            return letter.job
        why = "it has been answered"
    raise NotRedrivable(f"request {letter.request_id!r}: {why}")


def _again(job: Job, now: float, span: float | None) -> Job:
    """The job as it is sent once more. When it was submitted stands in every chunk, so a run that is only to be told
    keeps that."""
    stamped = jobs.stamp(job, now)
    submitted_at, deadline = stamped.submitted_at or now, stamped.deadline or now
    return msgspec.structs.replace(
        stamped,
        redrive=job.redrive + 1,
        submitted_at=submitted_at if isinstance(job, DerenderJob) else now,
        deadline=now + max(deadline - submitted_at if span is None else span, 1.0),
        counted=False,
    )


def _queue_of(job: Job, origin: str) -> str:
    """Where it came from, if that is a lane of its role; else the normal one."""
    match job:
        case RenderJob():
            role: Role = "render"
        case DerenderJob():
            role = "derender"
        case _:
            role = "generate"
    lanes = [jobs.queue_of(role, job.model, lane) for lane in LANES]
    return origin if origin in lanes else jobs.queue_of(role, job.model)


def _terms_of(job: Job) -> dict[str, object]:
    """What the envelope says, without the request itself."""
    private = {"body", "request", "source"}
    return {name: getattr(job, name) for name in job.__struct_fields__ if name not in private}
