"""What happens to a run besides its log: once a beat a worker shows that it lives, and hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.broker.entries import Position
from headrace.broker.ports import Broker, BrokerError
from headrace.logs import get_logger
from headrace.protocol.errors import Cancelled, DeadlineExceeded, HeadraceError, StreamLost
from headrace.workers.derender.rounds import Rounds
from headrace.workers.derender.told import Told
from headrace.workers.holding import Holding
from headrace.workers.runtime import now
from headrace.workers.terms import Terms

log = get_logger()


@dataclass(frozen=True, slots=True)
class Facts:
    """What a beat was told of a run: why it was cancelled, if it was; whether its log is there; its outcome."""

    cancelled: str | None = None
    there: bool = True
    outcome: bytes | None = None


UNKNOWN: Final = Facts()


def verdict(told: Told, facts: Facts, moment: float) -> HeadraceError | None:
    """Why the run is to be ended at this moment (Unix seconds), however much of its log is still to be told."""
    if facts.cancelled is not None:
        return Cancelled(facts.cancelled)
    if told.job.deadline is not None and told.job.deadline <= moment:
        return late()
    if not facts.there and not told.over:
        return StreamLost("stored output was lost; send the request again")
    return None


def late() -> DeadlineExceeded:
    """What a client hears whose deadline came before the end."""
    return DeadlineExceeded("deadline: it passed before the answer was told", param="deadline")


class Beat:
    """Ends the runs that were cancelled, are late, have lost their log, or have their outcome from elsewhere; says how
    far behind the worker is, and holds new runs off while that is too far.

    ``settle`` is called for a run that is over, with its outcome where that stands already.
    """

    def __init__(
        self,
        broker: Broker,
        worker: str,
        model: str,
        held: Holding[Told],
        rounds: Rounds,
        settle: Callable[[Told, bytes | None], None],
        terms: Terms,
    ) -> None:
        self._broker = broker
        self._worker = worker
        self._model = model
        self._held = held
        self._rounds = rounds
        self._settle = settle
        self._terms = terms
        self._seen: dict[str, Position] = {}
        self.in_time = asyncio.Event()
        """Set while the worker is not too far behind to take more."""
        self.in_time.set()

    async def go_on(self) -> None:
        """Beat after beat, until it is cancelled."""
        while True:
            await self._look()
            await self._say()
            await asyncio.sleep(self._terms.beat)

    async def _look(self) -> None:
        held = list(self._held)
        facts = await self._ask(held)
        moment = now()
        for told in held:
            if self._held.get(told.job.run) is not told:
                continue  # it came to its end, or began anew, while the store was asked
            known = facts.get(told.job.run, UNKNOWN)
            if known.outcome is not None:
                self._settle(told, known.outcome)
            elif (error := verdict(told, known, moment)) is not None:
                told.lost = error
                self._settle(told, None)

    async def _ask(self, held: list[Told]) -> dict[str, Facts]:
        """What the store knows of the runs. The outcome of one that had news since the last beat is not asked for: it
        is still being written, or its log is still being read."""
        at = {told.job.run: told.follower.position for told in held}
        silent = [run for run, position in at.items() if self._seen.get(run) == position]
        self._seen = at
        runs = list(at)
        try:
            cancelled = await self._broker.runs.beat(self._worker, runs, self._terms.heartbeat)
            there = await self._broker.log.exists(runs)
            outcomes = await asyncio.gather(*(self._broker.runs.result(run) for run in silent))
        except BrokerError as away:
            log.warning("worker.beat_failed", worker=self._worker, error=str(away))
            return {}
        ended = dict(zip(silent, outcomes, strict=True))
        return {run: Facts(cancelled.get(run), exists, ended.get(run)) for run, exists in zip(runs, there, strict=True)}

    async def _say(self) -> None:
        behind = self._rounds.behind
        if behind <= self._terms.lag_limit:
            self.in_time.set()
        else:
            self.in_time.clear()
        vitals = {"role": "derender", "behind": round(behind, 3), "held": len(self._held)}
        try:
            await self._broker.runs.report(
                self._model, self._worker, msgspec.json.encode(vitals), self._terms.heartbeat
            )
        except BrokerError as away:
            log.warning("worker.report_failed", worker=self._worker, error=str(away))
