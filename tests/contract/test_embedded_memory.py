"""The embedded broker forgets: its memory depends on what is alive, not on what has been."""

import tracemalloc

from headrace.broker.contract.stores import a_run, a_worker, append, batch, claim, taken
from headrace.broker.entries import Position
from headrace.broker.ports import Allowance, Checkpoint, ClaimAnswer
from tests.contract.worlds import EmbeddedWorld

REPLAY_TTL = 60.0
PER_SECOND = 10


async def test_ten_thousand_finished_runs_leave_nothing_behind() -> None:
    world = EmbeddedWorld.new()
    shelf = world.home.shelf
    async with world.connect() as stores:

        async def live(number: int) -> None:
            for run in (a_run() for _ in range(number)):
                await claim(stores, run, "worker", lifetime=24 * 3600, replay_ttl=REPLAY_TTL, job=b"{}")
                await claim(stores, run, "worker", "derender", lifetime=24 * 3600, replay_ttl=REPLAY_TTL)
                await append(stores, batch(run, Position(1, 0), 1, 3, ends=True))
                await stores.runs.save([Checkpoint(run, 1, b"state")])
                await stores.runs.outcome(run, b"done", REPLAY_TTL)
                await stores.elapse(1 / PER_SECOND)

        await live(2_000)
        tracemalloc.start()
        try:
            await live(100)
            before, _ = tracemalloc.get_traced_memory()
            await live(8_000)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        kept = len(shelf)
        assert kept <= (REPLAY_TTL + 16 + 1) * PER_SECOND
        # What was alive when the counting began was not counted, so as much of it again may have come.
        assert after - before < 10_000 * kept
        await stores.elapse(2 * REPLAY_TTL)
        await live(1)
        assert len(shelf) == 1


async def test_unfinished_runs_and_cancellations_go_too() -> None:
    world = EmbeddedWorld.new()
    async with world.connect() as stores:
        for _ in range(1_000):
            await claim(stores, a_run(), a_worker(), lifetime=30, replay_ttl=30)
            await stores.runs.cancel(a_run(), "not wanted", 30)
        assert len(world.home.shelf) == 2_000
        await stores.elapse(80)
        await taken(stores, a_run(), a_worker())
        assert len(world.home.shelf) == 1


async def test_a_run_that_comes_again_right_after_its_time_is_a_new_one_and_stays() -> None:
    world, run = EmbeddedWorld.new(), a_run()
    async with world.connect() as stores:
        await claim(stores, run, "first", lifetime=10, replay_ttl=10)
        await stores.elapse(20)
        assert (await claim(stores, run, "second", lifetime=600)).epoch == 1
        for _ in range(10):
            await stores.elapse(20)
            await stores.runs.beat("second", [run], 30)
            await taken(stores, a_run(), "another")
            assert (await claim(stores, run, "third")).answer is ClaimAnswer.ALIVE


async def test_finished_runs_share_a_bounded_room_and_the_oldest_make_place() -> None:
    world = EmbeddedWorld.new(replay_bytes=1 << 20)
    runs = [a_run() for _ in range(1_000)]
    async with world.connect() as stores:
        running = a_run()
        await taken(stores, running, a_worker())
        for run in runs:
            await taken(stores, run, a_worker())
            await append(stores, batch(run, Position(1, 0), 1, 50, ends=True))
            assert await stores.runs.outcome(run, b"x" * 1_000, REPLAY_TTL) == b"x" * 1_000
        kept = [run for run in runs if await stores.runs.result(run) is not None]
        assert 50 <= len(kept) <= 100
        assert kept == runs[-len(kept) :]
        assert await stores.log.exists([running, *kept]) == [True] * (1 + len(kept))
        await stores.runs.outcome(running, b"x" * (2 << 20), REPLAY_TTL)  # too large for the room, and yet the newest
        assert await stores.runs.result(running) == b"x" * (2 << 20)
        assert len(world.home.shelf) == 1
        await stores.elapse(10 * REPLAY_TTL)
        for run in runs:
            await stores.runs.outcome(run, b"x" * 1_000, REPLAY_TTL)
        assert [run for run in runs if await stores.runs.result(run) is not None] == runs[-len(world.home.shelf) :]


async def test_dead_workers_are_forgotten() -> None:
    world, run = EmbeddedWorld.new(), a_run()
    async with world.connect() as stores:
        for _ in range(1_000):
            await stores.runs.beat(a_worker(), [run], 1.0)
            await stores.elapse(1.0)
        assert world.home.shelf.workers <= 1


async def test_a_reopened_run_is_not_among_the_finished_ones_and_its_room_is_given_back() -> None:
    world, run = EmbeddedWorld.new(replay_bytes=1 << 20), a_run()
    async with world.connect() as stores:
        for _ in range(20):  # each time it fills the room nearly; were that counted again, nothing else would fit
            await taken(stores, run, a_worker())
            await stores.runs.outcome(run, b"x" * 900_000, REPLAY_TTL)
            await stores.runs.reopen(run, await stores.now() + 600, REPLAY_TTL, fresh=True)
        others = [a_run() for _ in range(400)]
        for other in others:
            await stores.runs.outcome(other, b"x", REPLAY_TTL)
        assert [await stores.runs.result(other) for other in others] == [b"x"] * len(others)
        for _ in range(400):
            await stores.runs.outcome(a_run(), b"x", REPLAY_TTL)
        assert (await claim(stores, run, a_worker())).epoch > 20


async def test_bodies_clients_and_reports_of_old_are_forgotten() -> None:
    world = EmbeddedWorld.new()
    shelf = world.home.shelf
    async with world.connect() as stores:
        for _ in range(1_000):
            worker, until = a_worker(), await stores.now() + 30
            await stores.runs.put_body(a_run(), "job", b"{}", 30)
            await stores.runs.enter(worker, a_run(), 1, until, Allowance())
            await stores.runs.report(worker, worker, b"{}", 30)
            await stores.runs.leave(a_worker(), a_run())
            assert await stores.runs.reports(a_worker()) == {}
            await stores.elapse(1)
        assert (len(shelf.bodies), len(shelf.under_way), len(shelf.reports)) == (30, 30, 30)
