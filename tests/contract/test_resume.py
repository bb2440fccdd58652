"""Wherever a worker is lost, the one that goes on writes what the lost one would have: greedy, seeded or neither."""

from __future__ import annotations

import asyncio
import json
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.embedded import Embedded
from headrace.broker.entries import Position
from headrace.broker.ports import Append, ClaimAnswer, ClaimRequest, Message
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.jobs import GenerateJob
from headrace.protocol.wire import TokenChunk
from headrace.workers.follow import Follower
from headrace.workers.generate.engine import Engine
from headrace.workers.generate.engines.loop import TransformersSettings
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.engines.transformers import TransformersEngine
from headrace.workers.generate.scheduler import Scheduler
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.generate.writer import Writing
from headrace.workers.terms import Terms
from tests.line import CLIENT, WAIT_S, demo_spec, raw, working
from tests.tiny_models import EOS, SERVED, VOCABULARY, saved

LENGTH, BLOCK, ROWS = 32, 4, 4
PROMPT = [5, 6, 7, 8, 9]
TOKEN_BYTES = 384
"""Of the tiny model's keys and values."""
QUEUE = "generate.demo"

_chunk = msgspec.json.Decoder(TokenChunk).decode


def null(_: Path) -> Engine:
    return NullEngine(NullSettings(vocab_size=VOCABULARY, max_model_len=LENGTH, rows=ROWS, eos=EOS))


def transformers(folder: Path, *, blocks: int = 256) -> Engine:
    kept = blocks * BLOCK * TOKEN_BYTES
    sizes = {"max_model_len": LENGTH, "rows": ROWS, "budget": 16, "block": BLOCK, "kv_bytes": kept}
    return TransformersEngine(TransformersSettings(str(folder), device="cpu", dtype="float32", **sizes))


def short_of_memory(folder: Path) -> Engine:
    """Rows have to give way to each other: there is room for one of full length, and a little."""
    return transformers(folder, blocks=10)


class Lasting:
    """An engine that outlives its workers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """It runs."""

    async def stop(self) -> None:
        """It runs on."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine, and the event loop that it lives on."""

    engine: Engine
    loop: asyncio.Runner


@pytest.fixture(scope="module", params=[null, transformers, short_of_memory])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    make: Callable[[Path], Engine] = request.param
    engine = make(saved(tmp_path_factory.mktemp("model"), SERVED["llama"]()))
    with asyncio.Runner() as loop:
        loop.run(engine.start())
        yield Stage(cast("Engine", Lasting(engine)), loop)
        loop.run(engine.stop())


@dataclass(frozen=True, slots=True)
class Log:
    """What a run's log holds: the JSON of its chunks, and of its end."""

    chunks: tuple[bytes, ...]
    end: bytes

    def by_choice(self) -> dict[int, list[object]]:
        """The chunks of each choice. How those of several lie between each other says when steps were made."""
        found: dict[int, list[object]] = {}
        for chunk in self.chunks:
            found.setdefault(_chunk(chunk).choices[0].index, []).append(json.loads(chunk))
        return found


async def generated(engine: Engine, wanted: dict[str, Any], lost_after: Sequence[bytes] | None = None) -> Log:
    """What is in the log once a worker has ended the run; ``lost_after`` is what one that is gone wrote before."""
    engine.check(GenerateRequest.model_validate(wanted))
    home = Embedded()
    await home.broker.queues.declare([QUEUE])
    job = GenerateJob(client=CLIENT, request_id="r1", model="demo", delivery="tokens", request=raw(wanted))
    job = jobs.stamp(job, time.time())
    if lost_after is not None:
        await write(home, job, lost_after)
    async with working([GenerateWorker(home.broker, demo_spec(), engine=engine, terms=Terms(heartbeat=60))]):
        await home.broker.queues.publish(QUEUE, Message(jobs.encode(job), "r1"))
        log = await read(home, job.run)
    assert await home.broker.queues.depth(QUEUE) == 0
    home.close()
    return log


async def write(home: Embedded, job: GenerateJob, chunks: Sequence[bytes]) -> None:
    """The log as a worker leaves it that is lost after so many chunks."""
    request = ClaimRequest(job.run, "generate", "lost", jobs.digest_of(job), job.deadline or 0.0, 60, heartbeat=60)
    claim = await home.broker.runs.claim(request)
    assert claim.answer is ClaimAnswer.NEW
    follower = Follower()
    writing = Writing(job.run, after=Position(claim.epoch, 0), chunks=0, running=follower.running)
    writing.add([_chunk(chunk) for chunk in chunks])
    if chunks:
        assert [each.answer for each in await home.broker.log.append([writing.batch()])] == [Append.STORED]
    home.shelf.lapse("lost")


async def read(home: Embedded, run: str) -> Log:
    """The whole log, up to its end."""
    follower, chunks = Follower(), list[bytes]()
    async with asyncio.timeout(WAIT_S):
        while True:
            for entry in (await home.broker.log.read({run: follower.position}, wait=1.0)).get(run, ()):
                if follower.follow(entry) is not None:
                    chunks.append(entry.payload)
                elif entry.kind == "end":
                    return Log(tuple(chunks), entry.payload)


HOW = st.fixed_dictionaries({"temperature": st.just(0.0), "n": st.just(1)}) | st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.7, 1.0]), "n": st.integers(1, 3)}
)
"""Greedily, or by chance."""
REST = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14) | st.none()},
    optional={
        "seed": st.integers(0, 2**31),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(3, VOCABULARY - 1), max_size=24, unique=True),
        "top_k": st.integers(1, 40),
        "top_p": st.floats(0.3, 1.0),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
    },
)
REQUESTS = st.fixed_dictionaries(
    {"token_ids": st.just(PROMPT), "sampling_params": st.builds(operator.or_, HOW, REST)},
    optional={
        "return_token_ids": st.booleans(),
        "stream_options": st.just({"continuous_usage_stats": True}),
    },
)
CUTS = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=2)
"""After which share of the chunks a worker is lost, one after the other."""


@given(REQUESTS, CUTS)
@settings(max_examples=60)
def test_a_run_that_is_cut_anywhere_goes_on_to_the_same_chunks_and_the_same_end(
    stage: Stage, wanted: dict[str, Any], cuts: list[float]
) -> None:
    whole = stage.loop.run(generated(stage.engine, wanted))
    log = whole
    for cut in cuts:
        kept = log.chunks[: round(cut * len(log.chunks))]
        log = stage.loop.run(generated(stage.engine, wanted, kept))
        assert log.chunks[: len(kept)] == kept
        assert log.by_choice() == whole.by_choice()
        assert log.end == whole.end


@pytest.mark.parametrize("stage", [short_of_memory], indirect=True)
def test_a_run_is_cut_and_pushed_out_and_goes_on_all_the_same(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place there is, with rows that give way to each other before and after it."""
    preempt, pushed = Scheduler._preempt, 0

    def counted(self: Scheduler, row: Any) -> None:
        nonlocal pushed
        pushed += 1
        preempt(self, row)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    params = {"n": 3, "temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    wanted = {"token_ids": PROMPT, "sampling_params": params}
    whole = stage.loop.run(generated(stage.engine, wanted))
    assert pushed
    for cut in range(len(whole.chunks) + 1):
        log = stage.loop.run(generated(stage.engine, wanted, whole.chunks[:cut]))
        assert log.by_choice() == whole.by_choice()
        assert log.end == whole.end
