"""The null engine: scripts, rates by a clock of the test's own, and no model library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.protocol import GenerateRequest
from headrace.protocol.errors import BadRequest
from headrace.workers.generate.engine import Admission
from headrace.workers.generate.engines import build
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.models import ModelSpec

ROOT = Path(__file__).resolve().parents[2]


def asked(**params: Any) -> GenerateRequest:
    return GenerateRequest.model_validate({"token_ids": [5, 6], "sampling_params": {"max_tokens": 6, **params}})


async def tokens(engine: NullEngine, run: str, request: GenerateRequest) -> list[int]:
    engine.admit(Admission(run, request))
    made: list[int] = []
    while True:
        for output in await engine.step():
            made += [token for chunk in output.chunks for token in chunk.choices[0].token_ids or ()]
            if output.end is not None:
                return made


async def test_a_script_is_followed_by_the_end_of_sequence() -> None:
    engine = NullEngine(NullSettings(script=(9, 8, 7), eos=4))
    assert await tokens(engine, "run", asked()) == [9, 8, 7, 4]


async def test_a_script_goes_on_as_long_as_min_tokens_asks() -> None:
    engine = NullEngine(NullSettings(script=(9,), eos=4))
    made = await tokens(engine, "run", asked(min_tokens=4))
    assert made[0] == 9
    assert made[3:] == [4]
    assert 4 not in made[:3]


async def test_without_a_script_ids_follow_from_seed_and_choice_and_never_end_a_row() -> None:
    settings = NullSettings(vocab_size=8, eos=3)
    one = await tokens(NullEngine(settings), "run", asked(seed=1, max_tokens=300))
    same = await tokens(NullEngine(settings), "another run", asked(seed=1, max_tokens=300))
    other = await tokens(NullEngine(settings), "run", asked(seed=2, max_tokens=300))
    assert one == same != other
    assert set(one) == {0, 1, 2, 4, 5, 6, 7}


class Clock:
    """Time passes only in sleep, and, once, by as much as a test says."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.at += seconds


async def test_each_row_makes_tokens_at_the_set_rate() -> None:
    clock = Clock()
    engine = NullEngine(NullSettings(tokens_per_second=4.0), clock=clock, sleep=clock.sleep)
    engine.admit(Admission("beside", asked()))
    await tokens(engine, "run", asked(max_tokens=6))
    assert clock.slept == [0.25] * 5


async def test_a_rate_is_not_made_up_for_after_idle_time() -> None:
    clock = Clock()
    engine = NullEngine(NullSettings(tokens_per_second=4.0), clock=clock, sleep=clock.sleep)
    await tokens(engine, "run", asked(max_tokens=2))
    clock.at += 60
    clock.slept.clear()
    await tokens(engine, "later", asked(max_tokens=3))
    assert clock.slept == [0.25] * 2


@pytest.mark.parametrize(("name", "value"), [("logprobs", 0), ("allowed_token_ids", [3])])
def test_what_needs_a_model_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match=rf"^sampling_params\.{name} is not served by the null engine\.$"):
        NullEngine().check(asked(**{name: value}))


def test_it_stands_in_for_a_model_with_its_vocabulary_end_and_length() -> None:
    engine = build(ModelSpec.of("demo", engine="null", max_rows=3))
    assert isinstance(engine, NullEngine)
    assert (engine.capacity().rows, engine.capacity().max_model_len) == (3, 2048)
    with pytest.raises(BadRequest, match="outside the vocabulary of 1024"):
        engine.check(GenerateRequest.model_validate({"token_ids": [1024], "sampling_params": {}}))


def test_it_starts_without_a_model_library() -> None:
    script = (
        "import sys; from headrace.workers.models import ModelSpec;"
        "from headrace.workers.generate.engines import build;"
        "build(ModelSpec.of('demo', engine='null'));"
        "print(*[name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
