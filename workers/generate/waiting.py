"""Who is served next among requests that wait for the engine: by class, by client, by priority. Pure.

Each class, and within a class each client, has a virtual time: what it was served so far, divided by its weight. The
one that is furthest behind is next. So whoever waits gets its share however much the others send, and what one does
not use goes to the others. Who comes back after a while begins at the present: a share is not saved up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from headrace.protocol.jobs import Lane

T = TypeVar("T")

Class: TypeAlias = Lane | Literal["backlog"]

WEIGHTS: Final[Mapping[Class, float]] = {"high": 8.0, "normal": 4.0, "backlog": 2.0, "low": 1.0}
"""Shares of the engine while all classes wait; backlog is what clients have sent beyond their share."""


K = TypeVar("K", bound=str)
_SPARE: Final = 64


class Fair(Generic[K]):
    """Virtual times of those that share something. ``weights`` are 1 unless named.

    Those who wait are never further apart than the largest cost over the smallest weight, D: over any time in which two
    of them wait, what each was served, by its weight, differs by at most 2 D. The present goes on with all that is
    served, so that newcomers, however many, do not keep one waiting who has had a turn before.
    """

    def __init__(self, weights: Mapping[K, float]) -> None:
        self._weights = weights
        self._waits: dict[K, float] = {}
        self._ahead: dict[K, float] = {}
        """Those that do not wait, and had more than their share."""
        self._present = 0.0

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._waits) + len(self._ahead)

    def join(self, name: K) -> None:
        """It waits again: not for what it could have had meanwhile."""
        self._waits[name] = max(self._ahead.pop(name, 0.0), self._present)

    def first(self) -> K:
        """Whose turn it is; of several the one that waits for the longest time."""
        return min(self._waits, key=self._waits.__getitem__)

    def serve(self, name: K, cost: float) -> None:
        """It was served, and waits on."""
        began = self._waits[name]
        self._waits[name] += cost / self._weight(name)
        gone_by = self._present + cost / sum(map(self._weight, self._waits))
        self._present = max(began, min(gone_by, max(self._waits.values())))

    def leave(self, name: K) -> None:
        """It waits no more. Once nobody does, nobody is ahead of anybody."""
        self._ahead[name] = self._waits.pop(name)
        if not self._waits:
            self._ahead.clear()
            self._present = 0.0
        elif len(self._ahead) > 2 * len(self._waits) + _SPARE:
            self._ahead = {name: at for name, at in self._ahead.items() if at > self._present}

    def _weight(self, name: K) -> float:
        return self._weights.get(name, 1.0)


@dataclass(slots=True)
class _Line(Generic[T]):
    """What one client has waiting in one class: by priority, then by arrival."""

    items: list[tuple[int, int, float, T]] = field(default_factory=list)


@dataclass(slots=True)
class _Class(Generic[T]):
    clients: Fair[str]
    lines: dict[str, _Line[T]] = field(default_factory=dict)


class Waiting(Generic[T]):
    """The requests that wait. ``weights`` are those of clients."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._classes: dict[Class, _Class[T]] = {name: _Class(Fair(weights)) for name in WEIGHTS}
        self._shares: Fair[Class] = Fair(WEIGHTS)
        self._arrivals = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for each in self._classes.values():
            for line in each.lines.values():
                for *_, item in line.items:
                    yield item

    def of(self, kind: Class, client: str) -> int:
        """How many a client has waiting in a class."""
        line = self._classes[kind].lines.get(client)
        return 0 if line is None else len(line.items)

    def add(self, item: T, *, kind: Class, client: str, priority: int = 0, cost: float = 1.0) -> None:
        """One more waits. ``cost`` is what serving it takes, ``priority`` orders what its client has waiting."""
        place = self._classes[kind]
        if not place.lines:
            self._shares.join(kind)
        if client not in place.lines:
            place.lines[client] = _Line()
            place.clients.join(client)
        heapq.heappush(place.lines[client].items, (priority, self._arrivals, cost, item))
        self._arrivals += 1
        self._count += 1

    def next(self) -> T | None:
        """Takes out the one that is served next; None if nobody waits."""
        if not self._count:
            return None
        kind = self._shares.first()
        client = self._classes[kind].clients.first()
        _, _, cost, item = heapq.heappop(self._classes[kind].lines[client].items)
        self._classes[kind].clients.serve(client, cost)
        self._shares.serve(kind, cost)
        self._took(kind, client)
        return item

    def drop(self, item: T) -> None:
        """Takes one out that waits no longer; fine if it is not here."""
        for kind, place in self._classes.items():
            for client, line in place.lines.items():
                kept = [entry for entry in line.items if entry[3] is not item]
                if len(kept) < len(line.items):
                    heapq.heapify(kept)
                    line.items = kept
                    self._took(kind, client)
                    return

    def _took(self, kind: Class, client: str) -> None:
        """One of a client is out; who has nothing more waits no more."""
        self._count -= 1
        place = self._classes[kind]
        if not place.lines[client].items:
            del place.lines[client]
            place.clients.leave(client)
        if not place.lines:
            self._shares.leave(kind)
