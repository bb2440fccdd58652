"""Who asks for a run to be told again is answered: with its chunks, with its outcome, or with why they do not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker.embedded import Embedded
from headrace.broker.entries import Entry
from headrace.broker.ports import Message
from headrace.protocol import jobs
from headrace.protocol.errors import BadRequest, Cancelled
from headrace.protocol.jobs import (
    ChunkEvent,
    Delivery,
    ErrorEvent,
    Event,
    FinalEvent,
    ProgressEvent,
    Replay,
)
from headrace.workers import follow
from headrace.workers.control import ControlWorker
from headrace.workers.derender import worker as worker_module
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.outcome import failed
from tests.line import CLIENT, WAIT_S, Listener, demo_spec, listening, working
from tests.unit.told_runs import FOREVER, IDS, QUEUE, REPLAYS, SLOW, Run, seqs, told_as_one, undisturbed

DELIVERIES = pytest.mark.parametrize("delivery", ["stream", "tokens", "final"])
OF_CHUNKS = pytest.mark.parametrize("delivery", ["stream", "tokens"])


@pytest.fixture
async def home() -> AsyncIterator[Embedded]:
    home = Embedded()
    await home.broker.queues.declare([QUEUE, REPLAYS])
    yield home
    assert await home.broker.queues.depth(REPLAYS) == 0
    home.close()


@pytest.fixture
async def worker(
    home: Embedded, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[DerenderWorker]:
    # One replay after the other, unless a test wants more: so that the answer of the next says that one is done.
    monkeypatch.setattr(worker_module, "REPLAYS", getattr(request, "param", 1))
    worker = DerenderWorker(home.broker, demo_spec(), terms=SLOW)
    async with working([worker], grace=0.0):
        yield worker


async def told(home: Embedded, delivery: Delivery) -> Run:
    """A run that has its outcome."""
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS, ends=True)
    async with listening(home.broker) as client:
        await run.submit()
        await client.outcome("r1")
    return run


async def answer(run: Run, seq: int = 0) -> list[Event]:
    """Everything that is told for a replay: the next one's answer is the sign that it is all."""
    broker = run.home.broker
    async with broker.topics.subscribe(f"{CLIENT}.*.again") as messages:
        client = Listener(broker)
        task = asyncio.create_task(client.listen(messages))
        await run.replay(seq, topic="again")
        await Run(run.home, "no such run").replay(topic="again")
        await client.until(lambda: bool(client.outcomes("no such run")))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return client.heard.get(run.job.request_id, [])


def chunks_of(events: list[Event]) -> dict[int, bytes]:
    return {event.seq: bytes(event.chunk) for event in events if isinstance(event, ChunkEvent)}


def rest_of(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, ChunkEvent)]


# --------------------------------------------------------------------------------------- what is there


@OF_CHUNKS
@pytest.mark.parametrize("seq", [0, 7, len(IDS) - 1])
async def test_a_run_that_is_done_is_told_again_from_there_on_with_its_outcome(
    seq: int, delivery: Delivery, home: Embedded, worker: DerenderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "PAGE", 6)
    run = await told(home, delivery)
    events = await answer(run, seq)
    chunks, _ = await undisturbed(delivery)
    assert chunks_of(events) == dict(list(enumerate(chunks))[seq:])
    assert [jobs.encode(event) for event in rest_of(events)] == [run.record.outcome]


@OF_CHUNKS
async def test_beyond_the_end_there_is_the_outcome(delivery: Delivery, home: Embedded, worker: DerenderWorker) -> None:
    run = await told(home, delivery)
    for seq in (len(IDS), FOREVER):
        assert [jobs.encode(event) for event in await answer(run, seq)] == [run.record.outcome]


async def test_of_a_final_there_is_the_outcome_whatever_is_asked_for(home: Embedded, worker: DerenderWorker) -> None:
    run = await told(home, "final")
    run.record.log = None
    for seq in (0, 7, FOREVER):
        assert [jobs.encode(event) for event in await answer(run, seq)] == [run.record.outcome]


@OF_CHUNKS
async def test_of_a_run_that_is_under_way_there_is_what_its_log_has(
    delivery: Delivery, home: Embedded, worker: DerenderWorker
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:10])
    events = await answer(run, 4)
    assert (sorted(chunks_of(events)), rest_of(events)) == (list(range(4, 10)), [])


@pytest.mark.parametrize(("delivery", "seq"), [("stream", 10), ("tokens", FOREVER), ("final", 0)])
async def test_of_a_run_that_is_under_way_and_has_nothing_more_to_tell_there_is_a_sign_of_life(
    delivery: Delivery, seq: int, home: Embedded, worker: DerenderWorker
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    await run.write(IDS[:10])
    (event,) = await answer(run, seq)
    assert isinstance(event, ProgressEvent)
    assert event.tokens == 10


@OF_CHUNKS
async def test_between_a_replay_and_the_live_stream_nothing_is_left_out(
    delivery: Delivery, home: Embedded, worker: DerenderWorker
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    async with listening(home.broker) as early:
        await run.submit()
        await run.write(IDS[:6])
        await early.until(lambda: len(seqs(early)) == 6)
    async with listening(home.broker) as late:  # it has missed the first ones
        await run.replay()
        for k in range(6, len(IDS)):
            await run.write([IDS[k]], ends=k == len(IDS) - 1)
            if k % 4 == 0:
                await run.replay(k - 3)
        await late.outcome("r1")
        await late.until(lambda: set(seqs(late)) == set(range(len(IDS))))
    assert told_as_one(late) == (await undisturbed(delivery))[0]


async def test_a_replay_is_told_by_the_way_and_under_the_topic_that_it_names(
    home: Embedded, worker: DerenderWorker
) -> None:
    run = await told(home, "stream")
    async with home.broker.streams.subscribe(f"{CLIENT}.*.mine") as messages:
        await run.replay(topic="mine", via="redis")
        async with asyncio.timeout(WAIT_S):
            first = await anext(messages)
    assert first.key == f"{CLIENT}.chunk.mine"


# --------------------------------------------------------------------------------------- what is not there


async def test_of_a_run_that_never_was_it_is_said_that_there_is_none(home: Embedded, worker: DerenderWorker) -> None:
    (event,) = await answer(Run(home, "never"))
    assert isinstance(event, ErrorEvent)
    assert (event.code, event.event_id != event.run) == ("not_found", True)
    assert home.shelf.find(event.run) is None


async def test_another_clients_run_is_not_found(home: Embedded, worker: DerenderWorker) -> None:
    run = await told(home, "stream")
    theirs = Replay(client="stranger", request_id=run.job.request_id, model="demo")
    async with home.broker.topics.subscribe("stranger.#") as messages, asyncio.timeout(WAIT_S):
        await home.broker.queues.publish(REPLAYS, Message(jobs.encode(theirs)))
        (event,) = jobs.decode_events((await anext(messages)).body)
    assert isinstance(event, ErrorEvent)
    assert (event.client, event.code) == ("stranger", "not_found")


def lose_the_log(run: Run) -> None:
    run.record.log = None


def lose_the_last(run: Run) -> None:
    assert run.record.log is not None
    del run.record.log[-4:]


def lose_the_first(run: Run) -> None:
    assert run.record.log is not None
    del run.record.log[:4]


def change_a_token(run: Run) -> None:
    log = run.record.log
    assert log is not None
    log[4] = Entry(log[4].position, log[4].kind, log[4].payload.replace(b"77", b"78"), log[4].before)


def lose_the_job(run: Run) -> None:
    run.record.job = None


@OF_CHUNKS
@pytest.mark.parametrize("lose", [lose_the_log, lose_the_last, lose_the_first, change_a_token, lose_the_job])
async def test_chunks_that_are_not_there_any_more_are_said_to_be_lost_and_the_outcome_is_told(
    lose: Callable[[Run], None], delivery: Delivery, home: Embedded, worker: DerenderWorker
) -> None:
    run = await told(home, delivery)
    lose(run)
    events = await answer(run)
    outcome, lost = rest_of(events)
    assert jobs.encode(outcome) == run.record.outcome
    assert isinstance(lost, ErrorEvent)
    assert (lost.code, lost.event_id != run.job.event_id) == ("stream_lost", True)
    chunks, _ = await undisturbed(delivery)
    heard = chunks_of(events)
    assert heard == {seq: chunks[seq] for seq in heard}
    assert set(heard) == set(range(len(heard)))


@OF_CHUNKS
async def test_a_log_that_is_gone_while_its_run_is_under_way_is_said_to_be_lost(
    delivery: Delivery, home: Embedded, worker: DerenderWorker
) -> None:
    run = Run(home, "r1", delivery=delivery)
    await run.begin()
    run.record.log = None
    (event,) = await answer(run)
    assert isinstance(event, ErrorEvent)
    assert (event.code, event.event_id != run.job.event_id) == ("stream_lost", True)
    assert run.record.outcome is None


async def test_a_chunk_that_the_client_has_is_not_missed(home: Embedded, worker: DerenderWorker) -> None:
    run = await told(home, "stream")
    lose_the_log(run)
    assert [jobs.encode(event) for event in await answer(run, len(IDS))] == [run.record.outcome]


async def test_a_request_that_nobody_could_tell_is_told_its_outcome_and_no_more(
    home: Embedded, worker: DerenderWorker
) -> None:
    run = Run(home, "r1")
    await run.begin()
    await run.write(IDS[:5])
    run.record.job = (run.record.job or b"").replace(b'"messages"', b'"massages"')
    outcome = jobs.encode(failed(run.job, BadRequest("messages is required.", param="messages")))
    (early,) = await answer(run)
    await home.broker.runs.outcome(run.name, outcome, 60)
    (late,) = await answer(run)
    assert isinstance(early, ErrorEvent)
    assert (early.code, early.event_id != run.job.event_id) == ("bad_request", True)
    assert jobs.encode(late) == outcome


async def test_the_outcome_of_a_request_that_was_never_generated_is_told(
    home: Embedded, worker: DerenderWorker
) -> None:
    run = Run(home, "r1")
    await home.broker.runs.outcome(run.name, jobs.encode(failed(run.job, Cancelled("enough"))), 60)
    assert [jobs.encode(event) for event in await answer(run)] == [run.record.outcome]


# --------------------------------------------------------------------------------------- many of them


@pytest.mark.parametrize("worker", [worker_module.REPLAYS], indirect=True)
async def test_a_flood_of_replays_keeps_no_run_from_being_told(
    home: Embedded, worker: DerenderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now, most = await told(home, "stream"), 0, 0
    tell_again = worker_module.tell_again

    async def watched(*args: object) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await tell_again(*args)  # type: ignore[arg-type]
        now -= 1

    monkeypatch.setattr(worker_module, "tell_again", watched)
    for _ in range(500):
        await run.replay(topic="flood")
    quick = Run(home, "quick")
    await quick.begin()
    await quick.write(IDS, ends=True)
    async with listening(home.broker) as client:
        await quick.submit()
        assert isinstance(await client.outcome("quick"), FinalEvent)
        assert await home.broker.queues.depth(REPLAYS) > 0
        await client.until(lambda: len(client.outcomes("r1")) >= 300)
    assert most == worker_module.REPLAYS


async def test_a_replay_that_came_to_the_queue_of_runs_is_told_too(home: Embedded, worker: DerenderWorker) -> None:
    run = await told(home, "tokens")
    again = Replay(client=CLIENT, request_id="r1", model="demo", seq=3)
    async with listening(home.broker) as client:
        await home.broker.queues.publish(QUEUE, Message(jobs.encode(again)))
        await client.outcome("r1")
    assert seqs(client) == list(range(3, len(IDS)))
    assert run.record.outcome is not None


async def test_the_control_worker_passes_replays_to_the_queue_that_they_have(home: Embedded) -> None:
    again = Replay(client=CLIENT, request_id="r1", model="demo", seq=3)
    async with working([ControlWorker(home.broker)]), home.broker.queues.consume(REPLAYS, 1) as replays:
        await home.broker.queues.publish(jobs.CONTROL_QUEUE, Message(jobs.encode(again), "r1"))
        async with asyncio.timeout(WAIT_S):
            passed_on = await anext(replays)
        await home.broker.queues.ack(passed_on)
    assert jobs.decode(passed_on.body) == again
    assert await home.broker.queues.depth(QUEUE) == 0


async def test_a_replay_that_breaks_the_core_is_answered_and_filed_under_dead(
    home: Embedded, worker: DerenderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.workers import runtime
    from headrace.workers.derender import replay

    def broken(*_: object) -> None:
        raise ZeroDivisionError("the core broke")

    run = await told(home, "stream")
    monkeypatch.setattr(runtime, "backoff", lambda tries: 0.0)
    monkeypatch.setattr(replay, "telling_of", broken)
    async with listening(home.broker) as client:
        await run.replay()
        event = await client.outcome("r1")
    async with asyncio.timeout(WAIT_S), home.broker.queues.consume(jobs.DEAD_QUEUE, 1) as dead:
        await home.broker.queues.ack(await anext(dead))
    assert isinstance(event, ErrorEvent)
    assert (event.code, event.event_id != run.job.event_id) == ("exhausted", True)
    assert jobs.decode_terminal(run.record.outcome or b"") != event
