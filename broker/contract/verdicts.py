"""What a RunStore promises of runs that are not simply taken: another's, a suspect, one that is refused or reopened.

Part of ``RunStoreContract``.
"""

from __future__ import annotations

import asyncio

from headrace.broker.contract.stores import (
    Stores,
    StoresContract,
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
from headrace.broker.entries import Position
from headrace.broker.ports import Append, Claim, ClaimAnswer, Release, Role


async def killed(stores: Stores, run: str, times: int, role: Role = "generate") -> None:
    """So many workers take the run and die of it."""
    for _ in range(times):
        worker = a_worker()
        assert (await claim(stores, run, worker, role, max_rescues=99)).answer is ClaimAnswer.NEW
        await stores.lapse(worker)


def ledger(claimed: Claim) -> tuple[ClaimAnswer, int, int, bool]:
    """The answer, attempts and rescues so far, whether it is a trial."""
    return claimed.answer, claimed.attempts, claimed.rescues, claimed.trial


class VerdictsContract(StoresContract):
    """Which requests a run is, how often it may fail or kill, and how it comes back."""

    # ------------------------------------------------------------------------------------------------ one request

    async def test_another_body_under_the_same_id_is_a_conflict(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            for who in (worker, a_worker()):
                assert (await claim(stores, run, who, digest="another")).answer is ClaimAnswer.CONFLICT
            await stores.runs.release(run, "generate", 1, Release.HANDOVER)
            assert (await claim(stores, run, worker, digest="another")).answer is ClaimAnswer.CONFLICT
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.NEW

    async def test_the_first_digest_stands_whichever_role_brought_it(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker, "render")
            for role in ("render", "generate", "derender"):
                assert (await claim(stores, run, worker, role, digest="another")).answer is ClaimAnswer.CONFLICT
            assert (await claim(stores, run, worker, "generate")).answer is ClaimAnswer.NEW

    async def test_a_claim_without_a_digest_is_of_any_request_and_says_nothing_of_it(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            assert (await claim(stores, run, worker, "derender", digest="")).answer is ClaimAnswer.NEW
            await taken(stores, run, worker)
            assert (await claim(stores, run, worker, "derender", digest="")).answer is ClaimAnswer.MINE
            assert (await claim(stores, run, worker, digest="another")).answer is ClaimAnswer.CONFLICT

    async def test_the_deadline_of_another_body_does_not_end_the_run(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            late = await claim(stores, run, a_worker(), digest="another", lifetime=-1)
            assert late.answer is ClaimAnswer.CONFLICT

    async def test_another_body_is_a_conflict_after_the_outcome_too(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            await stores.runs.outcome(run, b"{}", 60.0)
            assert (await claim(stores, run, worker, digest="another")).answer is ClaimAnswer.CONFLICT
            assert (await claim(stores, run, worker, digest="")).answer is ClaimAnswer.DONE

    async def test_a_run_says_which_request_it_is(self) -> None:
        run, refused = a_run(), a_run()
        async with self.connect() as stores:
            assert await stores.runs.digest(run) == ""
            await claim(stores, run, a_worker(), digest="first")
            await claim(stores, run, a_worker(), digest="second")
            assert await stores.runs.digest(run) == "first"
            await stores.runs.outcome(run, b"{}", 60.0)
            assert await stores.runs.digest(run) == "first"
            await stores.runs.refuse(refused, "third", b"{}", 60.0)
            assert await stores.runs.digest(refused) == "third"

    async def test_a_run_that_is_known_by_its_cancellation_or_outcome_only_is_the_first_ones_that_comes(self) -> None:
        cancelled, ended, worker = a_run(), a_run(), a_worker()
        async with self.connect() as stores:
            await stores.runs.cancel(cancelled, "not wanted", 60.0)
            await stores.runs.outcome(ended, b"{}", 60.0)
            for run, answer in ((cancelled, ClaimAnswer.CANCELLED), (ended, ClaimAnswer.DONE)):
                for digest in ("", "first"):
                    assert (await claim(stores, run, worker, digest=digest)).answer is answer
                assert (await claim(stores, run, worker, digest="second")).answer is ClaimAnswer.CONFLICT
                assert (await claim(stores, run, worker, digest="first")).answer is answer

    # ------------------------------------------------------------------------------------------------ suspects

    async def test_a_run_whose_holders_died_is_a_suspect_and_taken_only_under_trial(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await killed(stores, run, 1)
            once = await claim(stores, run, worker, trial=False)
            assert ledger(once) == (ClaimAnswer.NEW, 0, 1, False)
            await stores.lapse(worker)
            for _ in range(5):
                assert (await claim(stores, run, a_worker(), trial=False)).answer is ClaimAnswer.SUSPECT
            tried = await claim(stores, run, a_worker(), trial=True)
            assert ledger(tried) == (ClaimAnswer.NEW, 0, 2, True)
            assert places(await whole(stores, run)) == ["begin 1-0", "begin 2-0", "begin 3-0"]

    async def test_from_how_many_rescues_on_is_for_the_asker_to_say(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await killed(stores, run, 2)
            assert (await claim(stores, run, a_worker(), trial=False, suspect_after=2)).answer is ClaimAnswer.SUSPECT
            taken_up = await claim(stores, run, a_worker(), trial=False, suspect_after=3)
            assert ledger(taken_up) == (ClaimAnswer.NEW, 0, 2, False)

    async def test_the_last_rescue_is_always_under_trial(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await killed(stores, run, 1)
            refused = await claim(stores, run, a_worker(), max_rescues=1, suspect_after=2, trial=False)
            assert refused.answer is ClaimAnswer.SUSPECT
            assert ledger(await claim(stores, run, worker, max_rescues=1)) == (ClaimAnswer.NEW, 0, 1, True)
            await stores.lapse(worker)
            assert (await claim(stores, run, a_worker(), max_rescues=1)).answer is ClaimAnswer.EXHAUSTED

    async def test_the_holder_of_a_suspect_is_told_so_again(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await killed(stores, run, 2)
            assert (await claim(stores, run, worker)).trial
            for trial in (True, False):
                again = await claim(stores, run, worker, trial=trial)
                assert ledger(again) == (ClaimAnswer.MINE, 0, 2, True)

    async def test_a_suspect_whose_holder_lives_is_waited_for_as_any_other(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await killed(stores, run, 2)
            await taken(stores, run, a_worker())
            for trial in (True, False):
                assert (await claim(stores, run, a_worker(), trial=trial)).answer is ClaimAnswer.ALIVE

    async def test_a_suspect_that_was_let_go_of_stays_one_and_costs_no_rescue(self) -> None:
        for how, attempts in ((Release.HANDOVER, 0), (Release.FAILED, 1)):
            run = a_run()
            async with self.connect() as stores:
                await killed(stores, run, 2)
                held = await claim(stores, run, a_worker())
                await stores.runs.release(run, "generate", held.epoch, how)
                assert (await claim(stores, run, a_worker(), trial=False)).answer is ClaimAnswer.SUSPECT
                tried = await claim(stores, run, a_worker())
                assert ledger(tried) == (ClaimAnswer.NEW, attempts, 2, True)

    async def test_a_suspect_whose_trials_killed_too_is_exhausted_whoever_asks(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await killed(stores, run, 4)
            for trial in (False, True):
                assert (await claim(stores, run, a_worker(), trial=trial)).answer is ClaimAnswer.EXHAUSTED

    async def test_a_role_that_kills_makes_no_suspect_of_the_run_for_another(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await killed(stores, run, 2, "derender")
            assert (await claim(stores, run, a_worker(), "derender", trial=False)).answer is ClaimAnswer.SUSPECT
            assert ledger(await claim(stores, run, a_worker(), trial=False)) == (ClaimAnswer.NEW, 0, 0, False)

    # ------------------------------------------------------------------------------------------------ refused

    async def test_a_request_is_refused_with_the_outcome_of_the_first_who_writes_one(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            assert await stores.runs.refuse(run, "digest", b"first", 60.0) == b"first"
            assert await stores.runs.refuse(run, "digest", b"second", 60.0) == b"first"
            assert await stores.runs.outcome(run, b"third", 60.0) == b"first"
            done = await claim(stores, run, a_worker())
            assert (done.answer, done.outcome) == (ClaimAnswer.DONE, b"first")

    async def test_of_many_who_refuse_or_end_a_run_at_once_one_is_heard(self) -> None:
        run = a_run()
        async with self.connect() as one, self.connect() as two:
            told = await asyncio.gather(
                *(one.runs.refuse(run, "digest", b"%d" % n, 60.0) for n in range(10)),
                *(two.runs.outcome(run, b"%d" % n, 60.0) for n in range(10, 20)),
            )
            assert set(told) == {await one.runs.result(run)}

    async def test_a_run_of_another_request_is_not_refused_and_goes_on(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            for digest in ("another", ""):
                assert await stores.runs.refuse(run, digest, b"no", 60.0) is None
            assert await stores.runs.result(run) is None
            assert await append(stores, batch(run, Position(1, 0), 1)) is Append.STORED
            await stores.runs.outcome(run, b"answered", 60.0)
            assert await stores.runs.refuse(run, "another", b"no", 60.0) is None
            assert await stores.runs.refuse(run, "digest", b"no", 60.0) == b"answered"

    async def test_a_refused_request_has_its_id_for_itself(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await stores.runs.refuse(run, "digest", b"no", 60.0)
            assert (await claim(stores, run, a_worker(), digest="another")).answer is ClaimAnswer.CONFLICT
            assert await stores.runs.refuse(run, "another", b"no", 60.0) is None

    async def test_a_request_that_cannot_be_told_from_others_is_refused_where_there_is_no_other(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            assert await stores.runs.refuse(run, "", b"no", 60.0) == b"no"
            assert await stores.runs.refuse(run, "digest", b"again", 60.0) == b"no"
            assert (await claim(stores, run, a_worker(), digest="another")).answer is ClaimAnswer.CONFLICT

    async def test_a_held_run_that_is_refused_is_fenced(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await taken(stores, run, worker)
            assert await stores.runs.refuse(run, "digest", b"no", 60.0) == b"no"
            assert await append(stores, batch(run, Position(1, 0), 1)) is Append.FENCED

    async def test_a_refused_run_is_forgotten_replay_ttl_after_that(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            await claim(stores, run, a_worker(), lifetime=600, replay_ttl=600, job=b"{}")
            await stores.runs.refuse(run, "digest", b"no", 0.2)
            await stores.elapse(0.25)
            assert await stores.runs.result(run) is await stores.runs.job(run) is None
            assert await stores.log.exists([run]) == [False]

    # ------------------------------------------------------------------------------------------------ reopened

    async def test_a_reopened_run_can_be_claimed_as_if_nothing_had_gone_wrong(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await killed(stores, run, 2)
            held = await claim(stores, run, worker)
            await stores.runs.release(run, "generate", held.epoch, Release.FAILED)
            await stores.runs.cancel(run, "not wanted", 60.0)
            await stores.runs.outcome(run, b"failed", 60.0)
            await stores.runs.reopen(run, await stores.now() + 60, 60.0, fresh=False)
            assert await stores.runs.result(run) is None
            assert await stores.runs.beat(worker, [run], 30.0) == {}
            again = await claim(stores, run, a_worker(), trial=False)
            assert ledger(again) == (ClaimAnswer.NEW, 0, 0, False)
            assert again.epoch > held.epoch

    async def test_a_run_that_is_not_reopened_afresh_goes_on_from_what_is_there(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, job=b"{}")
            await taken(stores, run, worker, "derender")
            await append(stores, batch(run, Position(1, 0), 1, 2))
            await save(stores, run, 1, b"state")
            await stores.runs.outcome(run, b"failed", 60.0)
            await stores.runs.reopen(run, await stores.now() + 60, 60.0, fresh=False)
            assert (await claim(stores, run, worker, digest="another")).answer is ClaimAnswer.CONFLICT
            again = await claim(stores, run, worker)
            assert (again.answer, again.chunks) == (ClaimAnswer.NEW, 2)
            assert await append(stores, batch(run, Position(again.epoch, 0), 3, ends=True)) is Append.STORED
            told = await claim(stores, run, worker, "derender")
            assert (told.answer, told.job, await stores.runs.load(run)) == (ClaimAnswer.NEW, b"{}", b"state")
            since = places(await whole(stores, run, Position(1, 1)))
            assert since == ["chunk 1-2", f"begin {again.epoch}-0", f"end {again.epoch}-3"]

    async def test_a_run_that_is_reopened_afresh_begins_anew_under_a_later_epoch_than_any_before(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, job=b"{}")
            await taken(stores, run, worker, "derender")
            await append(stores, batch(run, Position(1, 0), 1, 3, ends=True))
            await save(stores, run, 1, b"state")
            await stores.runs.outcome(run, b"failed", 60.0)
            await stores.runs.reopen(run, await stores.now() + 60, 60.0, fresh=True)
            assert await stores.log.exists([run]) == [False]
            assert await stores.runs.job(run) is await stores.runs.load(run) is None
            again = await claim(stores, run, worker, digest="another", job=b"[]")
            assert (again.answer, again.chunks) == (ClaimAnswer.NEW, 0)
            assert again.epoch > 1 < (await claim(stores, run, worker, "derender", digest="")).epoch
            assert places(await whole(stores, run)) == [f"begin {again.epoch}-0"]
            assert await stores.runs.job(run) == b"[]"

    async def test_who_held_a_reopened_run_writes_no_more_of_it(self) -> None:
        worker = a_worker()
        async with self.connect() as stores:
            for fresh in (False, True):
                for claimed_again in (False, True):
                    run = a_run()
                    await taken(stores, run, worker)
                    await taken(stores, run, worker, "derender")
                    await append(stores, batch(run, Position(1, 0), 1))
                    await stores.runs.outcome(run, b"failed", 60.0)
                    await stores.runs.reopen(run, await stores.now() + 60, 60.0, fresh=fresh)
                    if claimed_again:
                        await taken(stores, run, a_worker())
                        await taken(stores, run, a_worker(), "derender")
                    assert await append(stores, batch(run, Position(1, 1), 2)) is Append.FENCED
                    assert await append(stores, batch(run, Position(1, 0), 1)) is Append.FENCED
                    assert await save(stores, run, 1, b"late") == [False]
                    await stores.runs.release(run, "generate", 1, Release.FAILED)
                    last = await claim(stores, run, a_worker())
                    assert (last.answer, last.attempts) == (
                        ClaimAnswer.ALIVE if claimed_again else ClaimAnswer.NEW,
                        0,
                    )

    async def test_a_reopened_run_has_the_deadline_that_it_is_given(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, lifetime=0.2)
            await stores.elapse(0.25)
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.EXPIRED
            await stores.runs.outcome(run, b"expired", 60.0)
            await stores.runs.reopen(run, await stores.now() + 0.4, 60.0, fresh=False)
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.NEW
            await stores.elapse(0.45)
            assert (await claim(stores, run, worker)).answer is ClaimAnswer.EXPIRED

    async def test_a_reopened_run_is_kept_until_replay_ttl_after_its_new_deadline(self) -> None:
        run, worker = a_run(), a_worker()
        async with self.connect() as stores:
            await claim(stores, run, worker, job=b"{}")
            await claim(stores, run, worker, "derender")
            await append(stores, batch(run, Position(1, 0), 1))
            await save(stores, run, 1, b"state")
            await stores.runs.outcome(run, b"failed", 0.2)
            await stores.runs.reopen(run, await stores.now() + 0.3, 0.3, fresh=False)
            await stores.elapse(0.35)
            assert (await stores.runs.job(run), await stores.runs.load(run)) == (b"{}", b"state")
            assert await stores.log.exists([run]) == [True]
            await stores.elapse(0.35)
            assert await stores.runs.job(run) is await stores.runs.load(run) is None
            assert await stores.log.exists([run]) == [False]
            assert (await claim(stores, run, worker)).epoch == 1

    async def test_reopening_an_unknown_run_leaves_nothing_behind(self) -> None:
        run = a_run()
        async with self.connect() as stores:
            for fresh in (False, True):
                await stores.runs.reopen(run, await stores.now() - 60, 60.0, fresh=fresh)
            assert (await claim(stores, run, a_worker())).epoch == 1
