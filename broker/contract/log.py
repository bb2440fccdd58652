"""What a TokenLog promises. Subclass it under a name that starts with ``Test`` and give it ``connect``."""

from __future__ import annotations

import asyncio
import time

from headrace.broker.contract.queues import BOUND
from headrace.broker.contract.stores import (
    StoresContract,
    a_run,
    a_worker,
    answers,
    append,
    batch,
    claim,
    payload,
    places,
    taken,
    whole,
)
from headrace.broker.entries import Entry, NewEntry, Position
from headrace.broker.ports import Append, Batch, Release

START = Position(1, 0)


class TokenLogContract(StoresContract):
    """One stream of entries per run: dense, fenced, never trimmed before the outcome."""

    # ------------------------------------------------------------------------------------------------ append

    async def test_entries_come_back_as_they_were_written_under_dense_ids(self) -> None:
        run = a_run()
        sent = [
            NewEntry("chunk", b'{"text":"\xc3\xa9\x00\r\n"}', 0),
            NewEntry("chunk", b"", 2**64 - 1),
            NewEntry("end", b"x" * 100_000, 2**63),
        ]
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            assert await append(stores, Batch(run, START, 1, sent)) is Append.STORED
            _, *found = await whole(stores, run)
            assert found == [Entry(Position(1, k), new.kind, new.payload, new.before) for k, new in enumerate(sent, 1)]
            assert [entry.seq for entry in found] == [0, 1, 2]

    async def test_batches_follow_on_each_other(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            first = batch(run, START, 1, 2)
            second = batch(run, first.last, 3, 2, ends=True)
            assert [await append(stores, each) for each in (first, second)] == [Append.STORED] * 2
            expected = ["begin 1-0", "chunk 1-1", "chunk 1-2", "chunk 1-3", "end 1-4"]
            assert places(await whole(stores, run)) == expected

    async def test_batches_of_many_runs_are_answered_each_for_itself(self) -> None:
        good, ended, unknown = a_run(), a_run(), a_run()
        async with self.connect() as stores:
            for run in (good, ended):
                await taken(stores, run, a_worker())
            await append(stores, batch(ended, START, 1, ends=True))
            told = await stores.log.append(
                [
                    batch(good, START, 1, 2),
                    batch(ended, Position(1, 1), 2),
                    batch(unknown, START, 1),
                    batch(good, Position(1, 2), 3),
                ]
            )
            assert answers(told) == [Append.STORED, Append.FENCED, Append.LOST, Append.STORED]
            assert await stores.log.append([]) == []

    async def test_a_batch_that_is_sent_again_is_there_once(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            first = batch(run, START, 1, 2)
            last = batch(run, first.last, 3, 2, ends=True)
            for each in (first, last):
                assert [await append(stores, each) for _ in range(3)] == [
                    Append.STORED,
                    Append.ALREADY,
                    Append.ALREADY,
                ]
            assert len(await whole(stores, run)) == 5

    async def test_other_entries_under_the_same_ids_are_not_taken_for_it(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            await append(stores, batch(run, START, 1, 2, by="me"))
            assert await append(stores, batch(run, START, 1, 2, by="another")) is Append.LOST
            assert await append(stores, batch(run, START, 1, 2, by="me", ends=True)) is Append.LOST
            assert [entry.payload for entry in await whole(stores, run)][1:] == [payload(1, "me"), payload(2, "me")]

    async def test_an_old_epoch_is_fenced_and_adds_nothing(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as old, self.connect() as new:
            await taken(old, run, worker)
            first = batch(run, START, 1, 2)
            assert await append(old, first) is Append.STORED
            await old.lapse(worker)
            await claim(new, run, a_worker())
            assert await append(old, batch(run, first.last, 3)) is Append.FENCED
            assert await append(old, first) is Append.FENCED
            assert await append(new, batch(run, Position(2, 0), 3)) is Append.STORED
            assert places(await whole(new, run)) == ["begin 1-0", "chunk 1-1", "chunk 1-2", "begin 2-0", "chunk 2-3"]

    async def test_a_run_with_an_outcome_is_fenced(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            await stores.runs.outcome(run, b"done", 60)
            assert await append(stores, batch(run, START, 1)) is Append.FENCED
            assert places(await whole(stores, run)) == ["begin 1-0"]

    async def test_nothing_follows_the_end(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            end = batch(run, START, 1, ends=True)
            assert await append(stores, end) is Append.STORED
            assert await append(stores, batch(run, end.last, 2)) is Append.FENCED
            assert places(await whole(stores, run)) == ["begin 1-0", "end 1-1"]

    async def test_a_log_that_nobody_began_is_lost_not_made(self) -> None:
        run, derendered = a_run(), a_run()
        async with self.connect() as stores:
            await taken(stores, derendered, a_worker(), "derender")
            for each in (run, derendered):
                assert await append(stores, batch(each, START, 1)) is Append.LOST
            assert await stores.log.exists([run, derendered]) == [False, False]

    async def test_a_log_that_is_gone_is_lost_not_made_again(self) -> None:
        run, forgotten = a_run(), a_run()
        async with self.connect() as stores:
            for each in (run, forgotten):
                await taken(stores, each, a_worker())
                await append(stores, batch(each, START, 1))
            await stores.lose_log(run)
            await stores.lose_all(forgotten)
            for each in (run, forgotten):
                assert await append(stores, batch(each, START, 1)) is Append.LOST
                assert await append(stores, batch(each, Position(1, 1), 2)) is Append.LOST
            assert await stores.log.exists([run, forgotten]) == [False, False]

    async def test_a_log_that_is_shorter_than_its_writer_knows_is_lost(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await append(stores, batch(run, START, 1, 2))
            assert await append(stores, batch(run, Position(1, 3), 4)) is Append.LOST
            assert await append(stores, batch(run, Position(1, 1), 2, 2)) is Append.LOST
            assert len(await whole(stores, run)) == 3

    async def test_a_writer_whose_claim_is_lost_is_told_so_even_if_another_claim_came(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            await stores.runs.release(run, "generate", 1, Release.HANDOVER)
            await taken(stores, run, worker)
            assert await append(stores, batch(run, Position(2, 0), 1, 2)) is Append.STORED
            await stores.lose_all(run)
            await taken(stores, run, a_worker())
            assert await append(stores, batch(run, Position(2, 2), 3)) is Append.LOST

    async def test_chunks_are_counted_on_over_all_epochs(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            for epoch, count in ((1, 2), (2, 0), (3, 3)):
                claimed = await taken(stores, run, a_worker())
                assert claimed.epoch == epoch
                if count:
                    one = batch(run, Position(epoch, 0), claimed.chunks + 1, count)
                    assert await append(stores, one) is Append.STORED
                await stores.runs.release(run, "generate", epoch, Release.HANDOVER)
            claimed = await taken(stores, run, a_worker())
            assert (claimed.epoch, claimed.chunks) == (4, 5)
            ks = [entry.position.k for entry in await whole(stores, run) if entry.kind == "chunk"]
            assert ks == [1, 2, 3, 4, 5]

    async def test_a_gap_in_k_is_refused(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            assert await append(stores, batch(run, START, 2)) is Append.LOST
            assert await append(stores, batch(run, START, 1, 3)) is Append.STORED
            assert await append(stores, batch(run, START, 4)) is Append.LOST
            await stores.runs.release(run, "generate", 1, Release.HANDOVER)
            await taken(stores, run, worker)
            for k in (1, 3, 5):
                assert await append(stores, batch(run, Position(2, 0), k)) is Append.LOST
            assert await append(stores, batch(run, Position(2, 0), 4)) is Append.STORED

    async def test_the_end_is_no_chunk(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            await append(stores, batch(run, START, 1, 4, ends=True))
            assert (await claim(stores, run, a_worker(), "derender")).chunks == 3

    async def test_concurrent_appends_to_many_runs_are_each_stored_once(self) -> None:
        runs = [a_run() for _ in range(200)]
        async with self.connect() as stores:
            await asyncio.gather(*(taken(stores, run, "a worker") for run in runs))

            async def write(run: str) -> None:
                for k in range(1, 6):
                    assert await append(stores, batch(run, Position(1, k - 1), k)) is Append.STORED

            await asyncio.gather(*(write(run) for run in runs))
            found = await stores.log.read(dict.fromkeys(runs, Position()), wait=0)
            assert {run: len(entries) for run, entries in found.items()} == dict.fromkeys(runs, 6)

    # ------------------------------------------------------------------------------------------------ read

    async def test_a_read_gives_what_comes_after_each_cursor_and_no_more_than_asked(self) -> None:
        one, two, idle, unknown = (a_run() for _ in range(4))
        async with self.connect() as stores:
            for run in (one, two, idle):
                await taken(stores, run, a_worker())
            for run in (one, two):
                await append(stores, batch(run, START, 1, 5))
            cursors = {one: Position(1, 1), two: Position(), idle: START, unknown: Position()}
            found = await stores.log.read(cursors, wait=0, count=3)
            assert {run: places(entries) for run, entries in found.items()} == {
                one: ["chunk 1-2", "chunk 1-3", "chunk 1-4"],
                two: ["begin 1-0", "chunk 1-1", "chunk 1-2"],
            }
            assert await stores.log.read({}, wait=0) == {}

    async def test_a_reader_that_resumes_anywhere_sees_the_same_rest(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            for _ in range(3):
                claimed = await taken(stores, run, a_worker())
                await append(stores, batch(run, Position(claimed.epoch, 0), claimed.chunks + 1, 3))
                await stores.runs.release(run, "generate", claimed.epoch, Release.HANDOVER)
            everything = await whole(stores, run)
            assert len(everything) == 12
            for n, entry in enumerate(everything, 1):
                assert await whole(stores, run, entry.position) == everything[n:]

    async def test_a_read_with_entries_ready_returns_them_at_once(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            began = time.monotonic()
            assert run in await stores.log.read({run: Position()}, wait=2 * BOUND)
            assert time.monotonic() - began < BOUND

    async def test_a_read_waits_for_the_first_entry_of_any_of_its_runs(self) -> None:
        runs = [a_run() for _ in range(40)]
        async with self.connect() as stores, self.connect() as others:
            await asyncio.gather(*(taken(stores, run, "a worker") for run in runs))
            for k in range(1, 6):
                run = runs[k * 7]
                reading = asyncio.create_task(stores.log.read(dict.fromkeys(runs, Position(1, k)), wait=BOUND))
                await self._waits(reading)
                writer = others if k % 2 else stores
                assert await append(writer, batch(run, START, 1, k + 1)) is Append.STORED
                assert list(await reading) == [run]

    async def test_a_reader_hears_of_a_new_epoch(self) -> None:
        run = a_run()
        async with self.connect() as stores, self.connect() as others:
            await taken(others, run, a_worker())
            reading = asyncio.create_task(stores.log.read({run: START}, wait=BOUND))
            await self._waits(reading)
            await others.runs.release(run, "generate", 1, Release.HANDOVER)
            await taken(others, run, a_worker())
            assert places((await reading)[run]) == ["begin 2-0"]

    async def test_a_read_may_wait_for_a_log_that_does_not_exist_yet(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            reading = asyncio.create_task(stores.log.read({run: Position()}, wait=BOUND))
            await self._waits(reading)
            await taken(stores, run, a_worker())
            assert places((await reading)[run]) == ["begin 1-0"]

    async def test_a_read_that_finds_nothing_ends_after_its_wait(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            for cursors in ({run: START}, {}):
                began = time.monotonic()
                assert await stores.log.read(cursors, wait=0.1) == {}
                assert 0.09 <= time.monotonic() - began < BOUND

    async def test_a_waiting_read_can_be_woken(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            for cursors in ({run: START}, {}, {run: START}):
                stores.log.wake()
                reading = asyncio.create_task(stores.log.read(cursors, wait=10 * BOUND))
                await self._waits(reading)
                stores.log.wake()
                async with asyncio.timeout(BOUND):
                    assert await reading == {}

    async def test_a_read_that_is_woken_before_it_waits_returns_too(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            for _ in range(20):
                reading = asyncio.create_task(stores.log.read({run: START}, wait=10 * BOUND))
                await asyncio.sleep(0)
                stores.log.wake()
                async with asyncio.timeout(BOUND):
                    assert await reading == {}

    async def test_many_reads_may_wait_at_once(self) -> None:
        runs = [a_run() for _ in range(30)]
        async with self.connect() as stores:
            await asyncio.gather(*(taken(stores, run, "a worker") for run in runs))
            readings = [asyncio.create_task(stores.log.read({run: START}, wait=BOUND)) for run in runs]
            await self._waits(*readings)
            for run in runs:
                assert await append(stores, batch(run, START, 1)) is Append.STORED
            assert [list(found) for found in await asyncio.gather(*readings)] == [[run] for run in runs]

    async def test_a_read_that_is_given_up_costs_the_others_nothing(self) -> None:
        run, quiet = a_run(), a_run()
        async with self.connect() as stores:
            for each in (run, quiet):
                await taken(stores, each, a_worker())
            async with asyncio.timeout(BOUND):
                for k in range(1, 21):
                    given_up = asyncio.create_task(stores.log.read({quiet: START}, wait=10 * BOUND))
                    await self._waits(given_up)
                    given_up.cancel()
                    assert await append(stores, batch(run, Position(1, k - 1), k)) is Append.STORED
                    found = await stores.log.read({run: Position(1, k - 1)}, wait=10 * BOUND)
                    assert places(found[run]) == [f"chunk 1-{k}"]

    async def test_a_deleted_log_never_wakes_a_read_and_exists_tells(self) -> None:
        run, kept = a_run(), a_run()
        async with self.connect() as stores:
            for each in (run, kept):
                await taken(stores, each, a_worker())
            reading = asyncio.create_task(stores.log.read({run: START, kept: START}, wait=0.3))
            await self._waits(reading)
            await stores.lose_log(run)
            assert await reading == {}
            assert await stores.log.exists([run, kept, a_run()]) == [False, True, False]
            assert await stores.log.exists([]) == []

    @staticmethod
    async def _waits(*readings: asyncio.Task[dict[str, list[Entry]]]) -> None:
        """Gives the reads time to get to where they wait, and sees that they do."""
        done, _ = await asyncio.wait(readings, timeout=0.03)
        assert not done, "a read returned with nothing to tell"
