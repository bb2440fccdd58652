"""From a delivery to a run that this worker has: it is read and checked, waits for its turn, is counted and claimed.

Until its turn a request is nobody's. What does not come to be a run here is settled here: told, parked, set apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from msgspec import UNSET
from pydantic import ValidationError

from headrace.broker.ports import Broker, Claim, ClaimAnswer, ClaimRequest, Delivery, QueueFull, Unroutable
from headrace.logs import get_logger
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.errors import (
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Exhausted,
    HeadraceError,
    NotFound,
    bad_request,
)
from headrace.protocol.jobs import EnvelopeError, GenerateJob, Lane, lane_of
from headrace.workers.generate.checks import in_words_of_chat
from headrace.workers.generate.engine import Engine
from headrace.workers.generate.held import Asked, Held
from headrace.workers.generate.turns import NoTurn, Place, Turns
from headrace.workers.generate.watch import Watch
from headrace.workers.holding import BEGUN, Holding
from headrace.workers.limits import count, tokens_of, uncount
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import conclude, failed, tell, tell_only
from headrace.workers.probe import probe
from headrace.workers.runtime import ATTEMPTS, RESCUES, now
from headrace.workers.terms import Terms

log = get_logger()

Admit = Callable[[Claim, Asked], Awaitable[None]]
"""Begins a run that was claimed, on rows that are its own until it is let go of; where it raises, it is not begun."""


def window(rows: int) -> int:
    """Requests of each queue among which the next is chosen, while all rows are taken."""
    return max(4, rows // 2)


class Taking:
    """Takes the requests of one model, each in its turn, and has those that are claimed admitted."""

    def __init__(
        self,
        broker: Broker,
        spec: ModelSpec,
        engine: Engine,
        worker: str,
        held: Holding[Held],
        turns: Turns,
        watch: Watch,
        admit: Admit,
        terms: Terms,
    ) -> None:
        self._broker = broker
        self._model = spec.name
        self._engine = engine
        self._capacity = engine.capacity()
        self._worker = worker
        self._held = held
        self._turns = turns
        self._watch = watch
        self._admit = admit
        self._terms = terms
        self._lanes: dict[str, Lane] = {jobs.queue_of("generate", spec.name, lane): lane for lane in jobs.LANES}
        self._claiming: set[str] = set()
        self._trying: str | None = None
        """The one run of those here that may be what its last holders died of."""

    async def handle(self, delivery: Delivery) -> None:
        """Does all this with a delivery; raises what stands in the way of it."""
        probe("generate.taken")
        asked = self._read(delivery)
        run = asked.job.run
        if run in self._claiming:
            await self._broker.queues.retry(delivery, self._terms.beat)
            return
        self._claiming.add(run)
        try:
            if self._held.get(run) is not None:  # it came once more, and has its rows
                self._turns.take(asked.rows)
            elif not await self._gets_turn(asked):
                return
            await self._ask(asked)
        finally:
            self._claiming.discard(run)
            self.end_trial(run)

    def end_trial(self, run: str) -> None:
        """Another suspect may be tried, if it was this one and it is not held any more."""
        if self._trying == run and self._held.get(run) is None:
            self._trying = None

    async def park(self, delivery: Delivery) -> None:
        """Somebody else has the run, or had it a moment ago: look again soon."""
        await self._broker.queues.retry(delivery, self._terms.beat, {BEGUN: True})

    async def refuse(self, job: GenerateJob, error: HeadraceError, delivery: Delivery) -> None:
        """Ends a run that this request is."""
        await conclude(self._broker, failed(job, error), to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(delivery)

    # ------------------------------------------------------------------------------------------ reading

    def _read(self, delivery: Delivery) -> Asked:
        job = jobs.decode(delivery.body)
        if not isinstance(job, GenerateJob):
            raise EnvelopeError(f"type: {type(job).__name__} is not for a generate queue")
        moment = now()
        job = jobs.stamp(job, moment)
        return Asked(job, self._checked(job), delivery, moment)

    def _checked(self, job: GenerateJob) -> GenerateRequest:
        try:
            request = GenerateRequest.model_validate_json(bytes(job.request))
        except ValidationError as error:
            raise bad_request(error) from None
        request.request_id = job.request_id
        if request.model is not None and request.model != self._model:
            raise NotFound(f"model: {request.model!r} is not served here, {self._model!r} is", param="model")
        try:
            self._engine.check(request)
        except BadRequest as error:
            raise error if job.source is UNSET else in_words_of_chat(error, bytes(job.source)) from None
        return request

    # ------------------------------------------------------------------------------------------ waiting

    async def _gets_turn(self, asked: Asked) -> bool:
        """Waits, unclaimed, until the engine has room for the request. False: it does not wait here any more."""
        job, queue = asked.job, asked.delivery.queue
        begun = await self._was_begun(asked)
        if not begun and await self._set_apart(job, asked.delivery):
            return False
        place = Place(
            job.run,
            kind=lane_of(asked.request.priority) if queue in self._lanes else "backlog",
            client=job.client,
            rows=asked.rows,
            deadline=job.deadline or 0.0,
            priority=asked.request.priority,
            begun=begun,
        )
        try:
            await self._turns.wait(place, asked.since + self._terms.consumer_timeout / 2 - now())
        except NoTurn:
            await self._give_back(asked.delivery)
            return False
        return True

    async def _was_begun(self, asked: Asked) -> bool:
        """Whether somebody has held the run: it is asked of the store only where the delivery says that it may be."""
        may_be = asked.delivery.redelivered or BEGUN in asked.delivery.headers
        return may_be and await self._broker.runs.job(asked.job.run) is not None

    async def _set_apart(self, job: GenerateJob, delivery: Delivery) -> bool:
        """Moves a request to the backlog if many wait in its lane, and its client has its share of them here."""
        if delivery.queue not in self._watch.crowded:
            return False
        share = max(1, round(window(self._capacity.rows) / 4 * self._terms.weights.get(job.client, 1.0)))
        if self._turns.of(self._lanes[delivery.queue], job.client) < share:
            return False
        try:
            await self._broker.queues.move(delivery, jobs.backlog_of("generate", self._model, job.client), job.deadline)
        except (QueueFull, Unroutable) as full:
            log.info("job.not_set_apart", request_id=job.request_id, error=str(full))
            return False
        return True

    async def _give_back(self, delivery: Delivery) -> None:
        """It did not get its turn: at a stop another worker takes it at once, else it comes again in a while."""
        if self._turns.leaving:
            await self._broker.queues.release(delivery)
        else:
            await self._broker.queues.retry(delivery, self._terms.beat)

    # ------------------------------------------------------------------------------------------ claiming

    async def _ask(self, asked: Asked) -> None:
        """Counts and claims a request that has its rows; gives these back if it does not come to be a run here."""
        admitted = False
        try:
            counted = await self._counted(asked)
            try:
                admitted = await self._answer(await self._claim(counted), counted)
            except HeadraceError:  # it will be refused
                await uncount(self._broker, counted.job)
                raise
        finally:
            if not admitted:
                self._turns.free(asked.rows)

    async def _counted(self, asked: Asked) -> Asked:
        if asked.job.source is not UNSET:  # who rendered it has counted it
            return asked
        tokens = tokens_of(asked.request, self._capacity.max_model_len)
        return replace(asked, job=await count(self._broker, asked.job, tokens, self._terms.allowance))

    async def _claim(self, asked: Asked) -> Claim:
        """The answer to a claim. A suspect is taken only while no other one is being tried here."""
        job = asked.job
        request = ClaimRequest(
            run=job.run,
            role="generate",
            worker=self._worker,
            digest=jobs.digest_of(job),
            deadline=job.deadline or 0.0,
            replay_ttl=job.replay_ttl,
            heartbeat=self._terms.heartbeat,
            max_attempts=self._terms.max_attempts,
            max_rescues=self._terms.max_rescues,
            redelivered=asked.delivery.redelivered,
            job=jobs.encode(job),
            trial=False,
        )
        claim = await self._broker.runs.claim(request)
        if claim.answer is ClaimAnswer.SUSPECT and self._trying is None:
            self._trying = job.run
            claim = await self._broker.runs.claim(replace(request, trial=True))
        return claim

    async def _answer(self, claim: Claim, asked: Asked) -> bool:
        """Does what the answer says. True: the run is begun here."""
        job, delivery = asked.job, asked.delivery
        match claim.answer:
            case ClaimAnswer.MINE if (held := self._held.get(job.run)) is not None:
                if held.job.topic == job.topic:
                    await self._held.adopt(held, delivery)
                else:  # the same request sent again by another listener: told at the end
                    await self.park(delivery)
            case ClaimAnswer.NEW | ClaimAnswer.MINE:
                await self._admit(claim, asked)
                return True
            case ClaimAnswer.ALIVE | ClaimAnswer.ENDED | ClaimAnswer.SUSPECT:
                await self.park(delivery)
            case ClaimAnswer.DONE:
                assert claim.outcome is not None, "a run that is done has its outcome"
                await tell(self._broker, claim.outcome, to=job)
                await uncount(self._broker, job)
                await self._broker.queues.ack(delivery)
            case ClaimAnswer.CONFLICT:
                await self._turn_down(job, delivery)
            case ClaimAnswer.CANCELLED:
                await self.refuse(job, Cancelled(claim.reason or "cancelled"), delivery)
            case ClaimAnswer.EXPIRED:
                late = DeadlineExceeded("deadline: it passed before the request was generated", param="deadline")
                await self.refuse(job, late, delivery)
            case ClaimAnswer.EXHAUSTED:
                await self._give_up(claim, job, delivery)
        return False

    async def _turn_down(self, job: GenerateJob, delivery: Delivery) -> None:
        """The run is another request of this client's, and goes on being counted for as long as it is under way."""
        taken = Conflict("request_id: it was used before with another body", param="request_id")
        await tell_only(self._broker, job, taken, to=job)
        if job.counted and await self._broker.runs.result(job.run) is not None:
            await uncount(self._broker, job)
        await self._broker.queues.ack(delivery)

    async def _give_up(self, claim: Claim, job: GenerateJob, delivery: Delivery) -> None:
        why = f"the request failed {claim.attempts} times and took down {claim.rescues} workers"
        await conclude(self._broker, failed(job, Exhausted(why)), to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.bury(delivery, why, {ATTEMPTS: claim.attempts, RESCUES: claim.rescues})
