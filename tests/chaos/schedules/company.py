"""Who takes part in a story: workers in processes of their own, clients, and what these have asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from headrace.broker.ports import BrokerUnavailable
from headrace.client import Headrace
from headrace.client.stream import Stream
from headrace.protocol.errors import HeadraceError
from headrace.protocol.jobs import run_of
from headrace.workers.generate.engine import Admission
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from tests.chaos.schedules.answers import CLIENT, Wish
from tests.chaos.schedules.steps import RoleName
from tests.chaos.schedules.wire import Gossip, Wire
from tests.virtual import Process


@dataclass(slots=True)
class Worker:
    """A worker in a process of its own."""

    role: RoleName
    process: Process
    wire: Wire
    ready: asyncio.Event
    stop: asyncio.Event
    task: asyncio.Task[None]
    dead: bool = False

    def die(self) -> None:
        self.dead = True
        self.process.stop()
        self.wire.cut()

    def look(self) -> None:
        """One that cannot start ends; nothing else may end one."""
        if not self.dead and self.task.done():
            if self.ready.is_set() or not isinstance(self.task.exception(), BrokerUnavailable):
                self.task.result()
            self.die()

    @property
    def works(self) -> bool:
        return not self.dead and not self.process.stopped and not self.stop.is_set()


class Mortal(NullEngine):
    """An engine that some runs take down, and its process with it."""

    def __init__(self, settings: NullSettings, deadly: Container[str], die: Callable[[], None]) -> None:
        super().__init__(settings, clock=time.monotonic)
        self._deadly = deadly
        self._die = die

    def admit(self, admission: Admission) -> None:
        if admission.run in self._deadly:
            self._die()
        super().admit(admission)


@dataclass(slots=True)
class Asked:
    """One sending of a request, and what was heard of it."""

    request: Requested
    wish: Wish
    seed: int
    stream: Stream[Any]
    deadline: float
    reading: asyncio.Task[None] = field(init=False)
    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    response: bytes | None = None
    error: HeadraceError | None = None
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for chunk in self.stream:
                self.chunks.append((chunk.seq, chunk.raw))
            self.response = bytes((await self.stream.outcome()).response)
        except HeadraceError as error:
            self.error = error
        self.ended_at = time.time()


@dataclass(slots=True)
class Requested:
    """A request_id, and what happened to it."""

    request_id: str
    deadly: bool = False
    asked: list[Asked] = field(default_factory=list)
    bodies: set[tuple[Wish, int]] = field(default_factory=set)
    cancelled: bool = False
    lost: bool = False
    deaths_before: int = 0

    @property
    def ambiguous(self) -> bool:
        """Two bodies under one request_id, and something that does not say which one it means, or forgot the first."""
        return len(self.bodies) > 1 and (self.cancelled or self.lost)

    @property
    def run(self) -> str:
        return run_of(CLIENT, self.request_id)


@dataclass(slots=True)
class Client:
    """A user's process with the SDK."""

    sdk: Headrace
    gossip: Gossip
    wire: Wire
    asked: dict[str, Asked] = field(default_factory=dict)
