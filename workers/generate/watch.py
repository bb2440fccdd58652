"""What a generate worker looks at once a beat besides its runs: whether more may begin, and where the crowd is."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec

from headrace.broker.ports import Broker, BrokerError
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.workers.generate import gate
from headrace.workers.generate.turns import Turns
from headrace.workers.holding import HeldRun, Holding
from headrace.workers.runtime import now
from headrace.workers.terms import Terms

log = get_logger()

H = TypeVar("H", bound=HeldRun)

CROWDED: Final = 1_000
"""Requests that wait in a lane before the clients with most of them are set apart."""
LEAST_UNTOLD: Final = 64
"""Runs that may wait for a derender worker, however few rows the engine has."""
UNSEEN: Final = "nobody has looked yet whether there is room"


class Watch:
    """Opens and closes the gate, has deliveries renewed, and reports how the worker is doing.

    Apart from the worker's beat, which must not wait for what is done here.
    """

    def __init__(
        self, broker: Broker, worker: str, model: str, held: Holding[H], turns: Turns, rows: int, terms: Terms
    ) -> None:
        self._broker = broker
        self._worker = worker
        self._model = model
        self._held = held
        self._turns = turns
        self._rows = rows
        self._terms = terms
        self._most_untold = max(LEAST_UNTOLD, 4 * rows)
        self._lanes = [jobs.queue_of("generate", model, lane) for lane in jobs.LANES]
        self._untold = jobs.queue_of("derender", model)
        self.crowded: frozenset[str] = frozenset()
        """Lanes in which so many wait that the clients with most of them are set apart."""
        self.gate: str | None = UNSEEN
        """Why no run may begin; None while they may."""
        turns.open(False)

    async def go_on(self) -> None:
        """Look after look, until it is cancelled."""
        while True:
            await self._look_at_gate()
            try:
                await self._held.renew(now())
                depths = {lane: await self._broker.queues.depth(lane) for lane in self._lanes}
                self.crowded = frozenset(lane for lane, depth in depths.items() if depth > CROWDED)
                said = msgspec.json.encode(self.vitals)
                await self._broker.runs.report(self._model, self._worker, said, self._terms.heartbeat)
            except BrokerError as away:
                log.warning("worker.look_failed", worker=self._worker, error=str(away))
            await asyncio.sleep(self._terms.beat)

    async def _look_at_gate(self) -> None:
        why = await gate.reason(
            self._broker, self._model, self._untold, self._terms, most_untold=self._most_untold, last=self.gate
        )
        if why is not None and (self.gate is None or self.gate is UNSEEN):
            log.warning("gate.closed", worker=self._worker, reason=why)
        elif why is None and self.gate is not None:
            log.info("gate.open", worker=self._worker)
        self.gate = why
        self._turns.open(why is None)

    @property
    def vitals(self) -> gate.Vitals:
        """How the worker is doing."""
        return gate.Vitals(
            "generate",
            held=len(self._held),
            waiting=len(self._turns),
            rows=self._rows,
            free_rows=max(0, self._rows - self._turns.taken),
            gate=self.gate,
        )
