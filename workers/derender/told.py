"""One run on its way to its client: where its log has been followed to, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.entries import Entry
from headrace.broker.ports import Delivery
from headrace.protocol.errors import HeadraceError
from headrace.protocol.jobs import DerenderJob, Terminal
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.telling import ChunkEvents, Telling
from headrace.workers.follow import Follower
from headrace.workers.outcome import End, answered, decode_end, failed


class Told:
    """A run that this worker tells."""

    __slots__ = ("_events", "delivery", "end", "epoch", "follower", "job", "lost", "telling")

    def __init__(self, job: DerenderJob, delivery: Delivery, epoch: int, telling: Telling) -> None:
        self.job = job
        self.delivery = delivery
        self.epoch = epoch
        self.telling = telling
        self._events = ChunkEvents(job)
        self.follower = Follower()
        self.end: End | None = None
        self.lost: Exception | None = None
        """Why no more of it can be told."""

    def take(self, entries: Sequence[Entry], outbox: Outbox) -> None:
        """Follows the entries; what the client is to hear goes into the outbox."""
        events: list[bytes] = []
        try:
            for entry in entries:
                chunk = self.follower.follow(entry)
                if entry.kind == "end":
                    self.end = decode_end(entry.payload)
                elif chunk is not None:
                    body = self.telling.chunk(chunk, entry.payload)
                    if body is not None:
                        events.append(self._events.event(entry.seq, body))
        except Exception as error:  # whatever it is: one run must not take down the telling of the others
            self.lost = error
        if events:
            outbox.add(self.job, "chunk", events, self.job.topic)

    @property
    def over(self) -> bool:
        return self.end is not None or self.lost is not None

    def outcome(self) -> Terminal:
        """How a run that is over ended. Raises what stopped its telling, where that is no answer for a client."""
        job, end, chunks = self.job, self.end, self.follower.chunks
        if isinstance(self.lost, HeadraceError):
            return failed(job, self.lost, chunks=chunks)
        if self.lost is not None:
            raise self.lost
        assert end is not None, "a run that is over has its end or was lost"
        if end.failure is not None:
            return failed(job, end.failure, chunks=chunks)
        try:
            return answered(job, self.telling.final(end), chunks=chunks)
        except HeadraceError as error:
            return failed(job, error, chunks=chunks)
