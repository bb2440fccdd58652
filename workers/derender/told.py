"""One run on its way to its client: where its log has been followed to, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.broker.entries import Entry
from headrace.broker.ports import Delivery
from headrace.protocol.errors import HeadraceError
from headrace.protocol.jobs import DerenderJob, Terminal
from headrace.protocol.wire import TokenChunk
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.telling import ChunkEvents, Telling
from headrace.workers.follow import Follower
from headrace.workers.outcome import End, answered, decode_end, failed


class Told:
    """A run that this worker tells. One that goes on from a checkpoint starts at ``follower``'s place."""

    __slots__ = (
        "_events",
        "delivery",
        "end",
        "epoch",
        "follower",
        "job",
        "kept_at",
        "kept_chunks",
        "lost",
        "partial",
        "telling",
    )

    def __init__(
        self, job: DerenderJob, delivery: Delivery, epoch: int, telling: Telling, follower: Follower | None = None
    ) -> None:
        self.job = job
        self.delivery = delivery
        self.epoch = epoch
        self.telling = telling
        self.partial = follower is not None
        """Whether its telling has not seen the beginning of the log."""
        self.follower = follower or Follower()
        self.kept_chunks = self.follower.chunks
        """How many of the chunks the last checkpoint covers,"""
        self.kept_at: float | None = None
        """and when it was taken (a monotonic clock); before the first one, when there was something to save."""
        self._events = ChunkEvents(job)
        self.end: End | None = None
        self.lost: Exception | None = None
        """Why no more of it can be told."""

    def take(self, entries: Sequence[Entry], outbox: Outbox) -> None:
        """Follows the entries; what the client is to hear goes into the outbox."""
        events: list[bytes] = []
        follow, tell, form = self.follower.follow, self.telling.chunk, self._events.form
        try:
            for entry in entries:
                chunk = follow(entry)
                if chunk is not None:
                    body = tell(chunk, entry.payload)
                    if body is not None:
                        events.append(form % (entry.position.k - 1, body))
                elif entry.kind == "end":
                    self.end = decode_end(entry.payload)
        except Exception as error:  # whatever it is: one run must not take down the telling of the others
            self.lost = error
        if events:
            outbox.add(self.job, "chunk", events, self.job)

    def recall(self, chunks: Iterable[TokenChunk]) -> None:
        """Hears of the whole log what its telling has not seen of it."""
        self.telling.recall(chunks)
        self.partial = False

    @property
    def over(self) -> bool:
        return self.end is not None or self.lost is not None

    @property
    def resumable(self) -> bool:
        """Whether a checkpoint would spare anybody work: of a final nothing is told before its end."""
        return self.epoch > 0 and self.job.delivery != "final" and not self.over

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
        assert not self.partial, "the response is that of the whole log"
        try:
            return answered(job, self.telling.final(end), chunks=chunks)
        except HeadraceError as error:
            return failed(job, error, chunks=chunks)
