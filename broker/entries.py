"""The entries of a run's log, and the running hash that shows when some were lost.

An entry's id is ``<epoch>-<k>``. Each epoch starts with ``begin`` = ``<epoch>-0``, which is not counted; chunk entries
carry k = 1, 2, ... over the whole life of the request, continued by the next epoch; ``end`` closes the log under the
next k and is not a chunk either. The seq that a client sees is k - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct

Kind = Literal["begin", "chunk", "end"]

SEED: Final = 0xCBF29CE484222325
_PRIME: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Position(Struct, frozen=True, order=True, gc=False):
    """The id of an entry, ``<epoch>-<k>``; they order as the entries do."""

    epoch: int = 0
    k: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}-{self.k}"


class NewEntry(Struct, frozen=True, gc=False):
    """An entry to be written: ``payload`` is JSON, ``before`` the running hash of the tokens before it."""

    kind: Literal["chunk", "end"]
    payload: bytes
    before: int


class Begin(Struct, frozen=True):
    """What ``begin`` says: who started the epoch, when (Unix seconds), after how many chunks."""

    worker: str
    at: float
    chunks: int


class Entry(Struct, frozen=True, gc=False):
    """An entry as read. The payload of ``begin`` is the JSON of a Begin, its ``before`` is 0."""

    position: Position
    kind: Kind
    payload: bytes
    before: int

    @property
    def seq(self) -> int:
        """The chunk's number at the client."""
        return self.position.k - 1


def advance(running: int, index: int, token_ids: Sequence[int]) -> int:
    """The running 64-bit hash after these tokens of choice ``index``."""
    mark = (index << 32) + 1  # tells the tokens of two choices apart
    for token in token_ids:
        running = ((running ^ (token + mark)) * _PRIME) & _MASK
    return running
