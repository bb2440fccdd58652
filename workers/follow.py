"""Following a run's log: each entry is checked against those before it, so that a loss is seen, never papered over."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.broker.entries import SEED, Begin, Entry, Position, advance
from headrace.broker.ports import TokenLog
from headrace.protocol.errors import StreamLost
from headrace.protocol.wire import TokenChunk

_begin = msgspec.json.Decoder(Begin).decode
_chunk = msgspec.json.Decoder(TokenChunk).decode

START: Final = Position()


class Follower:
    """A reader's place in a log: the last entry, the chunks so far, the running hash of their tokens."""

    __slots__ = ("chunks", "position", "running")

    def __init__(self, position: Position = START, chunks: int = 0, running: int = SEED) -> None:
        self.position = position
        self.chunks = chunks
        self.running = running

    def follow(self, entry: Entry) -> TokenChunk | None:
        """The entry's chunk; None for ``begin`` and ``end``. Raises StreamLost if it does not follow on."""
        position = entry.position
        if position <= self.position:
            raise StreamLost(f"the log went back from {self.position} to {position}")
        self.position = position
        if entry.kind == "begin":
            began_after = _begin(entry.payload).chunks
            if began_after != self.chunks:
                raise StreamLost(f"epoch {position.epoch} began after {began_after} chunks, not {self.chunks}")
            return None
        if position.k != self.chunks + 1:
            raise StreamLost(f"chunk {entry.seq} came where chunk {self.chunks} was due")
        if entry.before != self.running:
            raise StreamLost(f"the tokens before chunk {entry.seq} are not those that its writer had")
        if entry.kind == "end":
            return None
        chunk = _chunk(entry.payload)
        self.chunks += 1
        for choice in chunk.choices:
            self.running = advance(self.running, choice.index, choice.token_ids or ())
        return chunk


async def read_all(log: TokenLog, run: str, follower: Follower) -> list[tuple[Entry, TokenChunk | None]]:
    """Every entry that is in the log now, from the follower's place on. Raises StreamLost."""
    followed: list[tuple[Entry, TokenChunk | None]] = []
    while entries := (await log.read({run: follower.position}, wait=0.0, count=1024)).get(run):
        followed += [(entry, follower.follow(entry)) for entry in entries]
    return followed
