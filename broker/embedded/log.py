"""The token log in this process: a list of entries per run."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final

from headrace.broker.embedded.shelf import Run, Shelf, Watch
from headrace.broker.entries import Entry, Position
from headrace.broker.ports import Append, Appended, Batch

_position: Final = attrgetter("position")


class EmbeddedLog:
    """The TokenLog of ports, in one process."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def append(self, batches: Sequence[Batch]) -> list[Appended]:
        """Adds each batch if its epoch is the current one and ``after`` is the last entry."""
        answers = [self._append(batch) for batch in batches]
        await asyncio.sleep(0)
        return answers

    def _append(self, batch: Batch) -> Appended:
        run = self._shelf.find(batch.run)
        if run is None:
            return Appended(Append.LOST)
        answer = _judge(run, batch)
        if answer is Append.STORED:
            assert run.log is not None, "judged to be there"
            run.log += entries_of(batch)
            run.ended = batch.entries[-1].kind == "end"
            run.chunks = batch.last.k - run.ended
            self._shelf.added(batch.run)
        return Appended(answer, run.cancel)

    async def read(self, cursors: Mapping[str, Position], *, wait: float, count: int = 64) -> dict[str, list[Entry]]:
        """Entries after each run's cursor, at most ``count`` a run; waits up to ``wait`` seconds for the first."""
        found = self._ready(cursors, count)
        if found or wait <= 0:
            await asyncio.sleep(0)
            return found
        watch = Watch(cursors, asyncio.get_running_loop().create_future())
        self._shelf.watches[watch] = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await watch.rung
        finally:
            del self._shelf.watches[watch]
        return self._ready(cursors, count)

    def _ready(self, cursors: Mapping[str, Position], count: int) -> dict[str, list[Entry]]:
        found = {}
        for name, cursor in cursors.items():
            run = self._shelf.find(name)
            if run is not None and run.log and run.log[-1].position > cursor:
                start = bisect_right(run.log, cursor, key=_position)
                found[name] = run.log[start : start + count]
        return found

    def wake(self) -> None:
        """Makes a waiting ``read`` return at once (its set of runs has changed)."""
        for watch in self._shelf.watches:
            watch.ring()

    async def exists(self, runs: Sequence[str]) -> list[bool]:
        """Whether each run's log is there."""
        return [run is not None and run.log is not None for run in map(self._shelf.find, runs)]


def entries_of(batch: Batch) -> list[Entry]:
    """The batch as it stands in the log."""
    epoch = batch.after.epoch
    return [
        Entry(Position(epoch, k), entry.kind, entry.payload, entry.before)
        for k, entry in enumerate(batch.entries, batch.k)
    ]


def _judge(run: Run, batch: Batch) -> Append:
    current = run.holds["generate"].epoch if "generate" in run.holds else 0
    if run.outcome is not None or current > batch.after.epoch:
        return Append.FENCED
    if current < batch.after.epoch or not run.log:
        return Append.LOST  # the claim itself is gone, or the log
    last = run.log[-1].position
    if last == batch.last:
        return Append.ALREADY if _is_there(run.log, batch) else Append.LOST
    if run.ended:
        return Append.FENCED
    return Append.STORED if last == batch.after and batch.k == run.chunks + 1 else Append.LOST


def _is_there(log: list[Entry], batch: Batch) -> bool:
    stored, sent = log[-len(batch.entries) :], entries_of(batch)
    return [(e.position, e.kind, e.payload) for e in stored] == [(e.position, e.kind, e.payload) for e in sent]
