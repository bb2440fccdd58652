"""A run that takes its workers down is found and given up; those that were beside it are not blamed, and complete."""

import asyncio
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.contract.stores import Stores, a_run, a_worker, claim
from headrace.broker.ports import Claim, ClaimAnswer, Release
from tests.contract.worlds import EmbeddedWorld

MAX_RESCUES = 3


@dataclass(slots=True)
class Worker:
    """A process with so many rows; ``held`` is what it runs, with the claim of each."""

    rows: int
    name: str = field(default_factory=a_worker)
    held: dict[str, Claim] = field(default_factory=dict)

    @property
    def tries(self) -> bool:
        """Whether one of them is a suspect."""
        return any(claim.trial for claim in self.held.values())


@dataclass(slots=True)
class Fleet:
    """Workers that take runs as they come. ``poison`` kills whoever runs it, after a while; every other one completes.

    Of all that can happen next, chance decides; runs that wait are delivered in a random order.
    """

    stores: Stores
    chance: Random
    rows: int
    workers: list[Worker]
    waiting: list[str]
    poison: str
    deaths: int = 0
    given_up: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(worker.held for worker in self.workers)

    async def step(self) -> None:
        worker = self.chance.choice(self.workers)
        if len(worker.held) < worker.rows and self.waiting and self.chance.random() < 0.6:
            await self.take(worker)
        elif worker.held:
            run = self.chance.choice(sorted(worker.held))
            if self.chance.random() < 0.2:
                await self.hand_over(worker, run)
            elif run == self.poison:
                await self.die(worker)
            else:
                await self.complete(worker, run)

    async def take(self, worker: Worker) -> None:
        run = self.waiting.pop(self.chance.randrange(len(self.waiting)))
        claimed = await claim(
            self.stores, run, worker.name, max_rescues=MAX_RESCUES, trial=not worker.tries, lifetime=3600
        )
        match claimed.answer:
            case ClaimAnswer.NEW:
                assert not (claimed.trial and worker.tries), "one suspect at a time"
                worker.held[run] = claimed
            case ClaimAnswer.SUSPECT:
                assert worker.tries
                self.waiting.append(run)
            case ClaimAnswer.EXHAUSTED:
                await self.stores.runs.outcome(run, b"exhausted", 60.0)
                self.given_up.append(run)
            case other:
                raise AssertionError(other)

    async def hand_over(self, worker: Worker, run: str) -> None:
        await self.stores.runs.release(run, "generate", worker.held.pop(run).epoch, Release.HANDOVER)
        self.waiting.append(run)

    async def complete(self, worker: Worker, run: str) -> None:
        assert worker.held.pop(run).rescues <= MAX_RESCUES - 1
        await self.stores.runs.outcome(run, b"answered", 60.0)
        self.completed.append(run)

    async def die(self, worker: Worker) -> None:
        self.deaths += 1
        await self.stores.lapse(worker.name)
        self.waiting += worker.held
        self.workers[self.workers.index(worker)] = Worker(self.rows)


async def tell(chance: Random, workers: int, rows: int, innocents: int) -> None:
    async with EmbeddedWorld.new().connect() as stores:
        runs = [a_run() for _ in range(innocents + 1)]
        fleet = Fleet(stores, chance, rows, [Worker(rows) for _ in range(workers)], list(runs), poison=runs[0])
        steps = 0
        while fleet.busy:
            await fleet.step()
            steps += 1
            assert steps < 2_000 * len(runs), "it comes to an end"
        assert fleet.given_up == [fleet.poison]
        assert sorted(fleet.completed) == sorted(runs[1:])
        assert fleet.deaths == MAX_RESCUES + 1


@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    rows=st.integers(1, 6),
    innocents=st.integers(0, 12),
)
@settings(max_examples=150)
def test_a_poisonous_run_is_given_up_and_no_other(seed: int, workers: int, rows: int, innocents: int) -> None:
    asyncio.run(tell(Random(seed), workers, rows, innocents))
