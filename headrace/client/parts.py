"""Events that came in parts, each too large for one message, put together again."""

from __future__ import annotations

from typing import Final

from headrace.protocol.jobs import PartEvent

AT_A_TIME: Final = 4
"""Events of one request that may be incomplete at a time: the oldest makes room, and is found in the run store."""
MOST_PARTS: Final = 10_000


class Parts:
    """The parts of one request's events. They may come twice, and in any order."""

    def __init__(self) -> None:
        self._some: dict[str, dict[int, str]] = {}

    def add(self, part: PartEvent) -> bytes | None:
        """The event's JSON, once this part makes it whole. A part that fits no event is dropped."""
        if part.parts > MOST_PARTS or part.part >= part.parts:
            return None
        some = self._some.setdefault(part.of, {})
        some[part.part] = part.text
        if len(some) < part.parts:
            while len(self._some) > AT_A_TIME:
                del self._some[next(iter(self._some))]
            return None
        del self._some[part.of]
        return "".join(some[number] for number in sorted(some)).encode()
