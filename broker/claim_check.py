"""Large jobs wait in the run store; on their queue a small note stands for each.

A queue keeps every body on every replica, a broker closes the channel over one beyond its limit, and each retry sends
it again. So a body over ``inline`` bytes is stored under its run first, and is put back when the job is delivered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final, Self

from headrace.broker.ports import BrokerError, Delivery, HeaderValue, Message, MessageTooLarge, RunStore, WorkQueue
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import StreamLost
from headrace.protocol.jobs import EnvelopeError, Job, Ref

log = get_logger()

MOST: Final = 64 << 20
"""Bytes of the largest body that is taken."""
AWAY_S: Final = 2.0


class ClaimCheck:
    """A WorkQueue that keeps the bodies over ``inline`` bytes in the run store, up to ``most`` bytes.

    A delivery whose body is not stored any more comes with the note itself, of which ``jobs.decode`` says so.
    """

    def __init__(self, queues: WorkQueue, runs: RunStore, *, inline: int, most: int = MOST) -> None:
        self._queues = queues
        self._runs = runs
        self._inline = inline
        self._most = most

    async def declare(self, queues: Iterable[str]) -> None:
        """As the queue that is wrapped."""
        await self._queues.declare(queues)

    async def publish(self, queue: str, message: Message) -> None:
        """Stores a large body before the note that stands for it is published. Raises MessageTooLarge beyond that."""
        if len(message.body) > self._inline:
            message = await self._checked_in(message)
        await self._queues.publish(queue, message)

    async def _checked_in(self, message: Message) -> Message:
        body = message.body
        if len(body) > self._most:
            raise MessageTooLarge(f"body: {len(body)} bytes are over the limit of {self._most}", self._most)
        try:
            job = jobs.decode(body)
        except (EnvelopeError, StreamLost):
            return message  # whoever takes it says what is wrong with it
        if not isinstance(job, Job):
            return message
        now = time.time()
        job = jobs.stamp(job, now)
        ref = Ref(
            **jobs.follow_on(job),
            name=jobs.body_name(body),
            bytes=len(body),
            digest=jobs.digest_of(job),
        )
        await self._runs.put_body(job.run, ref.name, body, max(0.0, (job.deadline or now) - now) + job.replay_ttl)
        return replace(message, body=jobs.encode(ref))

    @asynccontextmanager
    async def consume(self, queue: str, prefetch: int) -> AsyncIterator[AsyncIterator[Delivery]]:
        """Deliveries with their bodies."""
        async with self._queues.consume(queue, prefetch) as deliveries:
            whole = _Whole(self, deliveries)
            try:
                yield whole
            finally:
                for delivery in whole.put_off:
                    await self.release(delivery)

    async def whole(self, delivery: Delivery) -> Delivery:
        """The delivery with its body, if that is stored elsewhere."""
        ref = jobs.ref_of(delivery.body)
        body = None if ref is None else await self._runs.get_body(ref.run, ref.name)
        return delivery if body is None else replace(delivery, body=body)

    async def ack(self, delivery: Delivery) -> None:
        """As the queue that is wrapped; the body goes by itself in time."""
        await self._queues.ack(delivery)

    async def release(self, delivery: Delivery) -> None:
        """As the queue that is wrapped."""
        await self._queues.release(delivery)

    async def retry(self, delivery: Delivery, delay: float, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """As the queue that is wrapped: the note is sent again, not the body."""
        await self._queues.retry(delivery, delay, headers)

    async def move(self, delivery: Delivery, queue: str, expires: float | None = None) -> None:
        """As the queue that is wrapped."""
        await self._queues.move(delivery, queue, expires)

    async def bury(self, delivery: Delivery, reason: str, headers: Mapping[str, HeaderValue] | None = None) -> None:
        """As the queue that is wrapped; the body then stays until it is dropped."""
        await self._keep(delivery)
        await self._queues.bury(delivery, reason, headers)

    async def _keep(self, delivery: Delivery) -> None:
        if len(delivery.body) <= self._inline:
            return
        sender = jobs.sender(delivery.body)
        if sender is not None:
            await self._runs.put_body(sender.run, jobs.body_name(delivery.body), delivery.body, None)

    async def depth(self, queue: str) -> int:
        """As the queue that is wrapped."""
        return await self._queues.depth(queue)


class _Whole:
    """Deliveries, each with its body put back. One whose body cannot be fetched now comes again in a while."""

    def __init__(self, check: ClaimCheck, deliveries: AsyncIterator[Delivery]) -> None:
        self._check = check
        self._deliveries = deliveries
        self.put_off: deque[Delivery] = deque()
        """Those whose asker went away before it had the body: for the next one who asks."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while True:
            delivery = self.put_off.popleft() if self.put_off else await anext(self._deliveries)
            if not jobs.is_ref(delivery.body):
                return delivery
            try:
                return await self._check.whole(delivery)
            except asyncio.CancelledError:
                self.put_off.append(delivery)
                raise
            except BrokerError as away:
                await self._later(delivery, away)

    async def _later(self, delivery: Delivery, away: BrokerError) -> None:
        log.warning("body.away", queue=delivery.queue, request_id=delivery.request_id, error=str(away))
        try:
            await self._check.retry(delivery, AWAY_S)
        except BrokerError as error:  # unsettled, it comes back when the connection is lost
            log.error("body.not_retried", queue=delivery.queue, request_id=delivery.request_id, error=str(error))
