"""Who waits for the engine gets in in its turn, and what it does not use comes back."""

from __future__ import annotations

import asyncio

import pytest

from headrace.protocol.errors import Cancelled, DeadlineExceeded
from headrace.workers.generate.turns import NoTurn, Place, Turns
from headrace.workers.generate.waiting import Waiting
from tests.line import WAIT_S

FAR = 1e12


def turns(most: int = 4) -> Turns:
    return Turns(Waiting[Place]({}), most)


async def wait(
    turns: Turns,
    rows: int = 1,
    *,
    run: str = "run",
    deadline: float = FAR,
    begun: bool = False,
    patience: float = WAIT_S,
) -> None:
    await turns.wait(Place(run, "normal", "client", rows, deadline, begun=begun), patience)


async def test_turns_are_given_while_there_is_room_and_as_it_comes_free() -> None:
    some = turns(4)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        await wait(some, 3)
        await wait(some, 3)  # there was room for a part of it: it may wait in the engine
        third = group.create_task(wait(some, 2))
        await asyncio.sleep(0)
        assert (some.taken, len(some), third.done()) == (6, 1, False)
        some.free(3)
        await third
        assert (some.taken, len(some)) == (5, 0)


async def test_a_closed_gate_gives_no_turns() -> None:
    some = turns()
    some.open(False)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(wait(some))
        await asyncio.sleep(0)
        assert len(some) == 1
        some.open(True)
        await waiting


async def test_what_was_begun_before_goes_through_a_closed_gate_but_not_beyond_the_rows() -> None:
    some = turns(2)
    some.open(False)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        fresh = group.create_task(wait(some))
        await wait(some, begun=True)
        await wait(some, begun=True)
        third = group.create_task(wait(some, begun=True))
        await asyncio.sleep(0)
        assert (some.taken, len(some)) == (2, 2)
        some.open(True)
        some.free(1)
        await third
        assert not fresh.done()
        some.free(1)
        await fresh


async def test_who_waits_too_long_or_at_a_stop_gets_no_turn() -> None:
    some = turns()
    some.open(False)
    with pytest.raises(NoTurn):
        await wait(some, patience=0.0)
    waiting = asyncio.create_task(wait(some))
    await asyncio.sleep(0)
    some.leave()
    with pytest.raises(NoTurn):
        await waiting
    with pytest.raises(NoTurn):
        await wait(some)
    assert (len(some), some.taken) == (0, 0)


async def test_a_turn_that_comes_as_patience_ends_is_taken() -> None:
    some = turns(1)
    await wait(some)
    waiting = asyncio.create_task(wait(some, patience=0.0))
    await asyncio.sleep(0)
    some.free(1)
    async with asyncio.timeout(WAIT_S):
        await waiting
    assert (len(some), some.taken) == (0, 1)


async def test_one_that_is_cancelled_gives_back_what_it_was_given() -> None:
    some = turns(1)
    await wait(some)
    waiting = asyncio.create_task(wait(some))
    await asyncio.sleep(0)
    some.free(1)  # its turn comes
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (len(some), some.taken) == (0, 0)


async def test_who_is_turned_away_or_late_hears_why_and_the_others_wait_on() -> None:
    some = turns()
    some.open(False)
    names = {"away": FAR, "late": 5.0, "stays": FAR}
    waiting = {name: asyncio.create_task(wait(some, run=name, deadline=at)) for name, at in names.items()}
    await asyncio.sleep(0)
    assert [place.run for place in some] == list(names)
    some.turn_away("away", Cancelled("enough"))
    some.turn_away("nobody", Cancelled("enough"))
    some.end_late(5.0, DeadlineExceeded("late"))
    with pytest.raises(Cancelled):
        await waiting["away"]
    with pytest.raises(DeadlineExceeded):
        await waiting["late"]
    assert (len(some), some.taken) == (1, 0)
    some.open(True)
    await waiting["stays"]
    assert (len(some), some.taken) == (0, 1)
