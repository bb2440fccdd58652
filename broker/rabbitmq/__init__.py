"""RabbitMQ: work queues and client topics over two supervised connections."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from headrace.broker.rabbitmq.connection import DEFAULT_TIMING, Counters, State, Supervisor, Timing
from headrace.broker.rabbitmq.queues import MAX_BODY, RabbitWorkQueue
from headrace.broker.rabbitmq.topics import RabbitClientTopics
from headrace.broker.rabbitmq.topology import DEFAULT_LAYOUT, Topology

__all__ = ["Counters", "Health", "RabbitMQ", "State", "Timing", "Topology"]


@dataclass(frozen=True, slots=True)
class Health:
    """How the two connections are. ``last_error`` is the latest failure, also when it is over."""

    publishing: State
    consuming: State
    last_error: str
    counters: Counters

    @property
    def up(self) -> bool:
        """Whether jobs can be taken and results told."""
        return self.publishing is State.UP and self.consuming in {State.UP, State.BLOCKED}


class RabbitMQ:
    """A process's whole dealings with RabbitMQ: ``queues`` and ``topics``."""

    def __init__(
        self,
        urls: Sequence[str],
        layout: Topology,
        timing: Timing,
        max_body: int,
        name: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.counters = Counters()
        self._publishing = Supervisor(urls, f"{name} (publishing)", timing, self.counters, tls)
        self._consuming = Supervisor(urls, f"{name} (consuming)", timing, self.counters, tls)
        self.queues = RabbitWorkQueue(self._publishing, self._consuming, layout, max_body)
        self.topics = RabbitClientTopics(self._publishing, self._consuming, max_body)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        urls: str | Sequence[str],
        *,
        layout: Topology = DEFAULT_LAYOUT,
        timing: Timing = DEFAULT_TIMING,
        max_body: int = MAX_BODY,
        name: str = "headrace",
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator[Self]:
        """Connects, and closes at the end. ``urls`` are the nodes of one cluster; ``max_body`` is in bytes. ``tls`` is
        for amqps://, the system's authorities unless given.

        Raises BrokerUnavailable when none of them answers in time.
        """
        rabbit = cls([urls] if isinstance(urls, str) else urls, layout, timing, max_body, name, tls)
        try:
            await rabbit.start()
            yield rabbit
        finally:
            await rabbit.close()

    async def start(self) -> None:
        await self._publishing.start()
        await self._consuming.start()

    def health(self) -> Health:
        last_error = self._publishing.last_error or self._consuming.last_error
        return Health(self._publishing.state, self._consuming.state, last_error, self.counters)

    async def close(self) -> None:
        """Ends both connections in good order; what is unsettled goes back to its queues."""
        await self._consuming.close()
        await self._publishing.close()
