"""When a new run may begin, and what one client may have under way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import Allowance, BrokerUnavailable
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.jobs import ErrorEvent, FinalEvent
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.gate import Facts, closed, reason
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.limits import tokens_of
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, demo_spec, listening, roles, working

TERMS = Terms(memory_limit=0.8, lag_limit=5.0)


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    yield home
    home.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - it is looked at, nobody rings
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("facts", "was_closed", "why"),
    [
        (Facts(0.0, (), 0), False, None),
        (Facts(0.8, (5.0,), 64), False, None),
        (Facts(0.81, (), 0), False, "81% of its memory, the limit is 80%"),
        (Facts(0.78, (), 0), True, "78% of its memory"),
        (Facts(0.75, (), 0), True, None),
        (Facts(0.1, (5.1, 9.0), 0), False, "derendering is 5.1 s behind, the limit is 5 s"),
        (Facts(0.1, (9.0, 0.0), 0), False, None),
        (Facts(0.1, (0.0,), 65), False, "65 runs wait for a derender worker, the limit is 64"),
    ],
)
def test_the_gate_says_why_it_is_closed(facts: Facts, was_closed: bool, why: str | None) -> None:
    said = closed(facts, TERMS, most_untold=64, was_closed=was_closed)
    assert said is None if why is None else why in (said or "")


async def test_what_cannot_be_seen_keeps_the_gate_closed(home: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(model: str) -> dict[str, bytes]:
        raise BrokerUnavailable("Redis is away")

    await home.broker.queues.declare(["derender.demo"])
    assert await reason(home.broker, "demo", "derender.demo", TERMS, most_untold=64, last=None) is None
    monkeypatch.setattr(home.broker.runs, "reports", away)
    said = await reason(home.broker, "demo", "derender.demo", TERMS, most_untold=64, last=None)
    assert said is not None
    assert "Redis is away" in said


async def test_what_a_stranger_reports_is_no_lag(home: Embedded) -> None:
    await home.broker.queues.declare(["derender.demo"])
    for worker, said in (("a", b"no JSON"), ("b", b'{"role":"derender","behind":"far"}'), ("c", b'{"role":"other"}')):
        await home.broker.runs.report("demo", worker, said, 60)
    assert await reason(home.broker, "demo", "derender.demo", TERMS, most_untold=64, last=None) is None


async def test_nothing_begins_while_derendering_is_behind_and_it_does_when_that_is_over(home: Embedded) -> None:
    late = json.dumps({"role": "derender", "behind": 60.0}).encode()
    await home.broker.runs.report("demo", "slow", late, 60)
    worker = GenerateWorker(home.broker, demo_spec(), engine=NullEngine(), terms=Terms(heartbeat=0.06))
    _, *others = roles(home.broker)
    async with listening(home.broker) as client, working([worker]):
        await client.generate("r1")
        async with asyncio.timeout(WAIT_S):
            await until(lambda: worker.vitals.waiting == 1 and "behind" in (worker.vitals.gate or ""))
        assert worker.vitals.free_rows == worker.vitals.rows
        assert await home.broker.runs.job(jobs.run_of(CLIENT, "r1")) is None
        await home.broker.runs.report("demo", "slow", b'{"role":"derender","behind":0.0}', 60)
        async with working(others[1:]):
            assert isinstance(await client.outcome("r1"), FinalEvent)


# ------------------------------------------------------------------------------------------- deadlines, limits


async def test_a_deadline_that_comes_while_a_request_waits_is_told(home: Embedded) -> None:
    hold = asyncio.Event()

    async def held(seconds: float) -> None:
        await hold.wait()

    engine = NullEngine(NullSettings(rows=1, tokens_per_second=10), sleep=held)
    _, _, *others = roles(home.broker)
    worker = GenerateWorker(home.broker, demo_spec(), engine=engine, terms=Terms(heartbeat=0.06))
    async with listening(home.broker) as client, working([worker, *others], grace=0.0):
        for number in range(3):  # as many as the engine takes
            await client.generate(f"busy{number}")
        late = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        job = jobs.GenerateJob(
            client=CLIENT,
            request_id="late",
            model="demo",
            request=jobs.Raw(json.dumps(late).encode()),
            deadline=time.time() + 0.3,
        )
        await client.send("generate.demo", jobs.encode(job))
        event = await client.outcome("late")
    assert isinstance(event, ErrorEvent)
    assert event.code == "expired"


async def test_a_client_has_no_more_under_way_than_it_may(home: Embedded) -> None:
    terms = Terms(heartbeat=0.6, allowance=Allowance(requests=2))
    hold = asyncio.Event()

    async def held(seconds: float) -> None:
        await hold.wait()

    engine = NullEngine(NullSettings(rows=4, tokens_per_second=10), sleep=held)
    render, _, *others = roles(home.broker)
    worker = GenerateWorker(home.broker, demo_spec(), engine=engine, terms=terms)
    async with listening(home.broker) as client, working([render, worker, *others]):
        for name in ("r1", "r2", "r3"):
            await client.generate(name, sampling_params={"max_tokens": 2, "ignore_eos": True})
        await client.until(lambda: any(client.outcomes(name) for name in ("r1", "r2", "r3")))
        (over,) = [name for name in ("r1", "r2", "r3") if client.outcomes(name)]
        event = await client.outcome(over)
        assert isinstance(event, ErrorEvent)
        assert (event.code, event.status, event.retryable, event.retry_after) == ("queue_full", 429, True, 5.0)
        assert "limit is 2" in json.loads(bytes(event.error))["message"]
        hold.set()
        for name in {"r1", "r2", "r3"} - {over}:
            assert isinstance(await client.outcome(name), FinalEvent)
        await client.generate("later")
        assert isinstance(await client.outcome("later"), FinalEvent)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [({"max_tokens": 5}, 8), ({"max_tokens": 5, "n": 3}, 18), ({}, 100), ({"max_tokens": 999}, 100)],
)
def test_what_a_request_may_come_to(params: dict[str, int], tokens: int) -> None:
    request = GenerateRequest.model_validate({"token_ids": [1, 2, 3], "sampling_params": params})
    assert tokens_of(request, max_model_len=100) == tokens
