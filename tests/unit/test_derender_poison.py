"""A run that breaks its teller, or takes it down, ends under ``dead``; those beside it are told as ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.broker.embedded import Embedded
from headrace.protocol import jobs
from headrace.protocol.jobs import ErrorEvent, FinalEvent, GenerateJob
from headrace.protocol.wire import TokenChunk
from headrace.workers import runtime
from headrace.workers.derender import worker as worker_module
from headrace.workers.derender.telling import InTokens, Telling, telling_of
from headrace.workers.derender.worker import DerenderWorker
from tests.line import WAIT_S, demo_spec, listening, working
from tests.unit.told_runs import IDS, QUEUE, QUICK, SLOW, Run, one_outcome, told_as_one


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    yield home
    assert await home.broker.queues.depth(QUEUE) == 0
    home.close()


class Poisoned(InTokens):
    """Breaks at the tenth chunk."""

    def chunk(self, chunk: TokenChunk, payload: bytes) -> bytes | None:
        if self.tokens == 9:
            raise ZeroDivisionError("the core broke")
        return super().chunk(chunk, payload)


@pytest.mark.parametrize("breaks", ["as it is opened", "as it is told"])
async def test_a_run_that_breaks_its_teller_is_given_up_and_its_neighbours_are_told(
    breaks: str, home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "backoff", lambda tries: 0.0)

    def broken(derenderer: Any, job: GenerateJob, checkpoint: bytes | None = None) -> Telling:
        if job.request_id != "bad":
            return telling_of(derenderer, job, checkpoint)
        if breaks == "as it is opened":
            raise ZeroDivisionError("the core broke")
        return Poisoned(job)

    monkeypatch.setattr(worker_module, "telling_of", broken)
    runs = [Run(home, name, delivery="tokens") for name in ("before", "bad", "after")]
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        for run in runs:
            await run.begin()
            await run.write(IDS[:15])
            await run.submit()
        _, bad, _ = runs
        outcome = await one_outcome(client, bad)
        for run in runs:
            if run is not bad:
                await run.write(IDS[15:], ends=True)
                assert isinstance(await one_outcome(client, run), FinalEvent)
                assert [event.seq for event in client.chunks(run.job.request_id)] == list(range(len(IDS)))
        async with asyncio.timeout(WAIT_S), home.broker.queues.consume(jobs.DEAD_QUEUE, 10) as dead:
            buried = await anext(dead)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "exhausted"
    assert buried.request_id == "bad"
    assert bad.record.holds["derender"].attempts == SLOW.max_attempts
    assert bad.record.holds["derender"].owner == ""
    assert len(told_as_one(client, "bad")) == (9 if breaks == "as it is told" else 0)
    assert await home.broker.queues.depth(jobs.DEAD_QUEUE) == 0


async def test_a_job_of_a_newer_version_in_the_store_costs_no_attempt_and_leaves_the_run_free(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parked = Run(home, "r1"), asyncio.Event()
    await run.begin()
    await run.write(IDS, ends=True)
    assert run.record.job is not None
    known, run.record.job = run.record.job, run.record.job.replace(b'"type":"generate"', b'"type":"generate","v":99')
    retry = home.broker.queues.retry

    async def at_once(delivery: Any, delay: float, headers: Any = None) -> None:
        parked.set()
        run.record.job = known  # a worker that can read it would
        await retry(delivery, 0.0, headers)

    monkeypatch.setattr(home.broker.queues, "retry", at_once)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        assert isinstance(await one_outcome(client, run), FinalEvent)
    assert parked.is_set()
    assert (run.record.holds["derender"].attempts, run.record.holds["derender"].rescues) == (0, 0)


async def suspected(home: Embedded, *names: str) -> list[Run]:
    """Runs that were held by two workers which died."""
    runs = [Run(home, name) for name in names]
    for run in runs:
        await run.begin()
        await run.write(IDS[:5])
        for teller in ("one", "two"):
            await run.claimed(teller)
            home.shelf.lapse(teller)
    return runs


async def test_of_runs_that_may_have_killed_their_tellers_one_is_tried_at_a_time(home: Embedded) -> None:
    suspects, innocent = await suspected(home, "s1", "s2"), Run(home, "good")
    await innocent.begin()
    await innocent.write(IDS[:5])
    async with (
        listening(home.broker) as client,
        home.connect() as broker,
        working([worker := DerenderWorker(broker, demo_spec(), terms=QUICK)]),
    ):
        for run in (*suspects, innocent):
            await run.submit()
        await client.until(lambda: len(client.chunks("s1")) + len(client.chunks("s2")) == 5)
        await client.until(lambda: len(client.chunks("good")) == 5)
        tried, waits = suspects if client.chunks("s1") else reversed(suspects)
        assert worker._trying == tried.name
        assert waits.record.holds["derender"].owner == "two"
        await tried.write(IDS[5:], ends=True)
        assert isinstance(await one_outcome(client, tried), FinalEvent)
        await client.until(lambda: len(client.chunks(waits.job.request_id)) == 5)
        assert worker._trying == waits.name
        for run in (waits, innocent):
            await run.write(IDS[5:], ends=True)
            assert isinstance(await one_outcome(client, run), FinalEvent)
        assert worker._trying is None
    assert [run.record.holds["derender"].rescues for run in (*suspects, innocent)] == [2, 2, 0]


async def test_a_suspect_that_is_let_go_of_makes_room_for_the_next(home: Embedded) -> None:
    suspects = await suspected(home, "s1", "s2")
    async with (
        listening(home.broker) as client,
        home.connect() as broker,
        working([worker := DerenderWorker(broker, demo_spec(), terms=QUICK)]),
    ):
        for run in suspects:
            await run.submit()
        await client.until(lambda: len(client.chunks("s1")) + len(client.chunks("s2")) == 5)
        tried, waits = suspects if client.chunks("s1") else reversed(suspects)
        await home.broker.runs.cancel(tried.name, "enough", 60)
        assert isinstance(await one_outcome(client, tried), ErrorEvent)
        await client.until(lambda: len(client.chunks(waits.job.request_id)) == 5)
        assert worker._trying == waits.name
        await waits.write(IDS[5:], ends=True)
        assert isinstance(await one_outcome(client, waits), FinalEvent)
