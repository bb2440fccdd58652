"""The runs that a worker holds: claimed in the store, their deliveries unacked. It finishes them or hands them over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from headrace.broker.ports import Broker, BrokerError, Delivery, Release, Role
from headrace.logs import get_logger
from headrace.protocol.jobs import Job

log = get_logger()


class HeldRun(Protocol):
    """A run under its holder's epoch, and the delivery that stands for it."""

    @property
    def job(self) -> Job: ...

    delivery: Delivery
    epoch: int


H = TypeVar("H", bound=HeldRun)


class Holding(Generic[H]):
    """The runs that one worker holds under one role."""

    def __init__(self, broker: Broker, role: Role, worker: str) -> None:
        self._broker = broker
        self._role = role
        self._worker = worker
        self._runs: dict[str, H] = {}
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

    def add(self, held: H) -> None:
        self._runs[held.job.run] = held
        self._none.clear()

    def drop(self, held: H) -> None:
        """Holds it no longer; fine if it was dropped before, and if the run is held anew since."""
        if self._runs.get(held.job.run) is held:
            del self._runs[held.job.run]
        if not self._runs:
            self._none.set()

    async def adopt(self, held: H, delivery: Delivery) -> None:
        """The run came once more: the new delivery stands for it, the old one is settled."""
        held.delivery, old = delivery, held.delivery
        await self._broker.queues.ack(old)

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
