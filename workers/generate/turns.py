"""Requests wait here for the engine's rows, unclaimed, and go in one by one, each in its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from headrace.protocol.errors import HeadraceError
from headrace.workers.generate.waiting import Class, Waiting


class NoTurn(Exception):
    """It did not get its turn here: the worker leaves, or it has waited as long as it may."""


def _turn() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class Place:
    """Where a request waits. ``rows`` is how many rows it will take, ``deadline`` is in Unix seconds.

    ``begun``: somebody has held its run before.
    """

    run: str
    kind: Class
    client: str
    rows: int
    deadline: float
    priority: int = 0
    begun: bool = False
    turn: asyncio.Future[None] = field(default_factory=_turn)


class Turns:
    """Lets requests go in while fewer than ``most`` rows are taken and the gate is open.

    Runs that were begun before go first, and through a closed gate: what they have stored is freed by their end alone.
    Whoever had its turn says when its rows are free again.
    """

    def __init__(self, waiting: Waiting[Place], most: int) -> None:
        self._begun: Waiting[Place] = Waiting({})
        self._waiting = waiting
        self._most = most
        self._taken = 0
        self._open = True
        self.leaving = False

    @property
    def taken(self) -> int:
        """Rows that are taken."""
        return self._taken

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._begun) + len(self._waiting)

    def __iter__(self) -> Iterator[Place]:
        return chain(self._begun, self._waiting)

    def of(self, kind: Class, client: str) -> int:
        """How many a client has waiting."""
        return self._waiting.of(kind, client)

    async def wait(self, place: Place, patience: float) -> None:
        """Returns in its turn; the rows are taken from then on. ``patience`` is in seconds.

        Raises NoTurn; what ``turn_away`` was given.
        """
        if self.leaving:
            raise NoTurn
        line = self._line(place)
        line.add(place, kind=place.kind, client=place.client, priority=place.priority, cost=place.rows)
        self._let_in()
        try:
            if not place.turn.done():
                async with asyncio.timeout(patience):
                    await place.turn
        except TimeoutError:
            if place.turn.cancelled():  # else its turn came at the last moment
                line.drop(place)
                raise NoTurn from None
        except asyncio.CancelledError:
            line.drop(place)
            if not place.turn.cancelled() and place.turn.exception() is None:
                self.free(place.rows)
            raise
        place.turn.result()

    def take(self, rows: int) -> None:
        """Takes rows out of turn."""
        self._taken += rows

    def free(self, rows: int) -> None:
        """Rows are free again."""
        self._taken -= rows
        self._let_in()

    def open(self, is_open: bool) -> None:
        """Opens or closes the gate."""
        self._open = is_open
        self._let_in()

    def end_late(self, moment: float, error: HeadraceError) -> None:
        """Ends the waiting of those whose deadline has come."""
        for place in [place for place in self if place.deadline <= moment]:
            self._turn_away(place, error)

    def turn_away(self, run: str, error: HeadraceError) -> None:
        """Ends the waiting for a run; fine if nobody waits for it."""
        for place in [place for place in self if place.run == run]:
            self._turn_away(place, error)

    def leave(self) -> None:
        """Nobody gets a turn any more."""
        self.leaving = True
        for place in list(self):
            self._turn_away(place, NoTurn())

    def _turn_away(self, place: Place, error: Exception) -> None:
        self._line(place).drop(place)
        if not place.turn.done():
            place.turn.set_exception(error)

    def _line(self, place: Place) -> Waiting[Place]:
        return self._begun if place.begun else self._waiting

    def _let_in(self) -> None:
        while self._taken < self._most and (place := self._next()) is not None:
            if not place.turn.done():  # else whoever waited was cancelled just now
                self._taken += place.rows
                place.turn.set_result(None)

    def _next(self) -> Place | None:
        begun = self._begun.next()
        return self._waiting.next() if begun is None and self._open else begun
