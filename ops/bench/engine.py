"""CPU per token of the embedded engine, beside transformers' own static generate and continuous batching.

    python ops/bench/engine.py [--model FOLDER] [--dtype bfloat16] [--rows 1 8 32] [--quick]

All in one process with one torch thread: milliseconds of CPU time per wanted token, the best of three runs, and how
many times ours the others cost. `mixed` has prompts of 16 to 150 tokens and 16 to 128 output tokens, sampled at
temperature 0.7, top_p 0.95, top_k 50; a static batch runs until its longest row is done. `equal` has 128 tokens in and
64 out, greedy. The lines below each say where a step of ours goes; `schedule` is planning and the step's tensors.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import structlog
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from headrace import demo_model
from headrace.protocol import GenerateRequest
from headrace.workers.generate.engine import Admission
from headrace.workers.generate.engines import loop as loop_module
from headrace.workers.generate.engines.loop import PagedLoop, TransformersSettings

RUNS = 3
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "top_k": 50}


@dataclass(frozen=True)
class Work:
    """Prompts, how many tokens each is to be continued by, and whether these are sampled."""

    prompts: Sequence[list[int]]
    lengths: Sequence[int]
    sampled: bool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def mixed(rows: int, vocabulary: int) -> Work:
    random = Random(rows)
    prompts = [[random.randrange(vocabulary) for _ in range(random.randint(16, 150))] for _ in range(rows)]
    return Work(prompts, [random.randint(16, 128) for _ in range(rows)], sampled=True)


def equal(rows: int, vocabulary: int) -> Work:
    random = Random(rows)
    return Work([[random.randrange(vocabulary) for _ in range(128)] for _ in range(rows)], [64] * rows, sampled=False)


@dataclass
class Ours:
    """The paged loop, with the time that its parts take."""

    loop: PagedLoop
    runs: Iterator[int] = field(default_factory=count)
    parts: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        self._time(self.loop.scheduler, "plan", "schedule")
        self._time(loop_module, "build_step", "schedule")
        self._time(loop_module, "forward", "forward")
        self._time(self.loop._sampler, "sample", "sample")
        self._time(self.loop, "step", "all")

    def _time(self, owner: object, name: str, part: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def timed(*args: object) -> object:
            start = time.process_time()
            try:
                return inner(*args)
            finally:
                self.parts[part] = self.parts.get(part, 0.0) + time.process_time() - start

        setattr(owner, name, timed)

    def __call__(self, work: Work) -> None:
        params = SAMPLED if work.sampled else {"temperature": 0}
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            body = {"token_ids": prompt, "sampling_params": {**params, "max_tokens": length, "ignore_eos": True}}
            self.loop.runs.open(Admission(str(next(self.runs)), GenerateRequest.model_validate(body)))
        while self.loop.runs.busy:
            self.loop.step()
            self.loop.runs.collect()
            self.steps += 1

    def breakdown(self) -> str:
        whole = self.parts.pop("all")
        self.parts["the rest"] = whole - sum(self.parts.values())
        shares = ", ".join(f"{part} {100 * spent / whole:.1f} %" for part, spent in self.parts.items())
        text = f"a step of ours: {1000 * whole / self.steps:.2f} ms: {shares}"
        self.parts, self.steps = {}, 0
        return text


def static(model: Any) -> Callable[[Work], None]:
    """One padded batch by generate, until the longest row is done."""

    def run(work: Work) -> None:
        width = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in work.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
        config = _config(work, max_new_tokens=max(work.lengths))
        model.generate(ids, attention_mask=mask, generation_config=config)

    return run


def continuous(model: Any, rows: int) -> Callable[[Work], None]:
    """The library's continuous batching: one manager for each run, as its sampling parameters are the manager's."""

    def run(work: Work) -> None:
        pages = ContinuousBatchingConfig(page_size=32, num_blocks=rows * 12, max_batch_tokens=512, seed=1)
        manager = model.init_continuous_batching(_config(work), pages)
        manager.start()
        try:
            for prompt, length in zip(work.prompts, work.lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            results = [manager.get_result(timeout=120) for _ in work.prompts]
            if None in results:
                raise RuntimeError("transformers' continuous batching failed, or took more than 120 s")
        finally:
            manager.stop(block=True)

    return run


def _config(work: Work, **more: object) -> GenerationConfig:
    sampling = SAMPLED if work.sampled else {}
    return GenerationConfig.from_dict({"do_sample": work.sampled, "pad_token_id": 0, **sampling, **more})


def cost(run: Callable[[Work], None], work: Work, runs: int) -> float:
    """CPU milliseconds per wanted token, the best of the runs."""
    spent = []
    for _ in range(runs):
        start = time.process_time()
        run(work)
        spent.append(time.process_time() - start)
    return 1000 * min(spent) / work.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=str(demo_model.PATH))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--quick", action="store_true", help="one run of each instead of three")
    args = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    logging.disable(logging.WARNING)
    compare(args.model, args.dtype, args.rows, 1 if args.quick else RUNS)


def compare(model: str, dtype: str, rows: Sequence[int], runs: int) -> None:
    ours = Ours(PagedLoop(TransformersSettings(model, device="cpu", dtype=dtype, rows=max(rows))))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=ours.loop._loaded.model.dtype)
    plain.generation_config.eos_token_id = plain.config.eos_token_id = None
    vocabulary = ours.loop.limits.vocab_size
    print(f"{model}, {plain.dtype}, CPU ms per token with one thread (times ours)")
    print(f"{'':>8} {'rows':>5} {'ours':>8} {'generate':>18} {'continuous':>18}")
    for make in (mixed, equal):
        for count_of_rows in rows:
            work = make(count_of_rows, vocabulary)
            ours(work)
            ours.parts, ours.steps = {}, 0
            own = cost(ours, work, runs)
            others = (cost(static(plain), work, runs), cost(continuous(plain, count_of_rows), work, runs))
            told = " ".join(f"{other:>8.3f} ({other / own:>5.1f} x)" for other in others)
            print(f"{make.__name__:>8} {count_of_rows:>5} {own:>8.3f} {told}")
            print(f"{'':>15}{ours.breakdown()}")


if __name__ == "__main__":
    main()
