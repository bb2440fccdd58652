"""What the stores have lost is said: a stream ends with ``stream_lost``, a final is waited for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.broker.embedded import Embedded
from headrace.protocol.jobs import Delivery, ErrorEvent, FinalEvent
from headrace.workers.derender import endings
from headrace.workers.derender.worker import DerenderWorker
from tests.line import demo_spec, listening, working
from tests.unit.told_runs import IDS, QUEUE, QUICK, SLOW, Run, one_outcome, until

DELIVERIES = pytest.mark.parametrize("delivery", ["stream", "tokens", "final"])


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    yield home
    assert await home.broker.queues.depth(QUEUE) == 0
    home.close()


def lose_all(run: Run) -> None:
    run.home.shelf.forget(run.name)


def lose_the_log(run: Run) -> None:
    run.record.log = None


def lose_the_last(run: Run) -> None:
    assert run.record.log is not None
    del run.record.log[-3:]
    run.record.chunks -= 3


def change_a_token(run: Run) -> None:
    log = run.record.log
    assert log is not None
    log[4] = type(log[4])(log[4].position, log[4].kind, log[4].payload.replace(b"77", b"78"), log[4].before)


async def regenerate(run: Run, home: Embedded) -> None:
    """The job that its generate worker still holds is done again, from the start."""
    again = Run(home, run.job.request_id, delivery=run.job.delivery)
    await again.begin()
    await again.write(IDS, ends=True)


@DELIVERIES
@pytest.mark.parametrize("lose", [lose_all, lose_the_log])
async def test_a_run_whose_log_is_gone_while_it_is_told_is_a_lost_stream(
    lose: Any, delivery: Delivery, home: Embedded
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:10])
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=QUICK)]):
        await run.submit()
        await client.until(lambda: len(client.heard.get("r1", [])) >= (1 if delivery == "final" else 10))
        lose(run)
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.retryable) == ("stream_lost", True)


@pytest.mark.parametrize("lose", [lose_the_last, change_a_token])
@DELIVERIES
async def test_a_log_that_is_not_what_its_writer_wrote_is_a_lost_stream(
    lose: Any, delivery: Delivery, home: Embedded
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:10])
    lose(run)
    await run.begin()
    run.record.chunks = 10  # what another writer takes to be there
    await run.write(IDS[10:], ends=True)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=QUICK)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "stream_lost"
    assert len(client.chunks("r1")) == outcome.chunks * (delivery != "final")


async def test_a_final_whose_log_was_lost_is_told_when_it_was_generated_again(home: Embedded) -> None:
    run = Run(home, "r1", delivery="final")
    await run.begin()
    await run.write(IDS[:10])
    async with (
        listening(home.broker) as client,
        working([worker := DerenderWorker(home.broker, demo_spec(), terms=QUICK)]),
    ):
        await run.submit()
        await client.until(lambda: bool(client.heard))
        lose_all(run)

        async def noticed() -> bool:
            return worker._told.get(run.name) is None

        await until(noticed)
        await regenerate(run, home)
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, FinalEvent)


@pytest.mark.parametrize("delivery", ["stream", "tokens"])
async def test_a_job_of_a_run_that_was_lost_before_it_was_told_is_a_lost_stream(
    delivery: Delivery, home: Embedded
) -> None:
    run = Run(home, "r1", delivery=delivery)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert (outcome.code, outcome.chunks) == ("stream_lost", 0)


async def test_a_final_that_was_lost_before_it_was_told_is_waited_for_so_long_and_no_longer(
    home: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waits = Run(home, "r1", delivery="final"), list[float]()
    retry = home.broker.queues.retry

    async def at_once(delivery: Any, delay: float, headers: Any = None) -> None:
        assert run.record.holds["derender"].owner == "", "it is free for whoever gets the job"
        waits.append(delay)
        await retry(delivery, 0.0, headers)

    monkeypatch.setattr(home.broker.queues, "retry", at_once)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec(), terms=SLOW)]):
        await run.submit()
        outcome = await one_outcome(client, run)
    assert isinstance(outcome, ErrorEvent)
    assert outcome.code == "stream_lost"
    assert waits == [SLOW.heartbeat] * endings.LOST_WAITS
