"""Whatever enters, leaves or is forgotten, as much of a client is counted as is under way: the sums never drift."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.contract.shares import a_client, enter
from headrace.broker.contract.stores import Stores, a_run
from headrace.broker.ports import Allowance
from tests.contract.worlds import EmbeddedWorld, RedisWorld
from tests.servers import Redis

BRIEF, LONG = 0.02, 600.0
BRIEF_ONES = frozenset((0, 1, 2))
"""Runs that nobody keeps for long: whether one of them still counts is a matter of time."""
ALLOWANCE = Allowance(requests=4, tokens=20)


@dataclass(frozen=True, slots=True)
class Entering:
    which: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Leaving:
    which: int


@dataclass(frozen=True, slots=True)
class Passing:
    """Time, until all brief ones are over."""


Step: TypeAlias = Entering | Leaving | Passing
Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[Stores]]

WHICH = st.integers(0, 5)
ENTERING: st.SearchStrategy[Step] = st.builds(Entering, WHICH, st.integers(1, 12))
STEPS = st.lists(
    st.one_of(ENTERING, ENTERING, ENTERING, st.builds(Leaving, WHICH), st.builds(Passing)), min_size=5, max_size=30
)


async def tell(connect: Connect, steps: list[Step]) -> None:
    client, runs = a_client(), [a_run() for _ in range(6)]
    counted: dict[int, int] = {}
    async with connect() as stores:
        for step in steps:
            match step:
                case Entering(which, tokens):
                    lasts = BRIEF if which in BRIEF_ONES else LONG
                    refusal = await enter(stores, client, runs[which], tokens, lasts=lasts, allowance=ALLOWANCE)
                    if which in counted:
                        assert refusal is None
                    elif which not in BRIEF_ONES and refusal is None:
                        assert ALLOWANCE.refusal(client, len(counted), sum(counted.values()), tokens) is None
                        counted[which] = tokens
                case Leaving(which):
                    await stores.runs.leave(client, runs[which])
                    counted.pop(which, None)
                case Passing():
                    await stores.elapse(BRIEF + 0.01)
        await stores.elapse(BRIEF + 0.01)
        left = 20 - sum(counted.values())
        assert await enter(stores, client, a_run(), left + 1, allowance=Allowance(tokens=20)) is not None
        assert await enter(stores, client, a_run(), left, allowance=Allowance(len(counted) + 1, 20)) is None


@given(STEPS)
@settings(max_examples=200)
def test_no_schedule_makes_the_embedded_sums_drift(steps: list[Step]) -> None:
    asyncio.run(tell(EmbeddedWorld.new().connect, steps))


@pytest.mark.servers
@given(STEPS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_schedule_makes_the_sums_on_redis_drift(redis_db: Redis, steps: list[Step]) -> None:
    asyncio.run(tell(RedisWorld(redis_db.url).connect, steps))
