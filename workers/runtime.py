"""The life of a worker process: start, ready, take jobs, drain, stop; and how a delivery is settled, whatever happens.

A role decides what to do with a job; what becomes of its delivery when that fails is decided here, once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from headrace.broker.ports import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    Delivery,
    HeaderValue,
    MessageTooLarge,
    QueueFull,
    Unroutable,
)
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import BadRequest, Conflict, Exhausted, HeadraceError, StreamLost, TooLarge
from headrace.protocol.errors import QueueFull as TooMuch
from headrace.protocol.jobs import EnvelopeError
from headrace.workers.outcome import tell_only, turn_away
from headrace.workers.probe import probe
from headrace.workers.terms import DEFAULT_TERMS, Terms

log = get_logger()

MAX_FAILURES: Final = 5
NEWER_TRIES: Final = 8
"""Times that a job of a newer version is left to newer workers: about five minutes."""
FAILURES: Final = "x-headrace-failures"
FIRST_ERROR: Final = "x-headrace-first-error"
FIRST_FAILED_AT: Final = "x-headrace-first-failed-at"
LAST_ERROR: Final = "x-headrace-last-error"
ATTEMPTS: Final = "x-headrace-attempts"
RESCUES: Final = "x-headrace-rescues"
UNVOUCHED: Final = "x-headrace-unvouched"
"""Of a message that names a client that did not send it."""
_NOT_PASSED_ON: Final = (
    "x-headrace-",
    "x-death",
    "x-first-death-",
    "x-last-death-",
    "x-delivery-count",
    "x-acquired-count",
)
_NEWER: Final = "x-headrace-newer"
_MOST_SAID: Final = 300
_AWAY_S: Final = 2.0


class Role(Protocol):
    """One kind of worker in this process."""

    name: str

    async def start(self) -> None:
        """Loads and declares what it needs; after this it is ready."""

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Works until ``stop`` is set, then finishes or hands over what it holds within ``grace`` seconds."""


async def serve(
    roles: Sequence[Role], *, stop: asyncio.Event, ready: asyncio.Event | None = None, grace: float = 30.0
) -> None:
    """Runs the roles until ``stop`` is set and they have drained. A role that fails ends them all."""
    started: list[Role] = []
    try:
        for role in roles:
            await role.start()
            started.append(role)
            log.info("worker.started", worker=role.name)
    except BaseException:  # those that hold something let go of it
        stop.set()
        await asyncio.gather(*(role.run(stop, 0.0) for role in started), return_exceptions=True)
        raise
    if ready is not None:
        ready.set()
    async with asyncio.TaskGroup() as group:
        for role in roles:
            group.create_task(role.run(stop, grace), name=role.name)
    log.info("worker.stopped", workers=[role.name for role in roles])


def worker_name(role: str) -> str:
    """A name that no process had before: a restarted one must not pass for the one that died."""
    return f"{role}-{socket.gethostname()}-{secrets.token_hex(6)}"


def backoff(tries: int, *, first: float = 1.0, most: float = 60.0) -> float:
    """Seconds to wait before try number ``tries`` (from 1): doubled each time. The retry rungs add the jitter."""
    return min(first * 2.0 ** (tries - 1), most)


async def take(
    broker: Broker,
    queue: str,
    prefetch: int,
    handle: Callable[[Delivery], Awaitable[None]],
    stop: asyncio.Event,
    *,
    terms: Terms = DEFAULT_TERMS,
) -> None:
    """Hands every delivery of a queue to ``handle``, at most ``prefetch`` unsettled at a time, until ``stop`` is set.

    Returns when the handlers have ended. A handler settles its delivery; one that raises has it settled here. Under
    ``terms.verify_clients`` a message from somebody else than the client that it names is filed under ``dead``: nobody
    is told, for the client that it names may be the victim.
    """
    if terms.verify_clients:
        handle = _only_vouched(broker, handle, terms.trusted)
    async with asyncio.TaskGroup() as handlers, broker.queues.consume(queue, prefetch) as deliveries:
        taking = handlers.create_task(_take_each(broker, deliveries, handle, handlers))
        stopping = handlers.create_task(stop.wait())
        await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
        taking.cancel()
        stopping.cancel()


async def _take_each(
    broker: Broker,
    deliveries: AsyncIterator[Delivery],
    handle: Callable[[Delivery], Awaitable[None]],
    handlers: asyncio.TaskGroup,
) -> None:
    async for delivery in deliveries:
        handlers.create_task(guarded(broker, delivery, handle))


def _only_vouched(
    broker: Broker, handle: Callable[[Delivery], Awaitable[None]], trusted: frozenset[str]
) -> Callable[[Delivery], Awaitable[None]]:
    async def checked(delivery: Delivery) -> None:
        sender = jobs.sender(delivery.body)
        if sender is None or delivery.user in trusted or delivery.user == sender.client:
            await handle(delivery)
            return
        log.error("job.not_vouched_for", queue=delivery.queue, user=delivery.user, client=sender.client)
        why = f"it names client {sender.client!r}, and user {delivery.user!r} sent it"
        await broker.queues.bury(delivery, why, {UNVOUCHED: True})

    return checked


async def guarded(broker: Broker, delivery: Delivery, handle: Callable[[Delivery], Awaitable[None]]) -> None:
    """Runs a handler; settles the delivery if it raises. Never raises but for cancellation."""
    try:
        await handle(delivery)
    except Exception as error:  # the last line of defence: one bad job must not take its neighbours down
        await settle_failed(broker, delivery, error)


async def settle_failed(broker: Broker, delivery: Delivery, error: Exception) -> None:
    """What becomes of a delivery whose handling failed: refused, tried again later, or buried."""
    try:
        match error:
            case EnvelopeError(newer=True):
                await _wait_for_newer(broker, delivery, error)
            case EnvelopeError():
                await refuse(broker, delivery, BadRequest(str(error)), bury=True)
            case HeadraceError(retryable=False) | StreamLost() | TooMuch():
                await refuse(broker, delivery, error, bury=False)
            case MessageTooLarge():
                await refuse(
                    broker, delivery, TooLarge(f"the request is too large to be passed on: {error}"), bury=False
                )
            case QueueFull():
                await broker.queues.retry(delivery, error.retry_after)
            case BrokerUnavailable() | Unroutable():  # the next role's queue comes back with its workers
                log.warning("job.broker_away", queue=delivery.queue, request_id=delivery.request_id, error=str(error))
                await broker.queues.retry(delivery, _AWAY_S)
            case _:
                await _try_again(broker, delivery, error)
    except Exception as away:  # nothing that a message holds may end the worker
        # Unsettled, it comes back when the connection is lost, at the latest with this process.
        log.error("job.not_settled", queue=delivery.queue, request_id=delivery.request_id, error=str(away))
        await _give_back(broker, delivery)


def passed_on(delivery: Delivery) -> dict[str, HeaderValue]:
    """The headers that go with a request to the next role: those of others, as traceparent. Its history stays here."""
    return {name: value for name, value in delivery.headers.items() if not name.startswith(_NOT_PASSED_ON)}


def counted(delivery: Delivery, header: str) -> int:
    """The count that a header of ours holds; 0 where a producer wrote something else there."""
    said = delivery.headers.get(header, 0)
    return max(0, said) if isinstance(said, int) else 0


async def _try_again(broker: Broker, delivery: Delivery, error: Exception) -> None:
    failures = counted(delivery, FAILURES) + 1
    log.error("job.failed", queue=delivery.queue, request_id=delivery.request_id, failures=failures, **where(error))
    history = _history(delivery, failures, error)
    if failures < MAX_FAILURES:
        await broker.queues.retry(delivery, backoff(failures), history)
        return
    why = f"the request failed {failures} times, at last with {_said(error)}"
    await refuse(broker, delivery, Exhausted(why), bury=True, history=history)


def _history(delivery: Delivery, failures: int, error: Exception) -> dict[str, HeaderValue]:
    """What an operator may want to know of a job that failed; it travels with the job, and then lies with it."""
    first: dict[str, HeaderValue] = {} if failures > 1 else {FIRST_ERROR: _said(error), FIRST_FAILED_AT: now()}
    return {**first, FAILURES: failures, LAST_ERROR: _said(error)}


def _said(error: Exception) -> str:
    """The kind of an error, and its sentence where that is ours: another's may hold what a client has sent."""
    return type(error).__name__ + (f": {error}"[:_MOST_SAID] if isinstance(error, HeadraceError | BrokerError) else "")


def where(error: Exception) -> dict[str, str]:
    """An error for the log: its kind and where it was raised, without what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "error": _said(error),
        "at": " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames[-6:])),
    }


async def _wait_for_newer(broker: Broker, delivery: Delivery, error: EnvelopeError) -> None:
    """While workers are being replaced by newer ones, one that is too old leaves a newer job to those."""
    tries = counted(delivery, _NEWER) + 1
    if tries <= NEWER_TRIES:
        await broker.queues.retry(delivery, backoff(tries, first=_AWAY_S), {_NEWER: tries})
        return
    await refuse(broker, delivery, BadRequest(f"{error}, and no newer worker has come"), bury=True)


async def refuse(
    broker: Broker,
    delivery: Delivery,
    error: HeadraceError,
    *,
    bury: bool,
    history: Mapping[str, HeaderValue] | None = None,
) -> None:
    """Tells the client, if the body says who that is, and takes the delivery out of the queue.

    What is wrong with a job is its run's outcome, unless the run is another request's; what is wrong with a message
    about a run is not. ``history`` is what is filed with a job that is buried.
    """
    sender = jobs.sender(delivery.body)
    if sender is not None and (sender.about or isinstance(error, Conflict)):
        await tell_only(broker, sender, error, to=sender)
    elif sender is not None:
        await turn_away(broker, sender, error)
    if bury:
        await broker.queues.bury(delivery, error.message, history)
        probe("job.buried")
    else:
        await broker.queues.ack(delivery)


async def _give_back(broker: Broker, delivery: Delivery) -> None:
    """Back to the queue it came from, not at once: what failed would fail again."""
    await asyncio.sleep(_AWAY_S)
    try:
        await broker.queues.release(delivery)
    except BrokerError as away:
        log.error("job.not_released", queue=delivery.queue, request_id=delivery.request_id, error=str(away))


def now() -> float:
    """The wall clock, Unix seconds: what deadlines and responses are in."""
    return time.time()
