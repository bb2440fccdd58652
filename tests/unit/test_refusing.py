"""What becomes of a job that cannot be served: whose outcome it is, who hears of it, what an operator finds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.ports import ClaimRequest, Delivery, HeaderValue, Message
from headrace.dead import DeadLetter, NotRedrivable, Wanted, each, letters, purge, redrive
from headrace.protocol import jobs
from headrace.protocol.errors import BadRequest
from headrace.protocol.jobs import CONTROL_QUEUE, DEAD_QUEUE, ErrorEvent, FinalEvent
from headrace.workers import runtime
from headrace.workers.control import ControlWorker
from headrace.workers.runtime import MAX_FAILURES, NEWER_TRIES, guarded, take
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, listening, render_job, roles, working

BODY = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 8}
JOB = render_job("r1", BODY)
RUN = jobs.run_of(CLIENT, "r1")


@pytest.fixture
async def home(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Embedded]:
    monkeypatch.setattr(runtime, "backoff", lambda tries, **_: 0.0)
    home = Embedded()
    await home.broker.queues.declare(["render.demo"])
    yield home
    home.close()


async def fail(home: Embedded, error: Exception, body: bytes = jobs.encode(JOB), times: int = 1) -> None:
    """Has a worker fail with a job so many times."""

    async def handle(_: Delivery) -> None:
        raise error

    await home.broker.queues.publish("render.demo", Message(body, "r1", {"traceparent": "00-ab"}))
    async with home.broker.queues.consume("render.demo", 1) as deliveries, asyncio.timeout(WAIT_S):
        for _ in range(times):
            await guarded(home.broker, await anext(deliveries), handle)


async def dead_letters(home: Embedded) -> list[DeadLetter]:
    return [letter async for letter in letters(home.broker)]


async def claim(home: Embedded, digest: str) -> None:
    now = time.time()
    await home.broker.runs.claim(ClaimRequest(RUN, "generate", "w", digest, now + 60, 60, 60, job=b"{}"))


# ------------------------------------------------------------------------------------------- whose outcome it is


async def test_a_body_that_cannot_be_served_does_not_end_another_request_under_its_id(home: Embedded) -> None:
    await claim(home, "another request's")
    async with listening(home.broker) as client:
        await fail(home, BadRequest("messages: no"))
        event = await client.outcome("r1")
    assert isinstance(event, ErrorEvent)
    assert event.event_id != RUN
    assert await home.broker.runs.result(RUN) is None


async def test_the_same_request_under_way_is_ended_by_what_is_wrong_with_it(home: Embedded) -> None:
    await claim(home, jobs.digest_of(JOB))
    async with listening(home.broker) as client:
        await fail(home, BadRequest("messages: no"))
        assert (await client.outcome("r1")).event_id == RUN
    assert await home.broker.runs.result(RUN) is not None


async def test_a_broken_body_sent_twice_has_one_outcome_and_another_one_is_a_request_of_its_own(
    home: Embedded,
) -> None:
    broken = json.dumps({"type": "render", "client": CLIENT, "request_id": "r1", "model": "demo"}).encode()
    async with listening(home.broker) as client:
        for body in (broken, broken, broken.replace(b"demo", b"omed")):
            await fail(home, jobs.EnvelopeError("endpoint: required"), body)
        await client.until(lambda: len(client.outcomes("r1")) == 3)
        first, second, third = (event.event_id for event in client.outcomes("r1"))
    assert (first == second, first == third) == (True, False)


# ------------------------------------------------------------------------------------------- newer versions


async def test_a_newer_job_is_left_to_newer_workers_and_given_up_when_none_comes(home: Embedded) -> None:
    newer = json.dumps(json.loads(jobs.encode(JOB)) | {"v": jobs.VERSION + 1}).encode()
    with pytest.raises(jobs.EnvelopeError) as refused:
        jobs.decode(newer)
    async with listening(home.broker) as client:
        await fail(home, refused.value, newer, NEWER_TRIES)
        assert client.heard == {}
        async with home.broker.queues.consume("render.demo", 1) as deliveries, asyncio.timeout(WAIT_S):
            await home.broker.queues.release(await anext(deliveries))  # it is still there for those
        await fail(home, refused.value, newer, NEWER_TRIES + 1)
        event = await client.outcome("r1")
    assert isinstance(event, ErrorEvent)
    assert "newer" in json.loads(bytes(event.error))["message"]
    assert len(await dead_letters(home)) == 1


# ------------------------------------------------------------------------------------------- who may send


@pytest.mark.parametrize(
    ("user", "taken"), [(CLIENT, True), ("gateway", True), ("another", False), (None, False), ("", False)]
)
async def test_only_the_client_itself_and_trusted_users_are_taken_at_their_word(
    home: Embedded, user: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    seen, stop = list[str](), asyncio.Event()
    terms = Terms(verify_clients=True, trusted=frozenset({"gateway"}))
    consume, bury = home.broker.queues.consume, home.broker.queues.bury

    async def handle(delivery: Delivery) -> None:
        seen.append(delivery.request_id)
        await home.broker.queues.ack(delivery)
        stop.set()

    async def buried(delivery: Delivery, reason: str, headers: Mapping[str, HeaderValue] | None = None) -> None:
        await bury(delivery, reason, headers)
        stop.set()

    class Vouched:
        def __init__(self, deliveries: AsyncIterator[Delivery]) -> None:
            self.deliveries = deliveries

        def __aiter__(self) -> Vouched:
            return self

        async def __anext__(self) -> Delivery:
            return replace(await anext(self.deliveries), user=user)

    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def vouching(queue: str, prefetch: int) -> AsyncIterator[Vouched]:
        async with consume(queue, prefetch) as deliveries:
            yield Vouched(deliveries)

    monkeypatch.setattr(home.broker.queues, "consume", vouching)
    monkeypatch.setattr(home.broker.queues, "bury", buried)
    await home.broker.queues.publish("render.demo", Message(jobs.encode(JOB), "r1"))
    async with listening(home.broker) as client, asyncio.timeout(WAIT_S):
        await take(home.broker, "render.demo", 4, handle, stop, terms=terms)
        assert client.heard == {}
    assert seen == (["r1"] if taken else [])
    assert await home.broker.queues.depth(DEAD_QUEUE) == (not taken)
    assert await home.broker.runs.result(RUN) is None


# ------------------------------------------------------------------------------------------- the broker gave up


async def test_what_expires_in_its_queue_is_told_and_not_filed_under_dead(home: Embedded) -> None:
    message = Message(jobs.encode(JOB), "r1", expires=time.time() + 0.05)
    async with listening(home.broker) as client, working([ControlWorker(home.broker)]):
        await home.broker.queues.publish("render.demo", message)
        event = await client.outcome("r1")
    assert isinstance(event, ErrorEvent)
    assert (event.code, event.event_id) == ("expired", RUN)
    assert await home.broker.queues.depth(DEAD_QUEUE) == 0


async def test_a_cancellation_that_comes_again_tells_again_and_changes_nothing(home: Embedded) -> None:
    cancel = jobs.encode(jobs.Cancel(client=CLIENT, request_id="r1"))
    async with listening(home.broker) as client, working([ControlWorker(home.broker)]):
        for count in (1, 2):
            await home.broker.queues.publish(CONTROL_QUEUE, Message(cancel, "r1"))
            await client.until(lambda count=count: len(client.outcomes("r1")) == count)
        first, second = client.outcomes("r1")
    assert first == second
    assert isinstance(first, ErrorEvent)
    assert first.code == "cancelled"


# ------------------------------------------------------------------------------------------- dead letters


async def test_a_dead_letter_tells_its_history_and_not_what_was_asked(home: Embedded) -> None:
    async with listening(home.broker) as client:
        await fail(home, KeyError("a secret"), times=MAX_FAILURES)
        await client.outcome("r1")
    (letter,) = await dead_letters(home)
    told = letter.told()
    assert told["request_id"] == "r1"
    assert (told["client"], told["model"], told["queue"]) == (CLIENT, "demo", "render.demo")
    assert (told["failures"], told["first_error"], told["last_error"]) == (MAX_FAILURES, "KeyError", "KeyError")
    assert told["traceparent"] == "00-ab"
    assert "secret" not in json.dumps(told)
    assert await home.broker.queues.depth(DEAD_QUEUE) == 1


async def test_a_dead_request_that_is_sent_again_is_answered_under_an_outcome_of_its_own(home: Embedded) -> None:
    async with listening(home.broker) as client:
        await fail(home, KeyError("x"), times=MAX_FAILURES)
        first = await client.outcome("r1")
        (letter,) = await dead_letters(home)
        async with working(roles(home.broker)):
            assert await each(home.broker, Wanted(), lambda found: redrive(home.broker, found)) == 1
            await client.until(lambda: len(client.outcomes("r1")) == 2)
        second = client.outcomes("r1")[1]
    assert isinstance(first, ErrorEvent)
    assert isinstance(second, FinalEvent)
    assert (first.event_id, second.event_id) == (RUN, f"{RUN}.1")
    assert await home.broker.queues.depth(DEAD_QUEUE) == 0
    assert letter.job is not None
    stands = await home.broker.runs.result(RUN)
    assert stands is not None
    assert jobs.decode_terminal(stands).event_id == second.event_id


async def test_what_cannot_be_read_cannot_be_sent_again_and_stays(home: Embedded) -> None:
    await fail(home, jobs.EnvelopeError("no"), b"garbage")
    (letter,) = await dead_letters(home)
    with pytest.raises(NotRedrivable):
        await redrive(home.broker, letter)
    assert await home.broker.queues.depth(DEAD_QUEUE) == 1
    assert await each(home.broker, Wanted(), lambda found: purge(home.broker, found)) == 1
    assert await home.broker.queues.depth(DEAD_QUEUE) == 0


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(), 3),
        (Wanted(request_ids=frozenset({"r1"})), 1),
        (Wanted(client="tester"), 3),
        (Wanted(client="other"), 0),
        (Wanted(model="demo"), 3),
        (Wanted(model="omed"), 0),
        (Wanted(reason="FAILED 5 times"), 3),
        (Wanted(reason="was eaten"), 0),
        (Wanted(before=1.0), 0),
        (Wanted(after=1.0), 3),
        (Wanted(request_ids=frozenset({"r1", "r2"}), client="tester", model="demo"), 2),
    ],
)
async def test_dead_letters_are_found_by_what_they_say(home: Embedded, wanted: Wanted, found: int) -> None:
    for name in ("r1", "r2", "r3"):
        await fail(home, KeyError("x"), jobs.encode(render_job(name, BODY)), times=MAX_FAILURES)
    seen = []

    async def see(letter: DeadLetter) -> None:
        seen.append(letter.request_id)

    assert await each(home.broker, wanted, see) == found
    assert await each(home.broker, wanted, see, limit=1) == min(found, 1)
    assert await home.broker.queues.depth(DEAD_QUEUE) == 3
