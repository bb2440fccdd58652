"""Confirmed publishing on a channel of its own, over lost connections, within a bounded time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from aiormq import Connection

from headrace.broker.rabbitmq.channel import WINDOW, Lane, Outcome, Outgoing, open_lane
from headrace.broker.rabbitmq.connection import Supervisor, backoff


class Publisher:
    """Publishes in order; any number of callers at once share its channel and are confirmed together."""

    def __init__(self, supervisor: Supervisor, prepare: Callable[[Lane], Awaitable[None]] | None = None) -> None:
        self._supervisor = supervisor
        self._prepare = prepare
        self._lane: Lane | None = None
        self._opening = asyncio.Lock()

    async def publish(self, messages: Sequence[Outgoing], doing: str) -> list[Outcome]:
        """Sends them in order; returns once the durable ones are answered, with what became of each of those.

        What a lost channel leaves unanswered is sent again: at least once. Raises BrokerUnavailable at the end of the
        time that a call may take; what was sent by then may be stored all the same.
        """
        outcomes: list[Outcome] = []
        attempt = 0
        async with self._supervisor.within(doing):
            while messages:
                if attempt:
                    await asyncio.sleep(backoff(attempt, self._supervisor.timing, random.random()))
                attempt += 1
                sent = await self._send(messages)
                messages = messages[await self._answered(sent, outcomes) :]
        return outcomes

    async def flush(self, doing: str) -> None:
        """Returns once all that was sent before is answered, over channels if need be. Raises BrokerUnavailable."""
        if self._lane is None:
            return
        async with self._supervisor.within(doing):
            lane = self._lane
            await lane.answered()
            while not lane.usable and lane.lost:
                lane = await self._usable_lane()
                await lane.answered()

    async def _answered(self, sent: Sequence[asyncio.Future[Outcome] | None], outcomes: list[Outcome]) -> int:
        """How many need not be sent again, their outcomes added.

        A channel's messages reach the broker in order: whatever stands before an answered one is there too.
        """
        done = 0
        for place, answer in enumerate(sent, start=1):
            if answer is not None:
                if (outcome := await answer) is Outcome.LOST:
                    return done
                outcomes.append(outcome)
                done = place
        return len(sent)

    async def _send(self, messages: Sequence[Outgoing]) -> list[asyncio.Future[Outcome] | None]:
        """Writes as many as it can before the channel is lost; the future of each durable one tells its outcome."""
        await self._supervisor.unblocked()
        lane = await self._usable_lane()
        sent: list[asyncio.Future[Outcome] | None] = []
        for message in messages:
            while lane.in_flight > WINDOW and lane.usable:
                lane.room.clear()
                await lane.room.wait()
            if not lane.usable:
                break
            sent.append(lane.send(message))
        return sent

    async def _usable_lane(self) -> Lane:
        if self._lane is not None and self._lane.usable:
            return self._lane
        async with self._opening:
            if self._lane is None or not self._lane.usable:
                self._lane = await self._supervisor.insist("open a channel", self._open)
            return self._lane

    async def _open(self, connection: Connection) -> Lane:
        lane = await open_lane(connection, next(self._supervisor.generations), confirms=True)
        if self._prepare is not None:
            await self._prepare(lane)
        if self._lane is not None:  # what follows on the new one must not overtake it
            for message in self._lane.lost:
                lane.send(message)
            self._lane.lost.clear()
        return lane
