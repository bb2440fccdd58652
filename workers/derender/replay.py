"""A run told again to a client that asks for it, whether or not anybody holds it. There is always an answer.

What cannot be told again is answered with an error whose event_id is its own: it is not the outcome of the run. Where
the run is under way, its live events go on beside: whatever is not in the log yet comes with them.
"""

from __future__ import annotations

from headrace.broker.ports import Broker
from headrace.protocol import jobs
from headrace.protocol.errors import HeadraceError, NotFound, StreamLost
from headrace.protocol.jobs import GenerateJob, ProgressEvent, Replay, Terminal
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.sending import send
from headrace.workers.derender.telling import ChunkEvents, telling_of
from headrace.workers.follow import START, Follower, read_on
from headrace.workers.outcome import tell, tell_only


async def tell_again(broker: Broker, derenderer: Derenderer, replay: Replay) -> None:
    """Tells the chunks from ``seq`` on again; then the outcome if there is one, an error if chunks are missing, or a
    sign of life if there is nothing else to say."""
    source = source_of(await broker.runs.job(replay.run))
    outcome = await broker.runs.result(replay.run)
    if source is None and outcome is None:
        gone = NotFound("request_id: nothing is kept of this request any more", param="request_id")
        await tell_only(broker, replay, gone, to=replay)
        return
    again = Again(broker, replay)
    if source is not None:
        await again.tell_chunks(derenderer, source)
    if outcome is not None:
        await tell(broker, outcome, to=replay)
    missing = again.missing(None if outcome is None else jobs.decode_terminal(outcome))
    if missing is not None:
        await tell_only(broker, replay, missing, to=replay)
    elif outcome is None and not again.told:
        await again.give_sign()


class Again:
    """One replay: how far it has come, and what stopped it."""

    def __init__(self, broker: Broker, replay: Replay) -> None:
        self._broker = broker
        self._replay = replay
        self._follower = Follower()
        self._stopped: HeadraceError | None = None
        self._streams = True
        self._tokens = 0
        self.told = False
        """Whether there was a chunk to tell."""

    async def tell_chunks(self, derenderer: Derenderer, source: GenerateJob) -> None:
        """Every chunk that is in the log now, from the replay's seq on."""
        self._streams = source.delivery != "final"
        try:
            await self._tell(derenderer, source)
        except HeadraceError as error:
            self._stopped = error

    async def _tell(self, derenderer: Derenderer, source: GenerateJob) -> None:
        telling, form = telling_of(derenderer, source), ChunkEvents(source).form
        async for page in read_on(self._broker.log, self._replay.run, self._follower):
            events = []
            for entry, chunk in page:
                body = None if chunk is None else telling.chunk(chunk, entry.payload)
                if body is not None and entry.seq >= self._replay.seq:
                    events.append(form % (entry.seq, body))
            self.told = self.told or bool(events)
            outbox = Outbox()
            outbox.add(source, "chunk", events, self._replay)
            await send(self._broker, outbox.take())
        self._tokens = telling.tokens

    def missing(self, outcome: Terminal | None) -> HeadraceError | None:
        """Why chunks that the client asked for did not come, unless the outcome says so. Of a final there are none."""
        if not self._streams:
            return None
        if self._stopped is not None and (outcome is None or isinstance(self._stopped, StreamLost)):
            return self._stopped
        # A log has its begin from the moment on in which the job is kept.
        lost = self._follower.position == START if outcome is None else self._follower.chunks < outcome.chunks
        if not lost or (outcome is not None and self._replay.seq >= outcome.chunks):
            return None
        return StreamLost(f"chunk {max(self._replay.seq, self._follower.chunks)} is not kept any more")

    async def give_sign(self) -> None:
        """The run is under way."""
        replay = self._replay
        event = ProgressEvent(client=replay.client, request_id=replay.request_id, tokens=self._tokens)
        outbox = Outbox()
        outbox.add(replay, "progress", [jobs.encode(event)], replay)
        await send(self._broker, outbox.take())


def source_of(body: bytes | None) -> GenerateJob | None:
    """The job that a run was generated for, as its claim stored it."""
    job = None if body is None else jobs.decode(body)
    return job if isinstance(job, GenerateJob) else None
