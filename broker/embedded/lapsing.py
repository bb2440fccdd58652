"""Values that go by themselves, each when its time is over."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Generic, TypeAlias, TypeVar

V = TypeVar("V")

Key: TypeAlias = "tuple[str, str]"
"""Whose it is, and its name among those."""


class Lapsing(Generic[V]):
    """Values by owner and name, each until a Unix second of its own.

    Nobody finds one whose time is over; its memory is freed when the next one comes. Meant for few: what is asked of
    it looks at all of them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[Key, tuple[float, V]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: Key, value: V, until: float) -> None:
        """Keeps the value until then, in place of an earlier one."""
        now = self._clock()
        self._values = {other: kept for other, kept in self._values.items() if kept[0] > now}
        self._values[key] = until, value

    def prolong(self, key: Key, value: V, until: float) -> None:
        """Keeps the value until then; one that is there stays, for the longer time of the two."""
        old_until, old = self._values.get(key, (-inf, value))
        kept = old if old_until > self._clock() else value
        self.put(key, kept, max(old_until, until))

    def of(self, owner: str) -> dict[str, V]:
        """The owner's, by name."""
        now = self._clock()
        return {key[1]: value for key, (until, value) in self._values.items() if key[0] == owner and until > now}

    def pop(self, key: Key) -> None:
        """Forgets it."""
        self._values.pop(key, None)
