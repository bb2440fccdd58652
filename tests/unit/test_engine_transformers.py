"""The embedded engine around its loop: bad rows, steps under way, and a pass that fails."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.protocol import GenerateRequest
from headrace.protocol.errors import BadRequest, InternalError
from headrace.workers.generate.engine import Admission, EngineDead, ModelRefused, Output
from headrace.workers.generate.engines import build
from headrace.workers.generate.engines.loop import TransformersSettings
from headrace.workers.generate.engines.transformers import TransformersEngine
from headrace.workers.models import ModelSpec
from tests.tiny_models import SERVED, saved

WAIT_S = 20.0
POISON = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), SERVED["llama"]())


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    """Blocks for two rows of full length, so that they are soon used again."""
    settings = TransformersSettings(
        str(folder), device="cpu", dtype="float32", rows=4, budget=8, block=4, kv_bytes=384 * 512, max_logprobs=4
    )
    engine = TransformersEngine(settings)
    await engine.start()
    yield engine
    await engine.stop()


def asked(prompt: list[int], **params: Any) -> GenerateRequest:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 6, "ignore_eos": True, **params}
    return GenerateRequest.model_validate({"token_ids": prompt, "sampling_params": params})


async def outputs(engine: TransformersEngine, runs: int) -> dict[str, list[Output]]:
    """Everything that is said until so many runs have ended."""
    told: dict[str, list[Output]] = {}
    while sum(output.end is not None for said in told.values() for output in said) < runs:
        for output in await asyncio.wait_for(engine.step(), WAIT_S):
            told.setdefault(output.run, []).append(output)
    return told


def tokens(said: list[Output]) -> list[int]:
    return [t for output in said for chunk in output.chunks for c in chunk.choices for t in c.token_ids or ()]


# ------------------------------------------------------------------------------------------------ bad rows


def poison(engine: TransformersEngine) -> None:
    """A prompt with this token gives logits that are not numbers."""
    with torch.no_grad():
        engine.loop._loaded.model.get_parameter("model.embed_tokens.weight")[POISON] = math.nan


async def test_a_row_with_logits_that_are_not_numbers_fails_alone(engine: TransformersEngine) -> None:
    engine.admit(Admission("alone", asked([5, 6, 7])))
    alone = tokens((await outputs(engine, 1))["alone"])
    poison(engine)
    engine.admit(Admission("good", asked([5, 6, 7])))
    engine.admit(Admission("bad", asked([5, POISON, 7], n=3)))
    told = await outputs(engine, 2)
    end = told["bad"][-1].end
    assert end is not None
    assert isinstance(end.error, InternalError)
    assert end.error.message == "no token can be sampled at output position 0"
    assert tokens(told["bad"]) == []
    assert tokens(told["good"]) == alone
    assert engine.capacity().free_tokens == engine.capacity().tokens


async def test_what_is_not_a_number_does_not_stay_in_the_blocks(engine: TransformersEngine) -> None:
    prompts = [[n + 3] * (3 + 5 * n) for n in range(12)]
    for n, prompt in enumerate(prompts):
        engine.admit(Admission(f"before {n}", asked(prompt)))
    before = await outputs(engine, 12)
    poison(engine)
    for n in range(8):
        engine.admit(Admission(f"bad {n}", asked([POISON] * 12)))
    await engine.step()
    for n in range(8):
        engine.cancel(f"bad {n}")
    for n, prompt in enumerate(prompts):
        engine.admit(Admission(f"after {n}", asked(prompt)))
    after = await outputs(engine, 12)
    assert [tokens(after[f"after {n}"]) for n in range(12)] == [tokens(before[f"before {n}"]) for n in range(12)]


async def test_parameters_that_leave_no_token_end_their_run_only(engine: TransformersEngine) -> None:
    engine.admit(Admission("none left", asked([5], allowed_token_ids=[9], stop_token_ids=[9], min_tokens=2)))
    engine.admit(Admission("good", asked([5])))
    told = await outputs(engine, 2)
    ends = {run: said[-1].end for run, said in told.items()}
    assert ends["none left"] is not None
    assert ends["none left"].error is not None
    assert ends["good"] is not None
    assert ends["good"].error is None


@pytest.mark.parametrize("count", [-1, 5])
async def test_logprobs_have_their_bound(engine: TransformersEngine, count: int) -> None:
    with pytest.raises(BadRequest, match=rf"^sampling_params\.logprobs must be from 0 to 4, got {count}\.$"):
        engine.check(asked([5], logprobs=count))


# ------------------------------------------------------------------------------------------------ while a step runs


class Gate:
    """Holds the engine's thread inside a step until it is opened."""

    def __init__(self, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._step = engine.loop.step
        self._inside, self._open = threading.Event(), threading.Event()
        monkeypatch.setattr(engine.loop, "step", self._held)

    def _held(self) -> None:
        self._inside.set()
        assert self._open.wait(WAIT_S)
        self._step()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._inside.wait, WAIT_S)

    def open(self) -> None:
        self._open.set()


async def test_a_run_cancelled_while_a_step_is_under_way_says_nothing_of_it(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.admit(Admission("cancelled", asked([5, 6])))
    engine.admit(Admission("other", asked([5, 6])))
    gate = Gate(engine, monkeypatch)
    step = asyncio.ensure_future(engine.step())
    await gate.reached()
    engine.cancel("cancelled")
    gate.open()
    assert [output.run for output in await asyncio.wait_for(step, WAIT_S)] == ["other"]
    assert engine.capacity().free_rows == 3


async def test_a_run_admitted_while_a_step_is_under_way_joins_the_next(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.admit(Admission("first", asked([5, 6])))
    gate = Gate(engine, monkeypatch)
    step = asyncio.ensure_future(engine.step())
    await gate.reached()
    engine.admit(Admission("second", asked([5, 6])))
    gate.open()
    assert [output.run for output in await asyncio.wait_for(step, WAIT_S)] == ["first"]
    assert {output.run for output in await asyncio.wait_for(engine.step(), WAIT_S)} == {"first", "second"}


async def test_a_step_whose_waiter_was_cancelled_is_told_by_the_next_call(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.admit(Admission("run", asked([5, 6])))
    gate = Gate(engine, monkeypatch)
    step = asyncio.ensure_future(engine.step())
    await gate.reached()
    step.cancel()
    await asyncio.wait([step])
    gate.open()
    (output,) = await asyncio.wait_for(engine.step(), WAIT_S)
    assert len(tokens([output])) == 1


async def test_stopping_waits_for_the_step_that_is_under_way(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.admit(Admission("run", asked([5, 6])))
    gate = Gate(engine, monkeypatch)
    step = asyncio.ensure_future(engine.step())
    await gate.reached()
    step.cancel()
    stop = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)
    assert not stop.done()
    gate.open()
    await asyncio.wait_for(stop, WAIT_S)


# ------------------------------------------------------------------------------------------------ failing as a whole


async def test_a_pass_that_fails_as_a_whole_is_the_end_of_the_engine(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise torch.OutOfMemoryError("no room for 3 GiB")

    engine.admit(Admission("run", asked([5, 6])))
    monkeypatch.setattr(engine.loop, "step", broken)
    with pytest.raises(EngineDead, match="a step failed: OutOfMemoryError: no room for 3 GiB"):
        await asyncio.wait_for(engine.step(), WAIT_S)


async def test_a_model_that_cannot_be_served_is_told_by_start(tmp_path: Path) -> None:
    engine = build(ModelSpec(name="empty", path=tmp_path))
    with pytest.raises(ModelRefused, match="has no weights"):
        await engine.start()
    await engine.stop()


@pytest.mark.parametrize(("given", "found"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_waiting_threads_do_not_spin_unless_the_user_says_so(given: dict[str, str], found: str) -> None:
    script = (
        "import os, sys; from headrace.workers.models import ModelSpec;"
        "from headrace.workers.generate.engines import build;"
        "assert 'torch' not in sys.modules;"
        "build(ModelSpec.of('demo'));"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [found]
