"""Client topics in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

from headrace.broker.ports import TopicMessage, TopologyDrift

_REMEMBERED: Final = 4096
"""Keys of which it is remembered who hears them."""


class Topics:
    """The subscriptions, and who hears which key."""

    def __init__(self) -> None:
        self._named: dict[str, Subscription] = {}
        self._all: dict[Subscription, None] = {}
        self._heard_by: dict[str, list[Subscription]] = {}
        self.unheard = 0

    def publish(self, message: TopicMessage) -> None:
        hearers = self._heard_by.get(message.key)
        if hearers is None:
            hearers = self._route(message.key)
        for subscription in hearers:
            subscription.add(message)
        self.unheard += message.durable and not hearers

    def _route(self, key: str) -> list[Subscription]:
        if len(self._heard_by) >= _REMEMBERED:
            self._heard_by.clear()
        words = key.split(".")
        hearers = self._heard_by[key] = [each for each in self._all if each.hears(words)]
        return hearers

    def open(self, pattern: str, name: str | None, limit: int) -> Subscription:
        """A new subscription, or the one of this name, which listens to this pattern as well."""
        subscription = self._named.get(name) if name is not None else None
        if subscription is None:
            subscription = Subscription(limit)
        elif subscription.limit != limit:
            raise TopologyDrift(f"subscription {name!r} exists with limit = {subscription.limit}, ours is {limit}")
        if name is not None:
            self._named[name] = subscription
        subscription.patterns.add(tuple(pattern.split(".")))
        self._all[subscription] = None
        self._heard_by.clear()
        return subscription

    def drop(self, subscription: Subscription) -> None:
        self._all.pop(subscription, None)
        self._heard_by.clear()


class Subscription:
    """The last ``limit`` messages that were not yet heard."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.patterns: set[tuple[str, ...]] = set()
        self._messages: deque[TopicMessage] = deque(maxlen=limit)
        self._idle: list[asyncio.Future[None]] = []

    def hears(self, words: Sequence[str]) -> bool:
        return any(matches(pattern, words) for pattern in self.patterns)

    def add(self, message: TopicMessage) -> None:
        self._messages.append(message)
        if self._idle:
            self._stir()

    def give_back(self, message: TopicMessage) -> None:
        """Puts it first again, unless so many came since that it would be dropped by now."""
        if len(self._messages) < self.limit:
            self._messages.appendleft(message)
            self._stir()

    async def take(self) -> TopicMessage:
        """The oldest one, when there is one."""
        while not self._messages:
            waiter = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._idle:
                    self._idle.remove(waiter)
        return self._messages.popleft()

    def _stir(self) -> None:
        idle, self._idle = self._idle, []
        for waiter in idle:
            if not waiter.done():
                waiter.set_result(None)


class EmbeddedTopics:
    """The ClientTopics of ports, in one process."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    @property
    def unheard(self) -> int:
        """How many durable messages nobody subscribed to."""
        return self._topics.unheard

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        """Sends them in order."""
        for message in messages:
            self._topics.publish(message)
        await asyncio.sleep(0)  # a publisher in a loop must not keep its clients from running

    async def flush(self) -> None:
        """Nothing is under way: a message is there once it was published."""

    @asynccontextmanager
    async def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        """Messages whose key matches the pattern. A name subscribed to again under another pattern listens to both."""
        if limit < 2:
            raise ValueError(f"limit: {limit} is less than 2 messages")
        subscription = self._topics.open(pattern, name, limit)
        listener = Listener(subscription)
        try:
            yield listener
        except BaseException:
            listener.give_back()
            raise
        finally:
            if name is None:
                self._topics.drop(subscription)


class Listener:
    """Gives out messages; one is settled when the next is asked for, or at the end."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._given: TopicMessage | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage:
        self._given = None
        self._given = await self._subscription.take()
        return self._given

    def give_back(self) -> None:
        """Its client died over the last one: it is told again."""
        if self._given is not None:
            self._subscription.give_back(self._given)


def matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether the words of a key match: ``*`` stands for one, ``#`` for any number."""
    if not pattern:
        return not words
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(matches(rest, words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and matches(rest, words[1:])
