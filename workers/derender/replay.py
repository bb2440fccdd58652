"""A run told again to a client that asks for it, whether or not anybody holds it."""

from __future__ import annotations

from headrace.broker.ports import Broker
from headrace.protocol import jobs
from headrace.protocol.errors import NotFound
from headrace.protocol.jobs import GenerateJob, Replay
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.sending import send
from headrace.workers.derender.telling import ChunkEvents, telling_of
from headrace.workers.follow import Follower, read_on
from headrace.workers.outcome import tell, tell_only


async def tell_again(broker: Broker, derenderer: Derenderer, replay: Replay) -> None:
    """Tells the chunks from ``seq`` on again, and the outcome if there is one."""
    source = source_of(await broker.runs.job(replay.run))
    outcome = await broker.runs.result(replay.run)
    if source is None and outcome is None:
        gone = NotFound("request_id: nothing is kept of this request any more", param="request_id")
        await tell_only(broker, replay, gone, to=replay)
        return
    if source is not None:
        await _tell_chunks(broker, derenderer, replay, source)
    if outcome is not None:
        await tell(broker, outcome, to=replay)


async def _tell_chunks(broker: Broker, derenderer: Derenderer, replay: Replay, source: GenerateJob) -> None:
    telling, told = telling_of(derenderer, source), ChunkEvents(source)
    async for page in read_on(broker.log, replay.run, Follower()):
        events = []
        for entry, chunk in page:
            body = None if chunk is None else telling.chunk(chunk, entry.payload)
            if body is not None and entry.seq >= replay.seq:
                events.append(told.form % (entry.seq, body))
        outbox = Outbox()
        outbox.add(source, "chunk", events, replay)
        await send(broker, outbox.take())


def source_of(body: bytes | None) -> GenerateJob | None:
    """The job that a run was generated for, as its claim stored it."""
    job = None if body is None else jobs.decode(body)
    return job if isinstance(job, GenerateJob) else None
