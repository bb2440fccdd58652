"""The life of a worker process: start, ready, take jobs, drain, stop; and how a delivery is settled, whatever happens.

A role decides what to do with a job; what becomes of its delivery when that fails is decided here, once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

from headrace.broker.ports import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    Delivery,
    MessageTooLarge,
    QueueFull,
    Unroutable,
)
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import BadRequest, Exhausted, HeadraceError, TooLarge
from headrace.protocol.jobs import EnvelopeError
from headrace.workers.outcome import conclude, failed, tell_only

log = get_logger()

HEARTBEAT_S: Final = 6.0
"""A worker that has not shown itself for so long is taken for dead."""
BEATS_PER_LIFE: Final = 3
"""How often within that time it shows itself; also how often a run of a dead one is looked for."""
MAX_FAILURES: Final = 5
_FAILURES: Final = "x-headrace-failures"
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
    for role in roles:
        await role.start()
        log.info("worker.started", worker=role.name)
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
    broker: Broker, queue: str, prefetch: int, handle: Callable[[Delivery], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Hands every delivery of a queue to ``handle``, at most ``prefetch`` unsettled at a time, until ``stop`` is set.

    Returns when the handlers have ended. A handler settles its delivery; one that raises has it settled here.
    """
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
            case EnvelopeError():
                await refuse(broker, delivery, BadRequest(str(error)), bury=True)
            case HeadraceError(retryable=False):
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


def counted(delivery: Delivery, header: str) -> int:
    """The count that a header of ours holds; 0 where a producer wrote something else there."""
    said = delivery.headers.get(header, 0)
    return max(0, said) if isinstance(said, int) else 0


async def _try_again(broker: Broker, delivery: Delivery, error: Exception) -> None:
    failures = counted(delivery, _FAILURES) + 1
    log.error("job.failed", queue=delivery.queue, request_id=delivery.request_id, failures=failures, exc_info=error)
    if failures < MAX_FAILURES:
        await broker.queues.retry(delivery, backoff(failures), {_FAILURES: failures})
        return
    said = f": {error}" if isinstance(error, HeadraceError) else ""
    why = f"the request failed {failures} times, at last with {type(error).__name__}{said}"
    await refuse(broker, delivery, Exhausted(why), bury=True)


async def refuse(broker: Broker, delivery: Delivery, error: HeadraceError, *, bury: bool) -> None:
    """Tells the client, if the body says who that is, and takes the delivery out of the queue.

    What is wrong with a job is its run's outcome; what is wrong with a message about a run is not.
    """
    sender = jobs.sender(delivery.body)
    if sender is not None and sender.controls:
        await tell_only(broker, sender, error, to=sender)
    elif sender is not None:
        await conclude(broker, failed(sender, error), to=sender)
    if bury:
        await broker.queues.bury(delivery, error.message)
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
