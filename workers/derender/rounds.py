"""One task that reads the logs of all runs of a worker, in rounds, and tells what they say.

A round asks for what is new in every log at once, waits where there is nothing, and takes a bounded number of entries.
A run that had as many as it may have in one round is behind: those runs take turns, some at a time and many entries of
each, while the others go on being asked. So a backlog holds up nobody, costs little, and keeps the event loop for a
bounded time only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from headrace.broker.entries import Entry, Position
from headrace.broker.ports import Broker, BrokerUnavailable
from headrace.logs import get_logger
from headrace.workers.derender.checkpoint import Checkpoints
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.sending import insist
from headrace.workers.derender.told import Told
from headrace.workers.holding import Holding
from headrace.workers.probe import probe

log = get_logger()

READ_WAIT_S: Final = 1.0
PER_RUN: Final = 32
"""Entries of one run in one round, at most."""
PER_ROUND: Final = 8192
"""Entries of all runs in one read, or one of each run where there are more runs."""
PER_TURN: Final = 2048
"""Entries that are told without letting others have the event loop."""
ASK_PER_RUN_S: Final = 10e-6
"""While some runs are behind, the others are asked after so long for each of them: a tenth of a core goes into it."""


class Rounds:
    """Follows the runs that a worker holds; ``over`` is called for each that has ended, once its chunks are out.

    ``pause`` is in seconds, before what a server refused is tried again.
    """

    def __init__(
        self,
        broker: Broker,
        held: Holding[Told],
        checkpoints: Checkpoints,
        over: Callable[[Told], None],
        *,
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._held = held
        self._checkpoints = checkpoints
        self._over = over
        self._pause = pause
        self._clock = clock
        self._others: dict[str, Position] = {}
        self._behind: dict[str, Position] = {}
        """Where each run is read from next. Those behind are in the order of their turns."""
        self._ask_at = 0.0
        self._busy_since: float | None = None
        self._some = asyncio.Event()
        self._leaving = False
        self.unsent: Sequence[Told] = ()
        """Runs of which something was taken from the log that may not have been sent."""

    def follow(self, told: Told) -> None:
        """From the next round on the run is read too."""
        self._behind.pop(told.job.run, None)
        self._others[told.job.run] = told.follower.position
        self._some.set()
        self._broker.log.wake()

    def leave(self, run: str) -> None:
        """From the next round on the run is not read any more."""
        self._others.pop(run, None)
        self._behind.pop(run, None)
        if not self._others and not self._behind and not self._leaving:
            self._some.clear()

    @property
    def behind(self) -> float:
        """Seconds since all that was found in the logs was told; 0 while there is nothing to tell."""
        return 0.0 if self._busy_since is None else self._clock() - self._busy_since

    def end(self) -> None:
        """This round is the last."""
        self._leaving = True
        self._some.set()
        self._broker.log.wake()

    async def go_on(self) -> None:
        """Round after round, until the end."""
        while True:
            if not self._behind:
                self._busy_since = None
            await self._some.wait()
            if self._leaving:
                return
            try:
                if self._behind:
                    await self._read(dict(islice(self._behind.items(), PER_ROUND // PER_RUN)), wait=0.0)
                if self._others and (not self._behind or self._clock() >= self._ask_at):
                    await self._read(dict(self._others), wait=0.0 if self._behind else READ_WAIT_S)
                    self._ask_at = self._clock() + ASK_PER_RUN_S * len(self._others)
            except BrokerUnavailable as away:
                log.warning("log.away", error=str(away))
                await asyncio.sleep(self._pause)
            self._checkpoints.look(self._held, self._clock())

    async def _read(self, asked: Mapping[str, Position], *, wait: float) -> None:
        count = max(1, min(PER_RUN, PER_ROUND // len(asked)))
        found = await self._broker.log.read(asked, wait=wait, count=count)
        if found and self._busy_since is None:
            self._busy_since = self._clock()
        for part in _parts(found, max(1, PER_TURN // count)):
            await self._tell(part, asked, count)
            await asyncio.sleep(0)
        for run in asked.keys() - found.keys():
            if (position := self._behind.pop(run, None)) is not None:
                self._others[run] = position

    async def _tell(self, found: Mapping[str, Sequence[Entry]], asked: Mapping[str, Position], count: int) -> None:
        outbox, taken = Outbox(), []
        for run, entries in found.items():
            told = self._held.get(run)
            if told is None or told.follower.position != asked[run]:
                continue  # begun anew since: the next round reads it from its start
            taken.append(told)
            told.take(entries, outbox)
            self._move(run, told.follower.position, behind=len(entries) == count)
        self.unsent = taken
        probe("derender.chunks_taken")
        await insist(self._broker, outbox.take(), pause=self._pause)
        probe("derender.chunks_sent")
        self.unsent = ()
        self._checkpoints.told(taken, self._clock())
        for told in taken:
            if told.over:
                self._over(told)

    def _move(self, run: str, position: Position, *, behind: bool) -> None:
        """The run is read from here next, with those that are behind or with the others."""
        if behind:
            self._others.pop(run, None)
            self._behind.pop(run, None)
            self._behind[run] = position
        else:
            self._behind.pop(run, None)
            self._others[run] = position


def _parts(found: dict[str, list[Entry]], size: int) -> Iterator[Mapping[str, Sequence[Entry]]]:
    """The runs of a round, so many at a time."""
    if len(found) <= size:
        yield found
        return
    items = iter(found.items())
    while part := dict(islice(items, size)):
        yield part
