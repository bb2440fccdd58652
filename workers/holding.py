"""The runs that a worker holds: claimed in the store, their deliveries unacked. It finishes them or hands them over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from headrace.broker.ports import Broker, BrokerError, Delivery, Release, Role
from headrace.logs import get_logger
from headrace.protocol.jobs import Job
from headrace.workers.terms import DEFAULT_TERMS, Terms

log = get_logger()

BEGUN: Final = "x-headrace-begun"
"""Header of a job whose run somebody has held."""


class HeldRun(Protocol):
    """A run under its holder's epoch, and the delivery that stands for it."""

    @property
    def job(self) -> Job: ...

    delivery: Delivery
    epoch: int


H = TypeVar("H", bound=HeldRun)


class Holding(Generic[H]):
    """The runs that one worker holds under one role. Times are Unix seconds."""

    def __init__(
        self,
        broker: Broker,
        role: Role,
        worker: str,
        *,
        terms: Terms = DEFAULT_TERMS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker = broker
        self._role = role
        self._worker = worker
        self._terms = terms
        self._clock = clock
        self._runs: dict[str, H] = {}
        self._since: dict[str, float] = {}
        """When the delivery that stands for a run was taken."""
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[H]:
        return iter(list(self._runs.values()))

    def get(self, run: str) -> H | None:
        return self._runs.get(run)

    def runs(self) -> list[str]:
        """The names of the runs."""
        return list(self._runs)

    def add(self, held: H, since: float | None = None) -> None:
        """Holds a run, whose delivery was taken ``since`` then; now, if nothing is said."""
        self._runs[held.job.run] = held
        self._since[held.job.run] = self._clock() if since is None else since
        self._none.clear()

    def drop(self, held: H) -> None:
        """Holds it no longer; fine if it was dropped before, and if the run is held anew since."""
        if self._runs.get(held.job.run) is held:
            del self._runs[held.job.run], self._since[held.job.run]
        if not self._runs:
            self._none.set()

    async def adopt(self, held: H, delivery: Delivery) -> None:
        """The run came once more: the new delivery stands for it, the old one is settled."""
        held.delivery, old = delivery, held.delivery
        self._since[held.job.run] = self._clock()
        await self._broker.queues.ack(old)

    async def renew(self, moment: float) -> None:
        """Has the broker deliver anew what it would soon take for forgotten: deliveries held for half the time that it
        allows. The run goes on meanwhile, and adopts the copy when it comes."""
        for held in self:
            run = held.job.run
            if self._runs.get(run) is not held or moment - self._since[run] < self._terms.consumer_timeout / 2:
                continue
            try:
                await self._broker.queues.retry(held.delivery, self._terms.beat, {BEGUN: True})
            except BrokerError as away:
                log.warning("run.not_renewed", request_id=held.job.request_id, error=str(away))
                return
            if self._runs.get(run) is held:
                self._since[run] = moment

    async def finished(self, grace: float) -> None:
        """Returns when nothing is held any more, or after ``grace`` seconds."""
        try:
            async with asyncio.timeout(grace):
                await self._none.wait()
        except TimeoutError:
            log.warning("worker.handing_over", worker=self._worker, runs=len(self._runs))

    async def hand_over(self) -> None:
        """Lets go of everything: another worker goes on from what is durable, no attempt is used."""
        held = list(self)
        for each in held:
            self.drop(each)
        await asyncio.gather(*(self._hand_over(each) for each in held))

    async def _hand_over(self, held: H) -> None:
        """First the claim, then the delivery: who gets it must find the run free. Without the store, its heartbeat
        tells them."""
        try:
            await self._broker.runs.release(held.job.run, self._role, held.epoch, Release.HANDOVER)
        except BrokerError as away:
            log.warning("run.not_released", request_id=held.job.request_id, epoch=held.epoch, error=str(away))
        try:
            await self._broker.queues.release(held.delivery)
        except BrokerError as away:
            log.warning("run.not_given_back", request_id=held.job.request_id, error=str(away))
