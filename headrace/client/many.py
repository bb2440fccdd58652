"""Many requests at a time: bounded in flight, patient with full queues, tried again where that may help."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from headrace.client.door import ENDPOINTS, Body, Request, Response
from headrace.client.stream import Stream
from headrace.logs import get_logger
from headrace.protocol import errors
from headrace.protocol.base import new_request_id
from headrace.protocol.errors import HeadraceError
from headrace.protocol.jobs import Delivery, FinalEvent

log = get_logger()

LONGEST_PAUSE_S: Final = 30.0

Requests = Iterable[Request] | AsyncIterable[Request]


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a request: its final event, or the error that ended it."""

    request: Request
    request_id: str
    final: FinalEvent | None = None
    error: HeadraceError | None = None

    def response(self) -> Response:
        """The response as an object. Raises the error if there is none."""
        if self.final is None:
            raise self.error or errors.InternalError("The request has neither a response nor an error.")
        return ENDPOINTS[self.request.endpoint].response.validate_json(bytes(self.final.response))


class Submit(Protocol):
    """``Headrace.submit``."""

    async def __call__(
        self,
        endpoint: str,
        body: Body,
        *,
        model: str | None = None,
        request_id: str | None = None,
        delivery: Delivery = "stream",
        deadline: float | None = None,
        replay_ttl: float | None = None,
    ) -> Stream[Response]: ...


@dataclass(frozen=True, slots=True)
class Many:
    """How many requests are sent at a time and how often; ``deadline`` is for those that name none. Spans in seconds.

    Waits where a queue is full or a server is away, up to the request's deadline. A retryable failure is tried again
    under a new request_id (``<id>.1``, ``<id>.2``, ...), up to ``attempts`` times in all.
    """

    submit: Submit
    max_in_flight: int
    attempts: int
    deadline: float
    replay_ttl: float | None = None

    async def run(self, requests: Requests) -> AsyncGenerator[Done, None]:
        """Every request's end, in the order in which they end. Reads ``requests`` only as far as there is room."""
        ended: asyncio.Queue[Done | BaseException | None] = asyncio.Queue()
        room = asyncio.Semaphore(self.max_in_flight)
        feeding = asyncio.create_task(self._feed(requests, ended, room))
        try:
            while (done := await ended.get()) is not None:
                if isinstance(done, BaseException):
                    raise done
                room.release()
                yield done
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(
        self, requests: Requests, ended: asyncio.Queue[Done | BaseException | None], room: asyncio.Semaphore
    ) -> None:
        async def answer(request: Request) -> None:
            ended.put_nowait(await self._answer(request))

        try:
            async with asyncio.TaskGroup() as answers, aclosing(_each(requests)) as source:
                await room.acquire()
                async for request in source:
                    answers.create_task(answer(request))
                    await room.acquire()
            ended.put_nowait(None)
        except BaseExceptionGroup as group:
            ended.put_nowait(group.exceptions[0])

    async def _answer(self, request: Request) -> Done:
        first_id = request_id = new_request_id() if request.request_id is None else request.request_id
        attempt = 1
        while True:
            try:
                stream = await self._submit_patiently(request, request_id)
            except HeadraceError as error:
                return Done(request, request_id, error=error)
            try:
                return Done(request, request_id, final=await stream.outcome())
            except HeadraceError as error:
                if not error.retryable or attempt >= self.attempts:
                    return Done(request, request_id, error=error)
                log.info("request.tried_again", request_id=request_id, attempt=attempt, error=error.message)
                await asyncio.sleep(pause(attempt, error.retry_after))
            request_id = f"{first_id}.{attempt}"
            attempt += 1

    async def _submit_patiently(self, request: Request, request_id: str) -> Stream[Response]:
        until = time.monotonic() + (self.deadline if request.deadline is None else request.deadline)
        tries = 0
        while True:
            try:
                return await self.submit(
                    request.endpoint,
                    request.body,
                    model=request.model,
                    request_id=request_id,
                    delivery="final",
                    deadline=until - time.monotonic(),
                    replay_ttl=self.replay_ttl,
                )
            except (errors.QueueFull, errors.Unavailable) as error:
                tries += 1
                seconds = pause(tries, error.retry_after)
                if time.monotonic() + seconds >= until:
                    raise
                log.warning("request.waits", request_id=request_id, tries=tries, error=error.message)
                await asyncio.sleep(seconds)


def pause(tries: int, at_least: float | None) -> float:
    """Seconds before the next try: doubled each time, with jitter, never less than what was asked for."""
    return max(at_least or 0.0, random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, 0.5 * 2.0**tries))


async def _each(requests: Requests) -> AsyncGenerator[Request, None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
