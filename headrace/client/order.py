"""Numbered items in order: each once, none left out, in bounded memory."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """A reorder buffer over seq 0, 1, 2, ... that holds at most ``limit`` items.

    ``taken`` is the seq that the reader gets next, ``expected`` the first that has not arrived, ``horizon`` the first
    that nobody has spoken of. What arrives again, or too far ahead of the reader, is dropped: ``missing`` then tells.
    """

    __slots__ = ("_held", "_limit", "expected", "horizon", "taken")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[int, T] = {}
        self.taken = 0
        self.expected = 0
        self.horizon = 0

    @property
    def missing(self) -> bool:
        """Whether an item is known to exist that has not arrived in its turn."""
        return self.expected < self.horizon

    def heard_of(self, total: int) -> None:
        """There are at least ``total`` items."""
        self.horizon = max(self.horizon, total)

    def put(self, seq: int, item: T) -> None:
        """Takes an item in, unless it was here before or there is no room for it."""
        self.heard_of(seq + 1)
        if not self.expected <= seq < self.taken + self._limit:
            return
        self._held.setdefault(seq, item)
        while self.expected in self._held:
            self.expected += 1

    def get(self) -> T | None:
        """The next item, if it has arrived."""
        if self.taken == self.expected:
            return None
        self.taken += 1
        return self._held.pop(self.taken - 1)
