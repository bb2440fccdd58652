"""The paged loop computes what transformers does: the same tokens, the same logprobs, alone and in any batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from headrace import demo_model
from headrace.protocol import GenerateRequest
from headrace.protocol.wire import TokenChunk, TokenLogprobEntry
from headrace.workers.generate.engine import Admission, ChoiceSoFar
from headrace.workers.generate.engines.loop import PagedLoop, TransformersSettings
from tests.tiny_models import EOS, SERVED, saved

OUTPUT = 24
TEMPERED = {"temperature": 1.0, "seed": 11, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2}


@dataclass
class Served:
    """A model in our loop, and the same model as transformers runs it."""

    loop: PagedLoop
    plain: Any
    names: Iterator[int]

    def run(self, *requests: GenerateRequest, resume: Sequence[ChoiceSoFar] = ()) -> list[list[TokenChunk]]:
        """All the requests at once; the chunks of each."""
        names = [str(next(self.names)) for _ in requests]
        for name, request in zip(names, requests, strict=True):
            self.loop.limits.check(request)
            self.loop.runs.open(Admission(name, request, tuple(resume)))
        told = self.drain()
        return [told[name] for name in names]

    def drain(self) -> dict[str, list[TokenChunk]]:
        told: dict[str, list[TokenChunk]] = {}
        while self.loop.runs.busy:
            self.loop.step()
            for output in self.loop.runs.collect():
                told.setdefault(output.run, []).extend(output.chunks)
                assert output.end is None or output.end.error is None
        return told

    def generated(self, prompt: list[int]) -> list[int]:
        """What transformers' own greedy generate makes, up to the end of sequence."""
        settings = {"max_new_tokens": OUTPUT, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        config = GenerationConfig.from_dict(settings)
        made = self.plain.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return [int(token) for token in made[0, len(prompt) :]]


def request(prompt: list[int], **params: Any) -> GenerateRequest:
    params = {"temperature": 0, "max_tokens": OUTPUT, "ignore_eos": True, **params}
    return GenerateRequest.model_validate({"token_ids": prompt, "sampling_params": params})


def tokens(chunks: Sequence[TokenChunk], choice: int = 0) -> list[int]:
    return [token for chunk in chunks for c in chunk.choices if c.index == choice for token in c.token_ids or ()]


def served(folder: Path) -> Served:
    """Blocks and budget are small, so that prompts come in chunks and rows cross blocks."""
    settings = TransformersSettings(str(folder), dtype="float32", device="cpu", rows=20, budget=40, block=4)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Served(PagedLoop(settings), plain, count())


@pytest.fixture(scope="module", params=[*SERVED, "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    if request.param == "demo":
        return served(demo_model.PATH)
    return served(saved(tmp_path_factory.mktemp(request.param), SERVED[request.param]()))


def prompts(vocabulary: int, number: int = 16, seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(3, vocabulary) for _ in range(random.randrange(2, 70))] for _ in range(number)]


def test_greedy_output_equals_that_of_transformers_alone_and_in_a_changing_batch(model: Served) -> None:
    asked = prompts(model.loop.limits.vocab_size)
    expected = [model.generated(prompt) for prompt in asked]
    assert len({tuple(made) for made in expected}) > 8, "the model must not say the same to everything"

    alone = [tokens(model.run(request(prompt, ignore_eos=False))[0]) for prompt in asked[:4]]
    assert alone == expected[:4]

    told: dict[str, list[TokenChunk]] = {}
    for i, prompt in enumerate(asked):
        model.loop.runs.open(Admission(f"joins at {i}", request(prompt, ignore_eos=False)))
        if i % 3 == 2:
            model.loop.step()
            for output in model.loop.runs.collect():
                told.setdefault(output.run, []).extend(output.chunks)
    for run, chunks in model.drain().items():
        told.setdefault(run, []).extend(chunks)
    assert [tokens(told[f"joins at {i}"]) for i in range(len(asked))] == expected


def test_logprobs_are_those_of_a_plain_forward_pass(model: Served) -> None:
    asked = prompts(model.loop.limits.vocab_size, number=5)
    for prompt, chunks in zip(asked, model.run(*(request(p, logprobs=3) for p in asked)), strict=True):
        made = tokens(chunks)
        with torch.inference_mode():
            logits = model.plain(input_ids=torch.tensor([prompt + made[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.float().log_softmax(-1)
        for place, found in enumerate(logprobs(chunks)):
            assert found.token_id == made[place]
            assert found.logprob == pytest.approx(float(expected[place, found.token_id]), abs=1e-3)
            best = expected[place].topk(3).values
            assert [top.logprob for top in found.top_logprobs] == pytest.approx(best.tolist(), abs=1e-3)


def logprobs(chunks: Sequence[TokenChunk]) -> list[TokenLogprobEntry]:
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    return [entry for one in found if one is not None for entry in one.content or ()]


# ------------------------------------------------------------------------------------------------ exactness


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(saved(tmp_path_factory.mktemp("llama"), SERVED["llama"]()))


def test_a_sampled_run_makes_the_same_alone_and_among_others(llama: Served) -> None:
    asked = prompts(128)
    alone = [tokens(llama.run(request(prompt, **TEMPERED))[0]) for prompt in asked]
    together = [tokens(chunks) for chunks in llama.run(*(request(prompt, **TEMPERED) for prompt in asked))]
    assert together == alone


def test_a_sampled_run_resumed_at_any_position_goes_on_as_it_would_have(llama: Served) -> None:
    (prompt,) = prompts(128, number=1)
    asked = request(prompt, n=2, **TEMPERED)
    (undisturbed,) = llama.run(asked)
    whole = [tokens(undisturbed, choice) for choice in (0, 1)]
    assert whole[0] != whole[1]
    for position in range(1, OUTPUT):
        resume = [ChoiceSoFar(choice, tuple(whole[choice][: position - choice])) for choice in (0, 1)]
        (rest,) = llama.run(asked, resume=resume)
        assert [[*so_far.token_ids, *tokens(rest, so_far.index)] for so_far in resume] == whole


def test_a_run_without_a_seed_is_resumed_with_the_draws_it_had(llama: Served) -> None:
    (prompt,) = prompts(128, number=1)
    asked = request(prompt, temperature=1.0)

    def run(*resume: ChoiceSoFar) -> list[int]:
        llama.loop.runs.open(Admission("one and the same", asked, resume))
        return tokens(llama.drain()["one and the same"])

    whole = run()
    assert whole[:7] + run(ChoiceSoFar(0, tuple(whole[:7]))) == whole


def test_rows_that_had_to_give_way_for_want_of_blocks_make_the_same_tokens(tmp_path: Path) -> None:
    folder = saved(tmp_path, SERVED["llama"]())
    roomy = served(folder)
    asked = [request(prompt, **TEMPERED) for prompt in prompts(128, number=8)]
    expected = [tokens(chunks) for chunks in roomy.run(*asked)]
    bytes_of_a_block = 3 * 2 * 2 * 8 * 4 * 4
    tight = TransformersSettings(
        str(folder), dtype="float32", device="cpu", rows=20, budget=40, block=4, kv_bytes=40 * bytes_of_a_block
    )
    loop = PagedLoop(tight)
    gave_way = 0
    for i, one in enumerate(asked):
        loop.runs.open(Admission(str(i), one))
    told: dict[str, list[int]] = {}
    while loop.runs.busy:
        before = {*loop.scheduler.running}
        loop.step()
        gave_way += len(before & {*loop.scheduler.waiting})
        for output in loop.runs.collect():
            told.setdefault(output.run, []).extend(tokens(output.chunks))
    assert gave_way > 0
    assert [told[str(i)] for i in range(len(asked))] == expected
    assert loop.scheduler.blocks.free == loop.scheduler.blocks.total
