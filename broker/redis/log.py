"""The token log: one Redis stream per run, appended to by script, read by XREAD over many runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias, cast

from headrace.broker.entries import Entry, Kind, Position
from headrace.broker.ports import Append, Appended, Batch
from headrace.broker.redis.connection import Reply
from headrace.broker.redis.keys import Keys, run_of_log
from headrace.broker.redis.line import Address, Line
from headrace.broker.redis.scripts import APPEND, command

READERS: Final = 4
"""Sockets on which a read may wait; more reads than that at a time look again and again instead."""
_LOOK: Final = 0.004
"""Seconds between two looks, times the reads that wait: so many looks a second, however many reads there are."""
_SLICE: Final = 1.0
"""Seconds after which a waiting read asks anew: a server that died without a word is noticed that soon."""
_RING_AGAIN: Final = 0.001

_GATHER_PER_RUN: Final = 10e-6
_GATHER_FROM: Final = 1e-3
_GATHER_MOST: Final = 20e-3

_KINDS: Final[dict[bytes, Kind]] = {b"begin": "begin", b"chunk": "chunk", b"end": "end"}
_PLAIN: Final = {answer.value.encode(): Appended(answer) for answer in Append}

Streams: TypeAlias = "list[tuple[bytes, list[tuple[bytes, tuple[bytes, bytes, bytes, bytes]]]]] | None"
"""What XREAD answers: key, entries; of each its id and kind, payload, ``before``, running hash."""


def gather_s(watched: int, found: int) -> float:
    """How long, in seconds, a reader leaves entries to gather after a read that found ``found`` in ``watched`` runs.

    XREAD costs by the runs that it names, so one that finds few of many is a waste: the pause grows with the cost and
    keeps it under a tenth of a core on either side. Few runs, none found, or plenty: no pause.
    """
    pause = watched * _GATHER_PER_RUN
    if not 0 < found < watched / 2 or pause < _GATHER_FROM:
        return 0.0
    return min(pause, _GATHER_MOST)


class RedisLog:
    """The TokenLog of ports, on Redis."""

    def __init__(self, address: Address, line: Line, keys: Keys, *, reply_timeout: float, patience: float) -> None:
        self._line = line
        self._keys = keys
        self._all_readers = [Line(address, reply_timeout=reply_timeout, patience=patience) for _ in range(READERS)]
        self._idle_readers = list(self._all_readers)
        self._waiting: set[_Waiting] = set()
        self._gathered = 0.0

    async def append(self, batches: Sequence[Batch]) -> list[Appended]:
        """Adds each batch if its epoch is the current one and ``after`` is the last entry. One round trip for all."""
        if not batches:
            return []
        return [_appended(reply) for reply in await self._line.ask([self._append(batch) for batch in batches])]

    def _append(self, batch: Batch) -> bytes:
        keys, after = self._keys.of(batch.run), batch.after
        content: list[bytes | int] = []
        for entry in batch.entries:
            content += (entry.payload, entry.before)
        ends = int(batch.entries[-1].kind == "end")
        return APPEND.call((keys.run, keys.log), after.epoch, str(after), batch.k, ends, *content)

    async def read(self, cursors: Mapping[str, Position], *, wait: float, count: int = 64) -> dict[str, list[Entry]]:
        """Entries after each run's cursor, at most ``count`` a run; waits up to ``wait`` seconds for the first."""
        if wait <= 0:
            return await self._read(self._line, cursors, count) if cursors else {}
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        waiting = _Waiting(self._line)
        self._waiting.add(waiting)
        try:
            await waiting.pause(min(self._gathered, until) - loop.time())
            while not waiting.woken:
                left = max(until - loop.time(), 0.001)
                if not cursors:
                    await waiting.pause(left)
                    return {}
                found = await self._wait(waiting, cursors, count, min(left, _SLICE))
                if found or loop.time() >= until:
                    total = sum(map(len, found.values()))
                    self._gathered = loop.time() + gather_s(len(cursors), total)
                    return found
            return {}
        finally:
            self._waiting.discard(waiting)

    async def _wait(
        self, waiting: _Waiting, cursors: Mapping[str, Position], count: int, wait: float
    ) -> dict[str, list[Entry]]:
        if not self._idle_readers:
            found = await self._read(self._line, cursors, count)
            if not found:
                await waiting.pause(min(wait, _LOOK * len(self._waiting)))
            return found
        reader = waiting.reader = self._idle_readers.pop()
        try:
            return await self._read(reader, cursors, count, wait)
        except asyncio.CancelledError:
            reader.drop()  # a command after the one that still waits there would wait with it
            raise
        finally:
            waiting.reader = None
            self._idle_readers.append(reader)

    async def _read(
        self, line: Line, cursors: Mapping[str, Position], count: int, wait: float = 0.0
    ) -> dict[str, list[Entry]]:
        of = self._keys.of
        block = ("BLOCK", max(int(wait * 1000), 1)) if wait else ()
        keys = [of(run).log for run in cursors]
        ids = [f"{after.epoch}-{after.k}" for after in cursors.values()]
        (reply,) = await line.ask([command("XREAD", "COUNT", count, *block, "STREAMS", *keys, *ids)], longer=wait)
        return _entries(cast("Streams", reply))

    def wake(self) -> None:
        """Makes a waiting ``read`` of this process return at once (its set of runs has changed)."""
        for waiting in self._waiting:
            waiting.wake()

    async def exists(self, runs: Sequence[str]) -> list[bool]:
        """Whether each run's log is there."""
        if not runs:
            return []
        replies = await self._line.ask([command("EXISTS", self._keys.of(run).log) for run in runs])
        return [reply == 1 for reply in replies]

    async def close(self) -> None:
        """Ends the readers' connections."""
        for reader in self._all_readers:
            await reader.close()


class _Waiting:
    """A read that waits, on a socket or by itself, and can be woken."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._bell = asyncio.Event()
        self.reader: Line | None = None

    @property
    def woken(self) -> bool:
        return self._bell.is_set()

    async def pause(self, seconds: float) -> None:
        """Returns after so long, or when woken."""
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._bell.wait()

    def wake(self) -> None:
        if not self.woken:
            self._bell.set()
            self._unblock(_RING_AGAIN)

    def _unblock(self, again: float) -> None:
        """Ends a blocked XREAD, by way of the other socket; again if it had not yet reached the server."""
        if self.reader is None:
            return
        answer = self._line.post(command("CLIENT", "UNBLOCK", self.reader.client_id))
        if answer is not None:
            answer.add_done_callback(lambda done: self._unblocked(done, again))

    def _unblocked(self, answer: asyncio.Future[list[Reply]], again: float) -> None:
        if answer.exception() is None and answer.result() == [0] and self.reader is not None:
            answer.get_loop().call_later(again, self._unblock, again * 2)


def _appended(reply: Reply) -> Appended:
    if isinstance(reply, list):
        answer, reason = cast("tuple[bytes, bytes]", reply)
        return Appended(Append(answer.decode()), reason.decode())
    return _PLAIN[cast("bytes", reply)]


def _entries(streams: Streams) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for key, items in streams or ():
        found[run_of_log(key)] = entries = []
        for name, (kind, payload, _, before) in items:
            epoch, _, k = name.partition(b"-")
            entries.append(Entry(Position(int(epoch), int(k)), _KINDS[kind], payload, int(before)))
    return found
