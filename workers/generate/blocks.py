"""Blocks of KV memory: who holds which. Pure bookkeeping; the memory itself is the engine's."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """``blocks`` blocks of ``size`` tokens each. A block may be held more than once: it is free when all let go.

    Block 0 is nobody's: engines point unused places of a block table at it.
    """

    def __init__(self, blocks: int, size: int) -> None:
        assert blocks > 0 and size > 0
        self.size = size
        self.total = blocks
        self._free = list(range(blocks, 0, -1))
        self._holders = [0] * (blocks + 1)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Blocks that were free; the one freed last comes first, so that little memory is touched."""
        assert count <= self.free, "more blocks than there are free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> list[int]:
        """The same blocks for one more holder."""
        shared = list(blocks)
        for block in shared:
            assert self._holders[block] > 0, "a free block cannot be shared"
            self._holders[block] += 1
        return shared

    def release(self, blocks: Iterable[int]) -> None:
        """Lets go of blocks that were taken or shared."""
        for block in blocks:
            assert self._holders[block] > 0, "a block is released once for each holder"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
