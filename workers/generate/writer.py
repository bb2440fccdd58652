"""Writes what the engine makes into the logs: one batch a run at a time, all runs in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from headrace.broker.entries import NewEntry, Position, advance
from headrace.broker.ports import Appended, Batch, BrokerUnavailable, TokenLog
from headrace.logs import get_logger
from headrace.protocol.wire import TokenChunk
from headrace.workers.outcome import End, encode_end
from headrace.workers.probe import probe

log = get_logger()

MOST_PENDING: Final = 16_384
"""Entries that may wait for the log before the engine is held back."""
_encode = msgspec.json.Encoder().encode


class Writing:
    """One run's place in its log: what is durable, and what waits to be."""

    __slots__ = ("after", "ended", "k", "pending", "run", "running")

    def __init__(self, run: str, *, after: Position, chunks: int, running: int) -> None:
        self.run = run
        self.after = after
        self.k = chunks + 1
        self.running = running
        self.pending: list[NewEntry] = []
        self.ended = False

    def add(self, chunks: Sequence[TokenChunk], end: End | None = None) -> None:
        """Queues a step's entries. Nothing may follow an end."""
        assert not self.ended, "nothing follows the end of a log"
        for chunk in chunks:
            self.pending.append(NewEntry("chunk", _encode(chunk), self.running))
            for choice in chunk.choices:
                self.running = advance(self.running, choice.index, choice.token_ids or ())
        if end is not None:
            self.pending.append(NewEntry("end", encode_end(end), self.running))
            self.ended = True

    def batch(self) -> Batch:
        """Everything that waits, as one batch; it stays the writer's until it is answered."""
        taken, self.pending = self.pending, []
        batch = Batch(self.run, self.after, self.k, taken)
        self.after = batch.last
        self.k += len(taken)
        return batch


class LogWriter:
    """Appends for many runs. ``answered`` hears of each batch: whose it is, the answer, whether it had the end."""

    def __init__(self, token_log: TokenLog, answered: Callable[[Writing, Appended, bool], None]) -> None:
        self._log = token_log
        self._answered = answered
        self._dirty: dict[Writing, None] = {}
        self._pending = 0
        self._closing = False
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def add(self, writing: Writing, chunks: Sequence[TokenChunk], end: End | None = None) -> None:
        """Queues entries of a run; they are appended soon."""
        if not chunks and end is None:
            return
        before = len(writing.pending)
        writing.add(chunks, end)
        self._pending += len(writing.pending) - before
        self._dirty[writing] = None
        self._work.set()
        if self._pending > MOST_PENDING:
            self._room.clear()

    async def room(self) -> None:
        """Returns when the log has caught up enough for the engine to go on."""
        await self._room.wait()

    async def run(self) -> None:
        """Appends until closed. At most one batch of a run is under way, so its order is its order in the log."""
        while self._dirty or not self._closing:
            await self._work.wait()
            self._work.clear()
            await self._flush()

    def close(self) -> None:
        """Makes ``run`` return once everything that was added is in the logs."""
        self._closing = True
        self._work.set()

    async def _flush(self) -> None:
        writings = list(self._dirty)
        self._dirty.clear()
        if not writings:
            return
        batches = [writing.batch() for writing in writings]
        probe("generate.before_append")
        answers = await self._append(batches)
        probe("generate.after_append")
        self._pending -= sum(len(batch.entries) for batch in batches)
        if self._pending <= MOST_PENDING:
            self._room.set()
        for writing, batch, answer in zip(writings, batches, answers, strict=True):
            self._answered(writing, answer, batch.entries[-1].kind == "end")

    async def _append(self, batches: Sequence[Batch]) -> list[Appended]:
        """Tries until the log answers: a batch that was stored without our hearing of it answers ALREADY."""
        wait = 0.05
        while True:
            try:
                return await self._log.append(batches)
            except BrokerUnavailable as away:
                log.warning("log.away", batches=len(batches), error=str(away))
                await asyncio.sleep(wait)
                wait = min(wait * 2, 2.0)
