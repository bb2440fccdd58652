"""Runs whose logs a test writes, and derender workers that die: what the tests of derendering share."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from headrace.broker.embedded import Embedded
from headrace.broker.embedded.shelf import Run as Record
from headrace.broker.entries import Position, advance
from headrace.broker.ports import Append, Broker, ClaimAnswer, ClaimRequest, Message
from headrace.protocol import jobs
from headrace.protocol.jobs import Delivery, DerenderJob, ErrorEvent, FinalEvent, GenerateJob, Replay
from headrace.protocol.wire import TokenChoice, TokenChunk, Usage
from headrace.workers.derender.worker import DerenderWorker
from headrace.workers.follow import Follower
from headrace.workers.generate.writer import Writing
from headrace.workers.outcome import End
from headrace.workers.runtime import serve
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, Listener, demo_spec, listening, raw, working

QUEUE: Final = "derender.demo"
REPLAYS: Final = jobs.replays_of("demo")
IDS: Final = (31, 5, 2, 77, 1500, 12, 300, 301, 302, 9, 9, 410, 33, 35, 36, 37, 38, 39, 40, 41)
SUBMITTED_AT: Final = time.time()
SLOW: Final = Terms(heartbeat=60)
QUICK: Final = Terms(heartbeat=0.06)
FOREVER: Final = 10**6


class Run:
    """A run whose log a test writes, as its generate worker would."""

    def __init__(self, home: Embedded, request_id: str, *, delivery: Delivery = "stream", **rest: Any) -> None:
        who: dict[str, Any] = {"client": CLIENT, "request_id": request_id, "model": "demo", "delivery": delivery}
        request = raw({"token_ids": [5, 6, 7], "sampling_params": {}})
        asked = raw({"messages": [{"role": "user", "content": "Hi"}]})
        job = GenerateJob(**who, request=request, endpoint="/v1/chat/completions", source=asked, **rest)
        self.job = jobs.stamp(job, SUBMITTED_AT)
        self.home = home
        self._position = Position()
        self._tokens: list[int] = []

    @property
    def name(self) -> str:
        return self.job.run

    @property
    def record(self) -> Record:
        """What the store holds of it."""
        record = self.home.shelf.find(self.name)
        assert record is not None
        return record

    async def begin(self) -> None:
        """Claims the run under a new epoch; whoever had it before is dead."""
        self.home.shelf.lapse(f"generator-{self._position.epoch - 1}")
        claim = await self.claimed(f"generator-{self._position.epoch}", jobs.digest_of(self.job))
        assert claim is ClaimAnswer.NEW
        self._position = Position(self.record.holds["generate"].epoch, 0)

    async def claimed(self, worker: str, digest: str = "") -> ClaimAnswer:
        """What a worker is answered that asks for the run: to generate it if it brings a digest, else to tell it."""
        claim = await self.home.broker.runs.claim(
            ClaimRequest(
                self.name,
                "generate" if digest else "derender",
                worker,
                digest,
                deadline=self.job.deadline or 0.0,
                replay_ttl=60,
                heartbeat=60,
                job=jobs.encode(self.job) if digest else None,
            )
        )
        return claim.answer

    async def submit(self) -> None:
        derender = DerenderJob(**jobs.follow_on(self.job), endpoint=self.job.endpoint)
        await self.home.broker.queues.publish(QUEUE, Message(jobs.encode(derender), self.job.request_id))

    async def replay(self, seq: int = 0, **rest: Any) -> None:
        """Asks for its chunks to be told again."""
        again = Replay(client=CLIENT, request_id=self.job.request_id, model="demo", seq=seq, **rest)
        await self.home.broker.queues.publish(REPLAYS, Message(jobs.encode(again)))

    async def append(self, ids: Sequence[int], *, ends: bool = False) -> Append:
        """What its writer is answered that adds these tokens."""
        running = Follower().running
        for token in self._tokens:
            running = advance(running, 0, [token])
        writing = Writing(self.name, after=self._position, chunks=len(self._tokens), running=running)
        chunks = [TokenChunk("r", [TokenChoice(0, token_ids=[token])]) for token in ids]
        writing.add(chunks, End(Usage(3, 3 + len(IDS), len(IDS))) if ends else None)
        batch = writing.batch()
        (appended,) = await self.home.broker.log.append([batch])
        if appended.answer is Append.STORED:
            self._position = batch.last
            self._tokens += ids
        return appended.answer

    async def write(self, ids: Sequence[int], *, ends: bool = False) -> None:
        assert await self.append(ids, ends=ends) is Append.STORED

    async def saved(self, chunks: int) -> None:
        """Returns once a checkpoint says that so many chunks were told."""

        async def says_so() -> bool:
            state = await self.home.broker.runs.load(self.name)
            return state is not None and json.loads(state)["chunks"] == chunks

        await until(says_so)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Returns once it holds."""
    async with asyncio.timeout(WAIT_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0)


class Mortal(DerenderWorker):
    """A worker that may be killed: it hands nothing over."""

    async def _hand_over(self) -> None:
        pass


@asynccontextmanager
async def killed_after(home: Embedded) -> AsyncIterator[Broker]:
    """A worker at work, until it is killed; yields its connection."""
    async with home.connect() as broker:
        worker, ready = Mortal(broker, demo_spec(), terms=SLOW), asyncio.Event()
        working = asyncio.create_task(serve([worker], stop=asyncio.Event(), ready=ready, grace=0.0))
        await ready.wait()
        try:
            yield broker
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    home.shelf.lapse(worker.name)


def seqs(client: Listener, request_id: str = "r1") -> list[int]:
    return [event.seq for event in client.chunks(request_id)]


def told_as_one(client: Listener, request_id: str = "r1") -> list[bytes]:
    """The chunks by seq, which is dense; one that came more than once was the same each time."""
    told: dict[int, bytes] = {}
    for event in client.chunks(request_id):
        assert told.setdefault(event.seq, bytes(event.chunk)) == bytes(event.chunk)
    assert sorted(told) == list(range(len(told)))
    return [told[seq] for seq in sorted(told)]


async def one_outcome(client: Listener, run: Run) -> FinalEvent | ErrorEvent:
    """The outcome as it was told, and as it stands, however often it was told; the queue has nothing left."""
    outcome = await client.outcome(run.job.request_id)

    async def settled() -> bool:
        return await run.home.broker.queues.depth(QUEUE) == 0

    await until(settled)
    assert {jobs.encode(event) for event in client.outcomes(run.job.request_id)} == {run.record.outcome}
    assert outcome.event_id == run.job.event_id
    return outcome


async def undisturbed(delivery: Delivery) -> tuple[list[bytes], bytes]:
    """The chunks and the response of the run if one worker tells it."""
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    run = Run(home, "r1", delivery=delivery)
    async with listening(home.broker) as client, working([DerenderWorker(home.broker, demo_spec())]):
        await run.begin()
        await run.write(IDS, ends=True)
        await run.submit()
        outcome = await client.outcome("r1")
        assert isinstance(outcome, FinalEvent)
    home.close()
    return told_as_one(client), bytes(outcome.response)
