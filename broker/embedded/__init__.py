"""All four ports in one process, without a server: what ``headrace demo`` and batch runs on a laptop use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from headrace.broker.embedded.log import EmbeddedLog
from headrace.broker.embedded.queues import EmbeddedQueues, Queues
from headrace.broker.embedded.runs import EmbeddedRuns
from headrace.broker.embedded.shelf import Shelf
from headrace.broker.embedded.topics import EmbeddedTopics, Topics
from headrace.broker.ports import Broker

__all__ = ["Embedded", "EmbeddedLog", "EmbeddedQueues", "EmbeddedRuns", "EmbeddedTopics"]

MAX_LENGTH: Final = 100_000
MAX_BODY: Final = 16 << 20
REPLAY_BYTES: Final = 64 << 20


class Embedded:
    """A broker of this process's own. ``broker`` is one connection to it, ``connect`` makes more.

    ``clock`` gives Unix seconds; ``max_length`` is how many messages may wait in a queue, ``max_body`` how many bytes
    one may have. Finished runs are kept for their replay_ttl as long as they fit into about ``replay_bytes``.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        max_length: int = MAX_LENGTH,
        max_body: int = MAX_BODY,
        replay_bytes: int = REPLAY_BYTES,
    ) -> None:
        self.shelf = Shelf(clock, replay_bytes)
        self._queues = Queues(max_length, max_body, clock)
        self._topics = Topics()
        self.broker = self._connected()

    def _connected(self) -> Broker:
        topics = EmbeddedTopics(self._topics)  # one for both ways: here they lead nowhere else
        return Broker(
            queues=EmbeddedQueues(self._queues),
            topics=topics,
            log=EmbeddedLog(self.shelf),
            runs=EmbeddedRuns(self.shelf),
            streams=topics,
        )

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Broker]:
        """One more connection, as of another process; when it ends, what it holds goes back to its queues."""
        broker = self._connected()
        try:
            yield broker
        finally:
            assert isinstance(broker.queues, EmbeddedQueues)
            broker.queues.close()

    def close(self) -> None:
        """Forgets what waits to be retried, so that no timer outlives the event loop."""
        self._queues.close()
