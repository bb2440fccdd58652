"""What telling a chunk costs the derender worker, its listener and the servers: a section of ops.bench.line.

Runs whose logs are complete are told by one worker to one listener, which checks that each chunk is heard once and in
order. Three ways: packs across requests, as the SDK asks for them; packs within one request, as a plain AMQP consumer
without a topic gets them; packs across requests by way of a Redis stream.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.broker.ports import Broker, Message
from headrace.protocol import jobs
from headrace.protocol.jobs import ChunkEvent, DerenderJob, FinalEvent, Via
from ops.bench.each_awaited import CHAT, CLIENT, filled
from ops.bench.figures import Cost, Figures, add, show

SIZES: Final = {16: 1600, 256: 200, 2048: 200}
"""Streams that are told at a time, and the chunks of each."""
AWAITED_STREAMS, AWAITED = 256, 20
"""Of these the loop tells so many chunks each: it is so much slower."""
WAIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Way:
    """How a client has chosen to hear of its requests."""

    packed: bool = True
    via: Via = "amqp"


WAYS: Final = {"SDK": Way(), "plain consumer": Way(packed=False), "Redis topic": Way(via="redis")}


@dataclass(frozen=True, slots=True)
class Told:
    """Runs that are to be told: their ids begin with ``prefix``, which is their topic, too."""

    prefix: str
    model: str
    streams: int
    chunks: int
    way: Way

    @property
    def ids(self) -> list[str]:
        return [f"{self.prefix}-{n}" for n in range(self.streams)]

    def job(self, request_id: str) -> DerenderJob:
        return DerenderJob(
            client=CLIENT,
            request_id=request_id,
            model=self.model,
            topic=self.prefix if self.way.packed else None,
            via=self.way.via,
            endpoint=CHAT,
            submitted_at=1.0,
            deadline=time.time() + 600,
        )

    async def heard(self, broker: Broker) -> None:
        """Has the worker tell the runs; returns when all of it has been heard, in order and once."""
        pattern = f"{CLIENT}.*.{self.prefix}" if self.way.packed else f"{CLIENT}.*"
        async with broker.via(self.way.via).subscribe(pattern) as messages:
            queue = jobs.queue_of("derender", self.model)
            async with asyncio.TaskGroup() as group:
                for request_id in self.ids:
                    body = jobs.encode(self.job(request_id))
                    group.create_task(broker.queues.publish(queue, Message(body, request_id)))
            seqs = dict.fromkeys(self.ids, 0)
            finals = 0
            async with asyncio.timeout(WAIT_S):
                while finals < self.streams:
                    for event in jobs.decode_events((await anext(messages)).body):
                        match event:
                            case ChunkEvent(seq=seq, request_id=request_id):
                                assert seq == seqs[request_id], f"{request_id}: {seq} is not {seqs[request_id]}"
                                seqs[request_id] += 1
                            case FinalEvent(chunks=chunks, request_id=request_id):
                                assert chunks == self.chunks, f"{request_id}: {chunks} chunks"
                                finals += 1
                            case other:
                                raise AssertionError(other)
            assert set(seqs.values()) == {self.chunks}, "every chunk is told"


async def awaited(broker: Broker, prefix: str, env: Mapping[str, str]) -> float:
    """CPU microseconds of the loop that awaits each chunk; somebody listens here too."""
    async with broker.topics.subscribe(f"{CLIENT}.*.{prefix}") as messages:
        command = (sys.executable, "-m", "ops.bench.each_awaited", prefix, str(AWAITED_STREAMS))
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(WAIT_S):
            for _ in range(AWAITED_STREAMS * AWAITED):
                await anext(messages)
            said, _ = await process.communicate()
    return float(said)


async def measured(broker: Broker, model: str, env: Mapping[str, str], pids: Mapping[str, int], rounds: int) -> None:
    """The section. ``pids`` are those of the worker and of the servers, as far as they are known."""
    figures: Figures = {}
    for number in range(rounds + 1):  # the first one only warms up
        prefix = f"awaited-{number}"
        await filled(broker, prefix, AWAITED_STREAMS, AWAITED, model)
        spent = await awaited(broker, prefix, env)
        if number:
            add(figures, "a chunk awaited", {"loop": spent}, AWAITED_STREAMS * AWAITED)
        for streams, chunks in SIZES.items():
            for name, way in WAYS.items():
                prefix = f"{name.split()[0]}-{streams}-{number}"
                await filled(broker, prefix, streams, chunks, model)
                with Cost(**pids, listener=os.getpid()) as cost:
                    await Told(prefix, model, streams, chunks, way).heard(broker)
                if number:
                    add(figures, f"{streams} streams, {name}", cost.us, streams * chunks)
    sizes = ", ".join(f"{streams} of {chunks}" for streams, chunks in SIZES.items())
    show(f"derender: streams of chunks, {sizes}", "CPU us a chunk", figures, "a chunk awaited: loop")
