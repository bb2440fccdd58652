"""Finding the first of a few strings in a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """`text[start:end]` is a whole marker, or (`whole` false) the end of the text may be the start of one."""

    start: int
    end: int
    whole: bool


class Markers:
    """A set of marker strings. The one that is complete first counts; of those, the one that starts first."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = sorted(set(markers), key=len)
        starts = {start for marker in self._markers for start in _starts(marker)}
        self.first = re.compile(f"[{''.join(sorted(re.escape(marker[0]) for marker in self._markers))}]").search
        """The first character with which any of them begins: where there is none, there is nothing to find."""
        self._whole = re.compile("|".join(map(re.escape, self._markers)))
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, starts))})\\Z") if starts else None
        self._longest = len(self._markers[-1])

    def find(self, text: str, start: int = 0) -> Hit | None:
        """The first marker from `start` on, or what may become one when more text comes."""
        if self.first(text, start) is None:  # as nearly every text
            return None
        if match := self._whole.search(text, start):
            return self._first_within(text, match.start(), match.end())
        at = self.tail(text, start)
        return Hit(at, len(text), whole=False) if at < len(text) else None

    def tail(self, text: str, start: int = 0) -> int:
        """Where the end of the text may be the start of a marker; its length where it cannot."""
        start = max(start, len(text) - self._longest + 1)
        if self._begun is None or self.first(text, start) is None:
            return len(text)
        match = self._begun.search(text, start)
        return match.start() if match else len(text)

    def _first_within(self, text: str, start: int, end: int) -> Hit:
        """The marker at `start`, unless another one behind its start is complete before it."""
        first = start
        for marker in self._markers:
            at = text.find(marker, start + 1, end - 1)
            if at >= 0:
                first, end = at, at + len(marker)
        return Hit(first, end, whole=True)


def _starts(marker: str) -> Iterator[str]:
    return (marker[:length] for length in range(1, len(marker)))
