"""The generate worker: takes jobs as the engine has room, writes what it makes into the logs, hands over when it must.

A job stays unacked until its log has its end. One task owns the engine; appends for all runs go out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from headrace.broker.entries import Position
from headrace.broker.ports import (
    Append,
    Appended,
    Broker,
    BrokerError,
    Claim,
    ClaimAnswer,
    Delivery,
    Message,
    Release,
)
from headrace.logs import get_logger
from headrace.protocol import jobs
from headrace.protocol.errors import Cancelled, DeadlineExceeded, HeadraceError, Interrupted, StreamLost
from headrace.protocol.jobs import DerenderJob
from headrace.protocol.wire import Usage
from headrace.workers.follow import Follower
from headrace.workers.generate.deadlines import Deadlines
from headrace.workers.generate.engine import Admission, ChoiceSoFar, Engine
from headrace.workers.generate.engines import build
from headrace.workers.generate.gate import Vitals
from headrace.workers.generate.held import Asked, Held
from headrace.workers.generate.resume import durable
from headrace.workers.generate.taking import Taking, window
from headrace.workers.generate.turns import Turns
from headrace.workers.generate.waiting import Waiting
from headrace.workers.generate.watch import Watch
from headrace.workers.generate.writer import LogWriter, Writing
from headrace.workers.holding import Holding
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import End, Failure
from headrace.workers.probe import probe
from headrace.workers.runtime import guarded, now, passed_on, take, worker_name
from headrace.workers.terms import DEFAULT_TERMS, Terms

log = get_logger()


class GenerateWorker:
    """Consumes ``generate.<model>`` in its lanes, writes the logs, publishes one ``derender.<model>`` job a claim."""

    def __init__(
        self, broker: Broker, spec: ModelSpec, *, engine: Engine | None = None, terms: Terms = DEFAULT_TERMS
    ) -> None:
        self.name = worker_name("generate")
        self._broker = broker
        self._spec = spec
        self._engine = build(spec) if engine is None else engine
        self._terms = terms
        self._lanes = [jobs.queue_of("generate", spec.name, lane) for lane in jobs.LANES]
        self._backlogs = jobs.backlogs_of("generate", spec.name)
        self._next = jobs.queue_of("derender", spec.name)
        self._held: Holding[Held] = Holding(broker, "generate", self.name, terms=terms)
        self._deadlines = Deadlines()
        self._writer = LogWriter(broker.log, self._appended)
        self._rows: int
        self._turns: Turns
        self._watch: Watch
        self._taking: Taking
        self._tasks: asyncio.TaskGroup

    async def start(self) -> None:
        """Loads the model."""
        broker, spec, terms = self._broker, self._spec, self._terms
        await self._engine.start()
        await broker.queues.declare([*self._lanes, *self._backlogs, self._next])
        self._rows = self._engine.capacity().rows
        self._turns = Turns(Waiting(terms.weights), self._rows + self._spare)
        self._watch = Watch(broker, self.name, spec.name, self._held, self._turns, self._rows, terms)
        self._taking = Taking(
            broker, spec, self._engine, self.name, self._held, self._turns, self._watch, self._admit, terms
        )

    async def run(self, stop: asyncio.Event, grace: float) -> None:
        """Generates until ``stop``, then finishes what ``grace`` seconds allow and hands the rest over."""
        prefetch = self._rows + self._spare + window(self._rows)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                stepping = self._tasks.create_task(self._step_on())
                chores = [self._tasks.create_task(chore) for chore in (self._beat_on(), self._watch.go_on())]
                writing = self._tasks.create_task(self._writer.run())
                async with asyncio.TaskGroup() as taking:
                    taking.create_task(self._leave_at(stop))
                    serve = partial(take, self._broker, stop=stop, terms=self._terms)
                    for queue in (*self._lanes, *self._backlogs):
                        taking.create_task(serve(queue, prefetch, self._taking.handle))
                await self._held.finished(grace)
                stepping.cancel()
                self._writer.close()
                await asyncio.wait((writing,), timeout=self._terms.heartbeat)
                for task in (writing, *chores):
                    task.cancel()
        finally:
            await self._held.hand_over()
            await self._engine.stop()

    @property
    def _spare(self) -> int:
        """Rows that wait in the engine, so that one that is free never waits for the broker."""
        return max(2, self._rows // 4)

    @property
    def vitals(self) -> Vitals:
        """How the worker is doing."""
        return self._watch.vitals

    async def _leave_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._turns.leave()

    # ------------------------------------------------------------------------------------------ beginning a run

    async def _admit(self, claim: Claim, asked: Asked) -> None:
        """From here on the run is ours: from the durable tokens, if an earlier epoch left some."""
        probe("generate.claimed")
        job = asked.job
        stale = self._held.get(job.run)
        if stale is not None:  # others had the run meanwhile: what the engine still has of it is not what is durable
            self._let_go(stale)
            await self._broker.queues.ack(stale.delivery)
        follower = Follower(Position(claim.epoch, 0), claim.chunks)
        resume: tuple[ChoiceSoFar, ...] = ()
        try:
            if claim.chunks or claim.answer is ClaimAnswer.MINE:
                follower = Follower()
                resume = await durable(self._broker.log, job.run, follower)
            await self._broker.queues.publish(self._next, _derender_job(asked))
            probe("generate.handed_on")
        except BrokerError:  # the job will be tried again by anyone: who gets it must find the run free
            await self._broker.runs.release(job.run, "generate", claim.epoch, Release.HANDOVER)
            raise
        writing = Writing(job.run, after=follower.position, chunks=follower.chunks, running=follower.running)
        held = Held(job, asked.delivery, claim.epoch, writing, asked.rows)
        can_go_on = not resume or self._engine.resume != "refuse"
        if can_go_on:
            self._engine.admit(Admission(job.run, asked.request, resume, job.client))
        self._held.add(held, asked.since)
        self._deadlines.add(job.run, job.deadline or 0.0)
        if not can_go_on:
            self._end(held, Interrupted("the worker was lost, and this engine cannot go on from what it had sent"))
        probe("generate.admitted")

    # ------------------------------------------------------------------------------------------ generating

    async def _step_on(self) -> None:
        while True:
            await self._writer.room()
            outputs = await self._engine.step()
            self._end_late()
            for output in outputs:
                held = self._held.get(output.run)
                if held is None or held.writing.ended:
                    continue
                end = None if output.end is None else _end(output.end.usage, output.end.error, output.end.extra)
                self._writer.add(held.writing, output.chunks, end)

    def _end(self, held: Held, error: HeadraceError) -> None:
        """Ends a run that the engine has not ended."""
        if not held.writing.ended:
            self._engine.cancel(held.job.run)
            self._writer.add(held.writing, (), End(failure=Failure.of(error)))

    def _appended(self, writing: Writing, appended: Appended, ended: bool) -> None:
        held = self._held.get(writing.run)
        if held is None or held.writing is not writing:
            return
        match appended.answer:
            case Append.STORED | Append.ALREADY if ended:
                probe("generate.ended")
                self._let_go(held)
                self._settle(held, self._broker.queues.ack)
            case Append.STORED | Append.ALREADY:
                if appended.cancelled is not None:
                    self._end(held, Cancelled(appended.cancelled))
            case Append.FENCED:
                log.warning("run.fenced", request_id=held.job.request_id, epoch=held.epoch, worker=self.name)
                self._let_go(held)
                self._settle(held, self._taking.park)
            case Append.LOST:
                log.error("run.lost", request_id=held.job.request_id, epoch=held.epoch, worker=self.name)
                self._let_go(held)
                self._settle(held, lambda _: self._lost(held))

    async def _lost(self, held: Held) -> None:
        """The log lost acknowledged entries. What was told cannot be untold; what was not is generated again."""
        if held.job.delivery == "final":
            await self._broker.runs.release(held.job.run, "generate", held.epoch, Release.FAILED)
            await self._broker.queues.retry(held.delivery, 1.0)
        else:
            lost = StreamLost("stored output was lost; send the request again")
            await self._taking.refuse(held.job, lost, held.delivery)

    def _end_late(self) -> None:
        """Ends the runs whose deadline has come."""
        for run in self._deadlines.late(now()):
            if (held := self._held.get(run)) is not None:
                self._end(held, DeadlineExceeded("deadline: it passed while generating", param="deadline"))

    def _let_go(self, held: Held) -> None:
        self._engine.cancel(held.job.run)
        self._held.drop(held)
        self._deadlines.drop(held.job.run)
        self._taking.end_trial(held.job.run)
        self._turns.free(held.rows)

    def _settle(self, held: Held, how: Callable[[Delivery], Awaitable[None]]) -> None:
        self._tasks.create_task(guarded(self._broker, held.delivery, how))

    # ------------------------------------------------------------------------------------------ signs of life

    async def _beat_on(self) -> None:
        """Shows that this worker lives, hears who was cancelled, and ends what is past its deadline."""
        while True:
            runs = [*self._held.runs(), *(place.run for place in self._turns)]
            try:
                cancelled = await self._broker.runs.beat(self.name, runs, self._terms.heartbeat)
            except BrokerError as away:
                log.warning("worker.beat_failed", worker=self.name, error=str(away))
                cancelled = {}
            for run, reason in cancelled.items():
                if (held := self._held.get(run)) is not None:
                    self._end(held, Cancelled(reason))
                else:
                    self._turns.turn_away(run, Cancelled(reason))
            self._end_late()
            late = DeadlineExceeded("deadline: it passed before the engine had room", param="deadline")
            self._turns.end_late(now(), late)
            await asyncio.sleep(self._terms.beat)


def _derender_job(asked: Asked) -> Message:
    job = asked.job
    told = DerenderJob(**jobs.follow_on(job), endpoint=job.endpoint)
    return Message(jobs.encode(told), job.request_id, passed_on(asked.delivery), job.deadline)


def _end(usage: Usage | None, error: HeadraceError | None, extra: dict[str, object]) -> End:
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in extra.items()}
    return End(usage, None if error is None else Failure.of(error), raw)
