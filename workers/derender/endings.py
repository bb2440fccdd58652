"""How a run that is told comes to its end: its one outcome is written, unless it stands already, and told; then its
delivery is settled. Whatever breaks in between, the delivery comes again and finds what was done."""

from __future__ import annotations

from typing import Final

from headrace.broker.ports import Broker, Claim, Delivery, Release
from headrace.protocol.errors import Exhausted, HeadraceError, StreamLost
from headrace.protocol.jobs import DerenderJob
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower, read_all
from headrace.workers.outcome import conclude, failed, tell
from headrace.workers.probe import probe
from headrace.workers.runtime import counted
from headrace.workers.terms import Terms

LOST_WAITS: Final = 3
"""Heartbeats that a lost final is waited for."""
_LOST: Final = "x-headrace-lost"


class Endings:
    """What becomes of a run, and of the delivery that stands for it, once nothing more of it is told."""

    def __init__(self, broker: Broker, terms: Terms) -> None:
        self._broker = broker
        self._terms = terms

    async def conclude(self, told: Told) -> None:
        """A run that is over. Raises what stopped its telling where that is no answer for a client: one attempt."""
        job = told.job
        if told.partial and told.lost is None:
            await self._recall(told)
        if isinstance(told.lost, StreamLost):
            await self.lost(job, told.delivery, told.epoch, chunks=told.follower.chunks)
            return
        try:
            outcome = told.outcome()
        except Exception:
            await self._broker.runs.release(job.run, "derender", told.epoch, Release.FAILED)
            raise
        await conclude(self._broker, outcome, to=job, replay_ttl=job.replay_ttl)
        probe("derender.before_ack")
        await self._broker.queues.ack(told.delivery)

    async def pass_on(self, job: DerenderJob, delivery: Delivery, outcome: bytes) -> None:
        """The outcome was written before."""
        await tell(self._broker, outcome, to=job)
        await self._broker.queues.ack(delivery)

    async def fail(self, job: DerenderJob, delivery: Delivery, error: HeadraceError, *, chunks: int) -> None:
        """A run that is told no further. Of ``chunks`` that are in its log a client may ask for those it misses."""
        await conclude(self._broker, failed(job, error, chunks=chunks), to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.ack(delivery)

    async def give_up(self, job: DerenderJob, delivery: Delivery, claim: Claim) -> None:
        """A run that went wrong, or took workers down, too often."""
        why = f"telling the request failed {claim.attempts} times and took down {claim.rescues} workers"
        event = failed(job, Exhausted(why), chunks=claim.chunks)
        await conclude(self._broker, event, to=job, replay_ttl=job.replay_ttl)
        await self._broker.queues.bury(delivery, why)

    async def lost(self, job: DerenderJob, delivery: Delivery, epoch: int, *, chunks: int) -> None:
        """The stored output is gone. What was told cannot be told anew; of a final nothing was told, so it is given
        some time to be generated again from the job that its worker still holds."""
        waited = counted(delivery, _LOST)
        if job.delivery == "final" and waited < LOST_WAITS:
            await self._broker.runs.release(job.run, "derender", epoch, Release.HANDOVER)
            await self._broker.queues.retry(delivery, self._terms.heartbeat, {_LOST: waited + 1})
            return
        await self.fail(job, delivery, StreamLost("stored output was lost; send the request again"), chunks=chunks)

    async def _recall(self, told: Told) -> None:
        """Reads the beginning of the log, which a run that was resumed has not seen: the response is that of all."""
        follower = Follower()
        try:
            whole = await read_all(self._broker.log, told.job.run, follower)
        except StreamLost as lost:
            told.lost = lost
            return
        if follower.chunks != told.follower.chunks:
            told.lost = StreamLost(f"{follower.chunks} chunks of {told.follower.chunks} are left of the log")
            return
        told.recall(chunk for _, chunk in whole if chunk is not None)
