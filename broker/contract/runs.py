"""What a RunStore promises. Subclass it under a name that starts with ``Test`` and give it ``connect``."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.broker.contract.shares import SharesContract
from headrace.broker.contract.stores import (
    a_run,
    a_worker,
    append,
    batch,
    claim,
    places,
    save,
    taken,
    whole,
)
from headrace.broker.contract.verdicts import VerdictsContract
from headrace.broker.entries import Begin, Position
from headrace.broker.ports import MAX_REASON, Append, Checkpoint, ClaimAnswer, Release


class RunStoreContract(VerdictsContract, SharesContract):
    """Who holds a run, whether it lives, what was asked of it, and its one outcome."""

    # ------------------------------------------------------------------------------------------------ one holder

    async def test_the_first_claim_takes_the_run_under_epoch_one(self) -> None:
        async with self.connect() as stores:
            claimed = await claim(stores, a_run(), a_worker())
            assert (claimed.answer, claimed.epoch, claimed.chunks) == (ClaimAnswer.NEW, 1, 0)
            assert (claimed.attempts, claimed.rescues) == (0, 0)

    async def test_its_holder_is_told_that_the_run_is_his_under_the_same_epoch(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            again = await claim(stores, run, worker, redelivered=True)
            assert (again.answer, again.epoch) == (ClaimAnswer.MINE, 1)
            assert places(await whole(stores, run)) == ["begin 1-0"]

    async def test_another_worker_waits_while_the_holder_lives(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores, self.connect() as others:
            await taken(stores, run, worker)
            for redelivered in (False, True):
                refused = await claim(others, run, a_worker(), redelivered=redelivered)
                assert (refused.answer, refused.epoch, refused.rescues) == (ClaimAnswer.ALIVE, 0, 0)
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.MINE

    async def test_of_many_who_claim_at_once_one_gets_the_run(self) -> None:
        run = a_run()
        async with self.connect() as one, self.connect() as two:
            claims = await asyncio.gather(*(claim(stores, run, a_worker()) for stores in (one, two) * 10))
            assert sorted(each.answer for each in claims) == [ClaimAnswer.ALIVE] * 19 + [ClaimAnswer.NEW]

    async def test_the_roles_of_a_run_are_held_each_for_itself(self) -> None:
        run, worker, other = a_run(), a_worker(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker, "generate")
            assert (await claim(stores, run, other, "derender")).answer is ClaimAnswer.NEW
            assert (await claim(stores, run, other, "generate")).answer is ClaimAnswer.ALIVE
            await stores.runs.release(run, "derender", 1, Release.FAILED)
            assert (await claim(stores, run, worker, "generate")).attempts == 0
            assert (await claim(stores, run, worker, "derender")).epoch == 2

    # ------------------------------------------------------------------------------------------------ life and death

    async def test_a_holder_whose_heartbeat_is_gone_is_replaced_and_counted_as_a_rescue(self) -> None:
        run, worker, other = a_run(), a_worker(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.lapse(worker)
            rescued = await claim(stores, run, other, redelivered=True)
            assert (rescued.answer, rescued.epoch, rescued.rescues) == (ClaimAnswer.NEW, 2, 1)
            assert rescued.attempts == 0

    async def test_a_dead_holder_is_replaced_whichever_delivery_comes(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.lapse(worker)
            rescued = await claim(stores, run, a_worker(), redelivered=False)
            assert (rescued.answer, rescued.rescues) == (ClaimAnswer.NEW, 1)

    async def test_a_heartbeat_is_gone_once_its_time_is_over(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await claim(stores, run, a_worker(), heartbeat=0.2)
            await claim(stores, run, a_worker(), "derender", heartbeat=30)  # its life is another's
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.ALIVE
            await stores.elapse(0.25)
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.NEW

    async def test_a_holder_that_beats_is_never_replaced_however_long_it_takes(self) -> None:
        runs, worker = [a_run() for _ in range(3)], a_worker()
        async with self.connect() as stores:
            for run in runs:
                await claim(stores, run, worker, heartbeat=0.3)
            for _ in range(4):
                await stores.elapse(0.15)
                assert await stores.runs.beat(worker, runs, 0.3) == {}
            for run in runs:
                assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.ALIVE

    async def test_a_claim_is_a_sign_of_life(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.lapse(worker)
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.MINE
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.ALIVE

    async def test_a_beat_for_no_run_or_for_an_unknown_one_tells_nothing(self) -> None:
        async with self.connect() as stores:
            assert await stores.runs.beat(a_worker(), [], 1.0) == {}
            assert await stores.runs.beat(a_worker(), [a_run()], 1.0) == {}

    # ------------------------------------------------------------------------------------------------ letting go

    async def test_a_run_that_was_handed_over_is_free_and_no_attempt_is_used(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.runs.release(run, "generate", 1, Release.HANDOVER)
            next_one = await claim(stores, run, a_worker(), redelivered=True)
            assert (next_one.answer, next_one.epoch) == (ClaimAnswer.NEW, 2)
            assert (next_one.attempts, next_one.rescues) == (0, 0)

    async def test_a_run_that_failed_is_free_and_one_attempt_is_used(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.runs.release(run, "generate", 1, Release.FAILED)
            again = await claim(stores, run, worker)
            assert (again.answer, again.epoch, again.attempts, again.rescues) == (ClaimAnswer.NEW, 2, 1, 0)

    async def test_a_release_that_is_said_twice_counts_once(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker())
            for _ in range(2):
                await stores.runs.release(run, "generate", 1, Release.FAILED)
            assert (await claim(stores, run, a_worker())).attempts == 1

    async def test_a_release_of_an_old_epoch_or_an_unknown_run_changes_nothing(self) -> None:
        run, first, second = a_run(), a_worker(), a_worker()
        async with self.connect() as stores:
            await stores.runs.release(run, "generate", 1, Release.FAILED)
            await taken(stores, run, first)
            await stores.lapse(first)
            await claim(stores, run, second)
            await stores.runs.release(run, "generate", 1, Release.FAILED)
            held = await claim(stores, run, second)
            assert (held.answer, held.epoch, held.attempts) == (ClaimAnswer.MINE, 2, 0)

    async def test_after_so_many_attempts_the_run_is_exhausted(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            for epoch in (1, 2):
                assert (await claim(stores, run, a_worker(), max_attempts=2)).epoch == epoch
                await stores.runs.release(run, "generate", epoch, Release.FAILED)
            spent = await claim(stores, run, a_worker(), max_attempts=2)
            assert (spent.answer, spent.epoch, spent.attempts) == (ClaimAnswer.EXHAUSTED, 0, 2)

    async def test_after_so_many_rescues_the_run_is_exhausted_and_its_log_begins_no_more(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            for epoch in (1, 2, 3):
                worker = a_worker()
                assert (await claim(stores, run, worker, max_rescues=2)).epoch == epoch
                await stores.lapse(worker)
            spent = await claim(stores, run, a_worker(), max_rescues=2)
            assert (spent.answer, spent.epoch, spent.rescues) == (ClaimAnswer.EXHAUSTED, 0, 2)
            assert places(await whole(stores, run)) == ["begin 1-0", "begin 2-0", "begin 3-0"]

    # ------------------------------------------------------------------------------------------------ refusals

    async def test_a_run_whose_deadline_has_passed_is_expired_also_for_its_holder(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, lifetime=0.2)
            await stores.elapse(0.25)
            for who in (worker, a_worker()):
                assert (await claim(stores, run, who, lifetime=60)).answer is ClaimAnswer.EXPIRED

    async def test_a_claim_that_comes_too_late_leaves_nothing_behind(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            assert (await claim(stores, run, a_worker(), lifetime=-1, job=b"{}")).answer is ClaimAnswer.EXPIRED
            assert await stores.runs.job(run) is None
            assert await stores.log.exists([run]) == [False]
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.NEW

    async def test_once_the_log_has_its_end_generate_is_told_so_and_derender_is_not(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            assert await append(stores, batch(run, Position(1, 0), 1, 3, ends=True)) is Append.STORED
            for who in (worker, a_worker()):
                assert (await claim(stores, run, who)).answer is ClaimAnswer.ENDED
            await stores.lapse(worker)
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.ENDED
            reader = await claim(stores, run, worker, "derender")
            assert (reader.answer, reader.chunks) == (ClaimAnswer.NEW, 2)

    # ------------------------------------------------------------------------------------------------ the log begins

    async def test_a_generate_claim_begins_the_log_and_says_who_and_when(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            before = await stores.now()
            await taken(stores, run, worker)
            (entry,) = await whole(stores, run)
            begin = msgspec.json.decode(entry.payload, type=Begin)
            assert (entry.kind, entry.position, begin.worker, begin.chunks) == ("begin", Position(1, 0), worker, 0)
            assert before - 0.01 <= begin.at <= await stores.now() + 0.01

    async def test_the_next_epoch_begins_after_the_chunks_that_are_there(self) -> None:
        run, worker, other = a_run(), a_worker(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await append(stores, batch(run, Position(1, 0), 1, 3))
            await stores.lapse(worker)
            rescued = await claim(stores, run, other)
            assert (rescued.epoch, rescued.chunks) == (2, 3)
            *_, entry = await whole(stores, run)
            begin = msgspec.json.decode(entry.payload, type=Begin)
            assert (entry.kind, entry.position, begin.worker, begin.chunks) == ("begin", Position(2, 0), other, 3)

    async def test_render_and_derender_claims_begin_no_log(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await taken(stores, run, a_worker(), "render")
            await taken(stores, run, a_worker(), "derender")
            assert await stores.log.exists([run]) == [False]

    # ------------------------------------------------------------------------------------------------ cancel

    async def test_a_run_that_nobody_has_claimed_can_be_cancelled(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            assert await stores.runs.cancel(run, "not wanted", 60.0)
            refused = await claim(stores, run, a_worker())
            assert (refused.answer, refused.reason) == (ClaimAnswer.CANCELLED, "not wanted")
            assert await stores.log.exists([run]) == [False]

    async def test_the_holder_of_a_cancelled_run_hears_of_it_at_its_next_beat_and_append(self) -> None:
        run, other, worker = a_run(), a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await taken(stores, other, worker)
            assert not await stores.runs.cancel(run, "not wanted", 60.0)
            assert await stores.runs.beat(worker, [run, other], 30.0) == {run: "not wanted"}
            told = await stores.log.append(
                [batch(run, Position(1, 0), 1), batch(run, Position(1, 0), 1), batch(other, Position(1, 0), 1)]
            )
            assert [each.cancelled for each in told] == ["not wanted", "not wanted", None]
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.MINE
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.ALIVE

    async def test_a_cancelled_run_that_is_let_go_of_is_cancelled_for_the_next(self) -> None:
        for let_go in (Release.HANDOVER, Release.FAILED, None):
            run, worker = a_run(), a_worker()
            async with self.connect() as stores:
                await taken(stores, run, worker)
                assert not await stores.runs.cancel(run, "not wanted", 60.0)
                if let_go is None:
                    await stores.lapse(worker)
                else:
                    await stores.runs.release(run, "generate", 1, let_go)
                assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.CANCELLED

    async def test_a_run_that_nobody_holds_any_more_is_the_cancellers_to_end(self) -> None:
        released, orphaned, generated, told = (a_run() for _ in range(4))
        worker, dead = a_worker(), a_worker()
        async with self.connect() as stores:
            await taken(stores, released, worker)
            await stores.runs.release(released, "generate", 1, Release.HANDOVER)
            await taken(stores, orphaned, dead)
            await stores.lapse(dead)
            for run in (generated, told):
                await taken(stores, run, worker)
                await append(stores, batch(run, Position(1, 0), 1, ends=True))
            await taken(stores, told, worker, "derender")
            asked = [await stores.runs.cancel(run, "not wanted", 60.0) for run in (released, orphaned, generated, told)]
            assert asked == [True, True, True, False]

    async def test_the_first_reason_stands(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await stores.runs.cancel(run, "first", 60.0)
            await stores.runs.cancel(run, "second", 60.0)
            assert (await claim(stores, run, a_worker())).reason == "first"

    async def test_of_a_long_reason_the_beginning_is_kept(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await stores.runs.cancel(run, "é" * 100_000, 60.0)
            assert (await claim(stores, run, worker)).reason == "é" * MAX_REASON
            assert await stores.runs.beat(worker, [run], 30.0) == {run: "é" * MAX_REASON}

    async def test_a_run_with_an_outcome_is_not_cancelled_any_more(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await stores.runs.outcome(run, b"done", 60.0)
            assert not await stores.runs.cancel(run, "too late", 60.0)
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.DONE

    # ------------------------------------------------------------------------------------------------ outcome

    async def test_the_first_outcome_stands_and_everybody_is_told_it(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            assert await stores.runs.result(run) is None
            assert await stores.runs.outcome(run, b"first", 60.0) == b"first"
            assert await stores.runs.outcome(run, b"second", 60.0) == b"first"
            assert await stores.runs.outcome(run, b"first", 60.0) == b"first"
            assert await stores.runs.result(run) == b"first"

    async def test_of_many_outcomes_at_once_one_stands(self) -> None:
        run = a_run()
        async with self.connect() as one, self.connect() as two:
            told = await asyncio.gather(
                *(stores.runs.outcome(run, b"%d" % n, 60.0) for n, stores in enumerate((one, two) * 10))
            )
            assert len(set(told)) == 1
            assert await one.runs.result(run) == told[0]

    async def test_a_run_with_an_outcome_is_done_for_every_role_however_late(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.runs.cancel(run, "not wanted", 60.0)
            await stores.runs.outcome(run, b'{"said":"\xc3\xa9\x00"}', 60.0)
            for role in ("render", "generate", "derender"):
                done = await claim(stores, run, worker, role, lifetime=-1)
                assert (done.answer, done.epoch, done.outcome) == (ClaimAnswer.DONE, 0, b'{"said":"\xc3\xa9\x00"}')

    # ------------------------------------------------------------------------------------------------ job and state

    async def test_the_job_of_the_first_claim_that_brings_one_is_kept(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            assert await stores.runs.job(run) is None
            await claim(stores, run, worker, "render")
            assert await stores.runs.job(run) is None
            await claim(stores, run, worker, "generate", job=b'{"first":"\x00"}')
            await claim(stores, run, worker, "derender", job=b"second")
            assert await stores.runs.job(run) == b'{"first":"\x00"}'

    async def test_a_claim_of_role_derender_brings_the_job_along(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            assert (await claim(stores, run, worker, "generate", job=b'{"first":"\x00"}')).job is None
            told = await claim(stores, run, worker, "derender")
            assert (told.answer, told.job) == (ClaimAnswer.NEW, b'{"first":"\x00"}')
            assert (await claim(stores, run, worker, "derender")).job == told.job
            assert (await claim(stores, run, worker, "generate")).job is None
            assert (await claim(stores, a_run(), worker, "derender")).job is None

    async def test_a_checkpoint_is_kept_for_the_current_derender_epoch_only(self) -> None:
        run, worker, other = a_run(), a_worker(), a_worker()
        async with self.connect() as stores:
            assert await save(stores, run, 1, b"nobody claimed it") == [False]
            await taken(stores, run, worker, "generate")
            assert await save(stores, run, 1, b"that is the epoch of another role") == [False]
            await taken(stores, run, worker, "derender")
            assert await stores.runs.load(run) is None
            assert await save(stores, run, 1, b"one\x00") == await save(stores, run, 1, b"two\x00") == [True]
            await stores.lapse(worker)
            assert (await claim(stores, run, other, "derender")).epoch == 2
            assert await stores.runs.load(run) == b"two\x00"
            assert await save(stores, run, 1, b"fenced") == [False]
            assert await save(stores, run, 2, b"three") == [True]
            assert await stores.runs.load(run) == b"three"

    async def test_checkpoints_of_many_runs_are_answered_each_for_itself(self) -> None:
        runs, worker = [a_run() for _ in range(3)], a_worker()
        async with self.connect() as stores:
            assert await stores.runs.save([]) == []
            for run in runs[:2]:
                await taken(stores, run, worker, "derender")
            states = [Checkpoint(run, 1, run.encode()) for run in runs]
            assert await stores.runs.save(states) == [True, True, False]
            assert [await stores.runs.load(run) for run in runs] == [runs[0].encode(), runs[1].encode(), None]

    # ------------------------------------------------------------------------------------------------ forgetting

    async def test_an_unfinished_run_is_forgotten_replay_ttl_after_its_deadline(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, lifetime=0.2, replay_ttl=0.4, job=b"{}")
            await claim(stores, run, worker, "derender", lifetime=0.2, replay_ttl=0.4)
            await append(stores, batch(run, Position(1, 0), 1))
            await save(stores, run, 1, b"state")
            await stores.elapse(0.3)
            assert await stores.runs.job(run) == b"{}"
            assert await stores.runs.load(run) == b"state"
            await stores.elapse(0.4)
            assert await stores.runs.job(run) is None
            assert await stores.runs.load(run) is None
            assert await stores.log.exists([run]) == [False]
            assert (await claim(stores, run, worker)).epoch == 1

    async def test_a_finished_run_is_forgotten_replay_ttl_after_its_outcome(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, lifetime=600, replay_ttl=600, job=b"{}")
            await claim(stores, run, worker, "derender", lifetime=600, replay_ttl=600)
            await append(stores, batch(run, Position(1, 0), 1))
            await save(stores, run, 1, b"state")
            await stores.runs.outcome(run, b"done", 0.3)
            assert places(await whole(stores, run)) == ["begin 1-0", "chunk 1-1"]
            await stores.elapse(0.35)
            assert await stores.runs.result(run) is None
            assert await stores.runs.job(run) is None
            assert await stores.runs.load(run) is None
            assert await stores.log.exists([run]) == [False]

    async def test_the_cancellation_of_a_run_that_never_comes_is_forgotten(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await stores.runs.cancel(run, "not wanted", 0.2)
            await stores.elapse(0.25)
            assert (await claim(stores, run, a_worker())).answer is ClaimAnswer.NEW
