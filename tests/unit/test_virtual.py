"""The virtual clock of the tests: nobody waits, and whoever waits in vain is told so."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

from tests import virtual
from tests.virtual import Busy, Process, Stuck


def test_a_sleep_takes_no_time_but_on_the_clock() -> None:
    async def sleeper() -> tuple[float, float]:
        monotonic, unix = time.monotonic(), time.time()
        await asyncio.sleep(10 * 24 * 3600.0)
        return time.monotonic() - monotonic, time.time() - unix

    assert virtual.run(sleeper) == (864_000.0, 864_000.0)
    assert time.time() > virtual.EPOCH + 864_000


def test_timers_go_off_in_their_order() -> None:
    async def sleepers() -> list[float]:
        seen: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(seconds)

        async with asyncio.timeout(5.0), asyncio.TaskGroup() as group:
            for seconds in (3.0, 0.5, 2.0, 1e-6):
                group.create_task(sleeper(seconds))
        return seen

    assert virtual.run(sleepers) == [1e-6, 0.5, 2.0, 3.0]


def test_work_for_a_thread_is_done_on_this_one() -> None:
    async def errand() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(threading.get_ident)

    assert virtual.run(errand) == threading.get_ident()


def test_waiting_for_what_cannot_come_is_an_error() -> None:
    with pytest.raises(Stuck):
        virtual.run(lambda: asyncio.Event().wait())


def test_waiting_busily_is_an_error() -> None:
    async def busy() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Busy):
        virtual.run(busy)


async def ticking(seen: list[float]) -> None:
    """Two tasks of a process; one of them is made by the other."""

    async def tick(offset: float) -> None:
        await asyncio.sleep(offset)
        while True:
            seen.append(time.monotonic())
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        for offset in (0.0, 0.5):
            group.create_task(tick(offset))


def test_a_process_that_is_stopped_stands_still_and_sees_its_timers_when_it_goes_on() -> None:
    async def story() -> list[float]:
        seen: list[float] = []
        process = Process()
        process.start(ticking(seen))
        await asyncio.sleep(1.2)
        process.stop()
        await asyncio.sleep(10.0)
        process.go_on()
        await asyncio.sleep(0.1)
        await process.bury()
        return seen

    assert virtual.run(story) == [0.0, 0.5, 1.0, 11.2, 11.2]


def test_of_a_process_that_is_killed_nothing_runs_but_its_end() -> None:
    async def story() -> tuple[list[float], list[str]]:
        seen: list[float] = []
        ends: list[str] = []

        async def main() -> None:
            try:
                await ticking(seen)
            finally:
                ends.append("end")

        process = Process()
        task = process.start(main())
        await asyncio.sleep(0.2)
        process.stop()
        task.cancel()
        await asyncio.sleep(5.0)
        assert not ends
        await process.bury()
        return seen, ends

    assert virtual.run(story) == ([0.0], ["end"])


def test_the_same_story_takes_the_same_steps() -> None:
    async def story() -> list[int]:
        seen: list[int] = []

        async def each(number: int) -> None:
            try:
                await asyncio.sleep(number % 3)
            finally:
                seen.append(number)

        tasks = {asyncio.create_task(each(number)) for number in range(50)}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return seen

    first = virtual.run(story)
    assert sorted(first) == list(range(50))
    assert all(virtual.run(story) == first for _ in range(5))
