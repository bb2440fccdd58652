"""Following a run's log: each entry is checked against those before it, so that a loss is seen, never papered over."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, TypeAlias

import msgspec

from headrace.broker.entries import SEED, Begin, Entry, Position, advance
from headrace.broker.ports import TokenLog
from headrace.protocol.errors import StreamLost
from headrace.protocol.wire import TokenChunk

_begin = msgspec.json.Decoder(Begin).decode
_chunk = msgspec.json.Decoder(TokenChunk).decode

START: Final = Position()
PAGE: Final = 1024
"""Entries that are read at once: bounds how long they keep the event loop."""


class Follower:
    """A reader's place in a log: the last entry, the chunks so far, the running hash of their tokens."""

    __slots__ = ("chunks", "position", "running")

    def __init__(self, position: Position = START, chunks: int = 0, running: int = SEED) -> None:
        self.position = position
        self.chunks = chunks
        self.running = running

    def follow(self, entry: Entry) -> TokenChunk | None:
        """The entry's chunk; None for ``begin`` and ``end``. Raises StreamLost if it does not follow on."""
        position, running = entry.position, self.running
        follows = position.k == self.chunks + 1 and position.epoch >= self.position.epoch and entry.before == running
        if not follows or entry.kind != "chunk":
            self._special(entry)
            return None
        chunk = _chunk(entry.payload)
        self.position, self.chunks = position, position.k
        for choice in chunk.choices:
            running = advance(running, choice.index, choice.token_ids or ())
        self.running = running
        return chunk

    def _special(self, entry: Entry) -> None:
        """What is no chunk in its turn: a ``begin``, the ``end``, or the sign of a loss."""
        position = entry.position
        if position <= self.position:
            raise StreamLost(f"the log went back from {self.position} to {position}")
        self.position = position
        if entry.kind == "begin":
            began_after = _begin(entry.payload).chunks
            if began_after != self.chunks:
                raise StreamLost(f"epoch {position.epoch} began after {began_after} chunks, not {self.chunks}")
            return
        if position.k != self.chunks + 1:
            raise StreamLost(f"chunk {entry.seq} came where chunk {self.chunks} was due")
        if entry.before != self.running:
            raise StreamLost(f"the tokens before chunk {entry.seq} are not those that its writer had")


Page: TypeAlias = list[tuple[Entry, TokenChunk | None]]
"""Entries as they stand in the log, and what the follower made of each."""


async def read_on(log: TokenLog, run: str, follower: Follower) -> AsyncGenerator[Page, None]:
    """Every entry that is in the log now, from the follower's place on, page by page. Raises StreamLost."""
    while entries := (await log.read({run: follower.position}, wait=0.0, count=PAGE)).get(run):
        yield [(entry, follower.follow(entry)) for entry in entries]


async def read_all(log: TokenLog, run: str, follower: Follower) -> Page:
    """The same on one page."""
    return [followed async for page in read_on(log, run, follower) for followed in page]
