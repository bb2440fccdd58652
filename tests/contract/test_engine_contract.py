"""What every engine promises the generate worker, in the words of the Engine port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.protocol import GenerateRequest
from headrace.protocol.errors import BadRequest
from headrace.protocol.wire import TokenChoice, TokenChunk
from headrace.workers.generate.checks import UNSERVED
from headrace.workers.generate.engine import Admission, ChoiceSoFar, End, Engine, Output
from headrace.workers.generate.engines.loop import TransformersSettings
from headrace.workers.generate.engines.null import NullEngine, NullSettings
from headrace.workers.generate.engines.transformers import TransformersEngine
from tests.tiny_models import EOS, MODEL_LEN, SERVED, VOCABULARY, saved

ROWS = 4
WAIT_S = 20.0
PROMPT = [5, 6, 7, 8, 9]


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine, and the sampling parameters under which its rows reach the end of sequence after a few tokens."""

    make: Callable[[], Engine]
    ends_early: dict[str, Any] = field(default_factory=dict)


def null(_: Path) -> Kind:
    settings = NullSettings(vocab_size=VOCABULARY, max_model_len=MODEL_LEN, rows=ROWS, eos=EOS, script=(9, 8, 7, 6))
    return Kind(lambda: NullEngine(settings))


def transformers(folder: Path) -> Kind:
    saved(folder, SERVED["llama"]())
    settings = TransformersSettings(str(folder), device="cpu", dtype="float32", rows=ROWS, budget=16, block=4)
    return Kind(lambda: TransformersEngine(settings), {"logit_bias": {str(EOS): 100.0}, "min_tokens": 5})


@pytest.fixture(scope="module", params=[null, transformers], ids=["null", "transformers"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    made: Kind = request.param(tmp_path_factory.mktemp("model"))
    return made


@pytest.fixture
async def engine(kind: Kind) -> AsyncIterator[Engine]:
    engine = kind.make()
    await engine.start()
    yield engine
    await engine.stop()


def asked(
    *, prompt: Sequence[int] = PROMPT, request_id: str = "request", fields: dict[str, Any] | None = None, **params: Any
) -> GenerateRequest:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True, **params}
    body = {"request_id": request_id, "token_ids": list(prompt), "sampling_params": params, **(fields or {})}
    return GenerateRequest.model_validate(body)


@dataclass
class Told:
    """What an engine said, by run."""

    engine: Engine
    chunks: dict[str, list[TokenChunk]] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)

    def admit(self, run: str, request: GenerateRequest, resume: Sequence[ChoiceSoFar] = ()) -> None:
        self.engine.check(request)
        self.engine.admit(Admission(run, request, tuple(resume)))

    def hear(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            assert output.run not in self.ends, "nothing follows the end of a run"
            self.chunks.setdefault(output.run, []).extend(output.chunks)
            if output.end is not None:
                self.ends[output.run] = output.end

    async def step(self) -> None:
        self.hear(await asyncio.wait_for(self.engine.step(), WAIT_S))

    async def until_ended(self, *runs: str) -> None:
        for _ in range(1000):
            if self.ends.keys() >= {*runs}:
                return
            await self.step()
        raise AssertionError("the runs do not end")

    async def whole(self, run: str, request: GenerateRequest, resume: Sequence[ChoiceSoFar] = ()) -> list[TokenChoice]:
        """All that a run says from its admission to its end."""
        self.admit(run, request, resume)
        await self.until_ended(run)
        return self.choices(run)

    def choices(self, run: str) -> list[TokenChoice]:
        return [chunk.choices[0] for chunk in self.chunks.get(run, [])]


def tokens(choices: Sequence[TokenChoice], index: int = 0) -> list[int]:
    return [token for choice in choices if choice.index == index for token in choice.token_ids or ()]


def last(choices: Sequence[TokenChoice], index: int = 0) -> TokenChoice:
    return [choice for choice in choices if choice.index == index][-1]


@pytest.fixture
def told(engine: Engine) -> Told:
    return Told(engine)


# ------------------------------------------------------------------------------------------------ what a run says


async def test_a_run_says_one_choice_a_chunk_under_its_request_id_and_ends_with_its_usage(told: Told) -> None:
    await told.whole("run", asked(request_id="theirs", n=2))
    chunks, usage = told.chunks["run"], told.ends["run"].usage
    assert {chunk.request_id for chunk in chunks} == {"theirs"}
    assert [len(chunk.choices) for chunk in chunks] == [1] * 16
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 16, 21)
    assert usage.prompt_tokens_details is None
    assert told.ends["run"].error is None


async def test_a_row_that_reaches_max_tokens_says_length(told: Told) -> None:
    choices = await told.whole("run", asked(max_tokens=3))
    assert len(tokens(choices)) == 3
    assert [choice.finish_reason for choice in choices] == [None, None, "length"]


async def test_without_max_tokens_a_row_goes_on_to_the_length_of_the_model(told: Told) -> None:
    prompt = [7] * (MODEL_LEN - 6)
    choices = await told.whole("run", asked(prompt=prompt, max_tokens=None))
    assert len(tokens(choices)) == 6
    assert last(choices).finish_reason == "length"


async def test_the_end_of_sequence_ends_a_row_and_is_its_last_token(told: Told, kind: Kind) -> None:
    choices = await told.whole("run", asked(ignore_eos=False, **kind.ends_early))
    assert tokens(choices)[-1] == EOS
    assert len(tokens(choices)) < 8
    assert (last(choices).finish_reason, last(choices).stop_reason) == ("stop", None)


async def test_ignore_eos_goes_on_past_the_end_of_sequence(told: Told, kind: Kind) -> None:
    choices = await told.whole("run", asked(ignore_eos=True, **kind.ends_early))
    assert EOS in tokens(choices)
    assert len(tokens(choices)) == 8


async def test_a_stop_token_ends_a_row_is_its_last_token_and_its_stop_reason(told: Told) -> None:
    undisturbed = tokens(await told.whole("first", asked()))
    stop = undisturbed[3]
    choices = await told.whole("second", asked(stop_token_ids=[stop, 126]))
    assert tokens(choices) == undisturbed[: undisturbed.index(stop) + 1]
    assert (last(choices).finish_reason, last(choices).stop_reason) == ("stop", stop)


async def test_nothing_stops_a_row_before_min_tokens(told: Told, kind: Kind) -> None:
    choices = await told.whole("run", asked(ignore_eos=False, **{**kind.ends_early, "min_tokens": 7}))
    assert len(tokens(choices)) >= 7


async def test_every_choice_makes_its_own_tokens_and_says_its_own_finish(told: Told) -> None:
    choices = await told.whole("run", asked(n=6))
    assert [len(tokens(choices, index)) for index in range(6)] == [8] * 6
    assert [last(choices, index).finish_reason for index in range(6)] == ["length"] * 6


async def test_prompt_ids_come_with_the_first_chunk_if_asked_for(told: Told) -> None:
    await told.whole("asked", asked(n=2, fields={"return_token_ids": True}))
    await told.whole("not asked", asked())
    first, *others = told.chunks["asked"]
    assert first.prompt_token_ids == PROMPT
    assert {chunk.prompt_token_ids is None for chunk in others + told.chunks["not asked"]} == {True}


async def test_usage_comes_with_every_chunk_if_asked_for(told: Told) -> None:
    fields = {"stream_options": {"continuous_usage_stats": True}}
    await told.whole("asked", asked(n=2, fields=fields, max_tokens=3))
    await told.whole("not asked", asked())
    counts: dict[int, list[tuple[int, int | None]]] = {0: [], 1: []}
    for chunk in told.chunks["asked"]:
        assert chunk.usage is not None
        counts[chunk.choices[0].index].append((chunk.usage.prompt_tokens, chunk.usage.completion_tokens))
    assert counts == {0: [(5, 1), (5, 2), (5, 3)], 1: [(5, 1), (5, 2), (5, 3)]}
    assert {chunk.usage for chunk in told.chunks["not asked"]} == {None}


# ------------------------------------------------------------------------------------------------ resuming


async def test_a_run_resumed_at_any_position_goes_on_as_it_would_have(told: Told) -> None:
    request = asked(n=2)
    undisturbed = await told.whole("run", request)
    whole = {index: tokens(undisturbed, index) for index in (0, 1)}
    for position in range(8):
        resume = [ChoiceSoFar(0, tuple(whole[0][:position])), ChoiceSoFar(1, tuple(whole[1][: position // 2]))]
        again = Told(told.engine)
        rest = await again.whole("run", request, resume)
        assert [*resume[0].token_ids, *tokens(rest, 0)] == whole[0]
        assert [*resume[1].token_ids, *tokens(rest, 1)] == whole[1]
        assert again.ends["run"].usage == told.ends["run"].usage


async def test_without_a_seed_a_resumed_run_still_goes_on_as_it_would_have(told: Told) -> None:
    request = asked(seed=None)
    whole = tokens(await told.whole("run", request))
    rest = await Told(told.engine).whole("run", request, [ChoiceSoFar(0, tuple(whole[:3]))])
    assert whole[:3] + tokens(rest) == whole


async def test_a_choice_that_was_finished_stays_finished(told: Told) -> None:
    request = asked(n=2)
    whole = await told.whole("run", request)
    done = ChoiceSoFar(0, tuple(tokens(whole, 0)), "length")
    rest = await Told(told.engine).whole("run", request, [done])
    assert {choice.index for choice in rest} == {1}
    assert tokens(rest, 1) == tokens(whole, 1)


async def test_a_run_whose_choices_were_all_finished_says_only_its_end(told: Told) -> None:
    done = [ChoiceSoFar(0, (9, 9, 9), "stop"), ChoiceSoFar(1, (9,), "stop")]
    assert await told.whole("run", asked(n=2), done) == []
    usage = told.ends["run"].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 4)


async def test_a_choice_that_was_at_its_end_without_saying_so_says_it_and_makes_no_more(told: Told) -> None:
    choices = await told.whole("run", asked(max_tokens=3), [ChoiceSoFar(0, (9, 9, 9))])
    assert [(choice.token_ids, choice.finish_reason) for choice in choices] == [([], "length")]


async def test_prompt_ids_are_not_told_again_by_a_resumed_run(told: Told) -> None:
    await told.whole("run", asked(fields={"return_token_ids": True}), [ChoiceSoFar(0, (9,))])
    assert {chunk.prompt_token_ids is None for chunk in told.chunks["run"]} == {True}


# ------------------------------------------------------------------------------------------------ many runs


async def test_more_runs_than_rows_all_end(told: Told) -> None:
    runs = [f"run {i}" for i in range(3 * ROWS)]
    for run in runs:
        told.admit(run, asked())
    await told.until_ended(*runs)
    assert told.engine.capacity().free_rows == ROWS


async def test_a_lower_priority_number_is_served_earlier(told: Told) -> None:
    for run in range(2 * ROWS):
        told.admit(f"late {run}", asked())
    told.admit("soon", asked(fields={"priority": -1}))
    await told.until_ended("soon")
    assert not {f"late {run}" for run in range(ROWS, 2 * ROWS)} & told.ends.keys()


async def test_a_run_among_others_makes_the_tokens_it_makes_alone(told: Told) -> None:
    alone = tokens(await told.whole("alone", asked()))
    for run in range(5):
        told.admit(f"other {run}", asked(prompt=[run + 3] * (3 * run + 1), seed=run))
    assert tokens(await told.whole("among", asked())) == alone


async def test_an_admitted_run_is_not_admitted_again_until_it_is_over(told: Told) -> None:
    told.admit("run", asked())
    with pytest.raises(ValueError, match="run was admitted already"):
        told.engine.admit(Admission("run", asked()))
    await told.until_ended("run")
    again = Told(told.engine)
    await again.whole("run", asked())


# ------------------------------------------------------------------------------------------------ cancelling, waiting


async def test_a_cancelled_run_frees_its_rows_and_tokens_and_is_not_heard_of_again(told: Told) -> None:
    free = told.engine.capacity()
    told.admit("cancelled", asked(n=2))
    told.admit("other", asked())
    await told.step()
    heard = len(told.chunks.get("cancelled", ()))
    told.engine.cancel("cancelled")
    assert told.engine.capacity().free_rows == ROWS - 1
    await told.until_ended("other")
    assert len(told.chunks.get("cancelled", ())) == heard
    assert "cancelled" not in told.ends
    assert told.engine.capacity() == free


async def test_a_run_cancelled_before_it_began_says_nothing(told: Told) -> None:
    told.admit("cancelled", asked())
    told.engine.cancel("cancelled")
    told.admit("other", asked())
    await told.until_ended("other")
    assert told.chunks.keys() == {"other"}


async def test_a_cancelled_run_may_be_admitted_again_at_once(told: Told) -> None:
    whole = tokens(await told.whole("run", asked()))
    told.engine.admit(Admission("again", asked()))
    await told.step()
    told.engine.cancel("again")
    assert tokens(await Told(told.engine).whole("again", asked())) == whole


async def test_cancelling_an_unknown_run_is_fine(told: Told) -> None:
    told.engine.cancel("nobody")
    assert tokens(await told.whole("run", asked()))


async def test_a_step_waits_until_there_is_work(told: Told) -> None:
    step = asyncio.ensure_future(told.engine.step())
    await asyncio.sleep(0)
    assert not step.done()
    told.admit("run", asked())
    told.hear(await asyncio.wait_for(step, WAIT_S))
    assert tokens(told.choices("run"))


async def test_a_step_that_nobody_waited_for_loses_nothing(told: Told) -> None:
    whole = tokens(await told.whole("undisturbed", asked()))
    told.admit("run", asked())
    for turns in range(4):
        step = asyncio.ensure_future(told.engine.step())
        for _ in range(turns):
            await asyncio.sleep(0)
        if step.done():
            told.hear(await step)
        else:
            step.cancel()
            await asyncio.wait([step])
    await told.until_ended("run")
    assert tokens(told.choices("run")) == whole


async def test_a_stopped_engine_has_forgotten_its_runs(kind: Kind) -> None:
    engine = kind.make()
    await engine.start()
    engine.admit(Admission("run", asked()))
    await engine.step()
    await engine.stop()
    step = asyncio.ensure_future(engine.step())
    await asyncio.sleep(0)
    assert not step.done()
    step.cancel()


async def test_an_exact_engine_says_so(engine: Engine) -> None:
    assert engine.resume == "exact"


# ------------------------------------------------------------------------------------------------ refusing


ASKS: dict[str, Any] = {
    "features": {"mm_hashes": {}, "mm_placeholders": {}},
    "content_parts": [{"type": "image_url"}],
    "kv_transfer_params": {},
    "ec_transfer_params": {},
    "sampling_params.stop": ["."],
    "sampling_params.bad_words": ["no"],
    "sampling_params.structured_outputs": {"regex": "a*"},
    "sampling_params.prompt_logprobs": 0,
    "sampling_params.prompt_logprob_token_ids": [[1]],
    "sampling_params.prompt_logprob_start": 0,
    "sampling_params.logprob_token_ids": [1],
    "sampling_params.truncate_prompt_tokens": 3,
    "sampling_params.stream_interval": 2,
    "sampling_params.watermarking": True,
    "sampling_params.extra_args": {"mirostat": 1},
    "sampling_params.thinking_token_budget": 5,
    "sampling_params.repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2},
    "sampling_params.routed_experts_prompt_start": 1,
    "sampling_params.trace_decode_token_ids": [1],
}


def test_each_field_that_no_engine_serves_is_tried() -> None:
    assert ASKS.keys() == UNSERVED.keys()


@pytest.mark.parametrize("path", ASKS)
def test_what_is_not_served_is_refused_by_name(engine: Engine, path: str) -> None:
    *_, name = path.split(".")
    given = {name: ASKS[path]}
    request = asked(**given) if path.startswith("sampling_params.") else asked(fields=given)
    with pytest.raises(BadRequest, match=rf"^{path} is not served by the \w+ engine\.$") as refused:
        engine.check(request)
    assert refused.value.param == path


OUT_OF_BOUNDS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"prompt": [5, 6, VOCABULARY]},
        "token_ids.2",
        "token_ids.2: 128 is outside the vocabulary of 128.",
    ),
    (
        {"stop_token_ids": [3, 500]},
        "sampling_params.stop_token_ids.1",
        "sampling_params.stop_token_ids.1: 500 is outside the vocabulary of 128.",
    ),
    (
        {"logit_bias": {"500": 1.0}},
        "sampling_params.logit_bias.500",
        "sampling_params.logit_bias.500: 500 is outside the vocabulary of 128.",
    ),
    (
        {"prompt": [5] * MODEL_LEN},
        "token_ids",
        "token_ids must leave room for output in the model's length of 256 tokens, got 256.",
    ),
    (
        {"max_tokens": MODEL_LEN - 4},
        "sampling_params.max_tokens",
        "sampling_params.max_tokens must be at most 251 after a prompt of 5 tokens, since the model's length is 256, "
        "got 252.",
    ),
    (
        {"max_tokens": None, "min_tokens": MODEL_LEN - 4},
        "sampling_params.min_tokens",
        "sampling_params.min_tokens must be at most 251 after a prompt of 5 tokens, since the model's length is 256, "
        "got 252.",
    ),
    (
        {"n": 129},
        "sampling_params.n",
        "sampling_params.n must be at most 128, got 129.",
    ),
    (
        {"mirostat": 2},
        "sampling_params.mirostat",
        "sampling_params.mirostat is not known to the {engine} engine.",
    ),
]


@pytest.mark.parametrize(("given", "param", "message"), OUT_OF_BOUNDS, ids=[param for _, param, _ in OUT_OF_BOUNDS])
def test_what_is_out_of_bounds_is_refused_with_its_name_and_bound(
    engine: Engine, given: dict[str, Any], param: str, message: str
) -> None:
    name = "null" if isinstance(engine, NullEngine) else "transformers"
    with pytest.raises(BadRequest) as refused:
        engine.check(asked(**given))
    assert refused.value.param == param
    assert refused.value.message == message.format(engine=name)


def test_what_a_render_worker_or_an_older_client_adds_without_asking_for_anything_is_fine(engine: Engine) -> None:
    engine.check(
        asked(
            stop=[],
            bad_words=[],
            skip_clone=True,
            output_kind=2,
            skip_special_tokens=False,
            skip_reading_prefix_cache=False,
            stream_interval=1,
            mirostat=None,
            fields={"stream": True, "cache_salt": "s", "priority": 3, "token_offsets": None, "reasoning_ended": True},
        )
    )
