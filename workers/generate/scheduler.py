"""Which tokens a step computes: rows and blocks are given out, prompts come in chunks beside decoding. Pure.

A row is admitted when a row is free and blocks for all its tokens are; each token it makes may need one more block.
When there is none, the row that is served last gives its blocks back and waits. It is computed anew later on, and
since its draws depend on their positions alone, it goes on as it would have.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from headrace.workers.generate.blocks import BlockPool
from headrace.workers.generate.engine import Capacity
from headrace.workers.generate.row import Row

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens ``start`` to ``stop`` (not included) of a row, to be computed in one step.

    ``samples``: they are the last that the row has, so the next one is to be sampled.
    """

    row: Row
    start: int
    stop: int
    samples: bool

    @classmethod
    def of(cls, row: Row, count: int) -> Slice:
        """The next ``count`` tokens of the row."""
        stop = row.computed + count
        return cls(row, row.computed, stop, stop == len(row.tokens))


class Scheduler:
    """At most ``rows`` rows run at a time; a step computes at most ``budget`` tokens.

    ``waiting`` and ``running`` are in serving order: by priority, then by arrival. Rows that run hold blocks.
    """

    def __init__(self, *, rows: int, blocks: BlockPool, budget: int) -> None:
        if budget < rows:
            raise ValueError(f"budget must be at least the number of rows, {rows}, got {budget}")
        self.rows = rows
        self.blocks = blocks
        self.budget = budget
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self._arrivals = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.running or self.waiting)

    def add(self, row: Row) -> None:
        """Queues a row. The tokens that it has and may make must fit the pool."""
        assert self.blocks.needed(row.prompt + row.ending.limit) <= self.blocks.total, "a row must fit the pool"
        row.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, row, key=_order)

    def remove(self, row: Row) -> None:
        """Takes out a row that is over, or that nobody wants any more; its blocks are free at once."""
        (self.running if row.blocks else self.waiting).remove(row)
        self._free(row)

    def plan(self) -> list[Slice]:
        """The next step: the rows that decode, then prompts in serving order, as far as the budget goes.

        Not empty while the scheduler is busy. The caller computes it and says so with ``computed``.
        """
        step = self._decode()
        prompts = [row for row in self.running if row.pending > 1] + self._admit()
        left = self.budget - len(step)
        for row in prompts:
            if left == 0:
                break
            chunk = min(left, row.pending)
            step.append(Slice.of(row, chunk))
            left -= chunk
        return step

    def computed(self, step: Iterable[Slice]) -> None:
        """The keys and values of this step lie in their blocks now."""
        for piece in step:
            piece.row.computed = piece.stop

    def capacity(self, max_model_len: int) -> Capacity:
        """What is free; rows that wait for their turn count as taken."""
        return Capacity(
            rows=self.rows,
            free_rows=max(0, self.rows - len(self.running) - len(self.waiting)),
            tokens=self.blocks.total * self.blocks.size,
            free_tokens=self.blocks.free * self.blocks.size,
            max_model_len=max_model_len,
        )

    def _decode(self) -> list[Slice]:
        ready = [row for row in self.running if row.pending == 1]
        return [Slice.of(row, 1) for row in ready if row.blocks and self._grow(row)]

    def _grow(self, row: Row) -> bool:
        """Room for all the row's tokens, at the cost of rows that are served later. False if it is the last itself."""
        if self.blocks.needed(len(row.tokens)) <= len(row.blocks):
            return True
        while not self.blocks.free:
            last = self.running[-1]
            self._preempt(last)
            if last is row:
                return False
        row.blocks += self.blocks.take(1)
        return True

    def _preempt(self, row: Row) -> None:
        self.running.remove(row)
        self._free(row)
        insort(self.waiting, row, key=_order)

    def _free(self, row: Row) -> None:
        self.blocks.release(row.blocks)
        row.blocks = []
        row.computed = 0

    def _admit(self) -> list[Row]:
        """Starts waiting rows in order, until one does not fit; rows that wait for their leader's prompt are passed."""
        admitted: list[Row] = []
        place = 0
        while place < len(self.waiting) and len(self.running) < self.rows:
            row = self.waiting[place]
            shared = self._shareable(row)
            if shared is None:
                place += 1
                continue
            need = self.blocks.needed(len(row.tokens)) - len(shared)
            if need + len(self.running) > self.blocks.free:  # each row that runs may soon need one more
                break
            row.blocks = self.blocks.share(shared) + self.blocks.take(need)
            row.computed = len(shared) * self.blocks.size
            del self.waiting[place]
            insort(self.running, row, key=_order)
            admitted.append(row)
        return admitted

    def _shareable(self, row: Row) -> list[int] | None:
        """The leader's blocks that hold nothing but the common prompt; None while they are still being computed."""
        leader = row.leader
        if leader is None or not leader.blocks:
            return []
        full = (row.prompt - 1) // self.blocks.size
        return leader.blocks[:full] if leader.computed >= full * self.blocks.size else None
