"""When the runs that are held are late. No I/O, no clock."""

from __future__ import annotations

import heapq
from typing import Final

_SPARE: Final = 64


class Deadlines:
    """Deadlines of runs, in Unix seconds. Most runs end long before theirs: what is left of those is cleared out in
    time, so that there are never many more entries than runs."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._due: list[tuple[float, str]] = []
        """A heap of those in ``_of``, and of some that are not any more."""

    def __len__(self) -> int:
        return len(self._due)

    def add(self, run: str, deadline: float) -> None:
        """Watches a run; another deadline takes the place of the one before."""
        self._of[run] = deadline
        if len(self._due) < 2 * len(self._of) + _SPARE:
            heapq.heappush(self._due, (deadline, run))
        else:
            self._due = [(at, name) for name, at in self._of.items()]
            heapq.heapify(self._due)

    def drop(self, run: str) -> None:
        """Watches it no longer; fine if it was not watched."""
        self._of.pop(run, None)

    def late(self, moment: float) -> list[str]:
        """The runs whose deadline has come, each once, those that are due longest first."""
        late = []
        while self._due and self._due[0][0] <= moment:
            deadline, run = heapq.heappop(self._due)
            if self._of.get(run) == deadline:
                del self._of[run]
                late.append(run)
        return late
