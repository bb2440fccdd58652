"""The loop of the embedded engine, without threads or clocks: one step is schedule, run the model, sample, tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from headrace.logs import get_logger
from headrace.protocol.errors import InternalError
from headrace.workers.generate.blocks import BlockPool
from headrace.workers.generate.checks import Limits
from headrace.workers.generate.engine import ModelRefused
from headrace.workers.generate.engines.attention import KVCache, build_step
from headrace.workers.generate.engines.loading import Loaded, forward, load
from headrace.workers.generate.engines.sampler import Sampler
from headrace.workers.generate.runs import Runs
from headrace.workers.generate.scheduler import Scheduler

log = get_logger()

CPU_KV_BYTES: Final = 1 << 30
CUDA_KV_SHARE: Final = 0.85
"""Of the memory that is free once the model is loaded; the rest is for what a step computes."""


@dataclass(frozen=True, slots=True)
class TransformersSettings:
    """``model`` is a folder, a .gguf file or a hub name; max_model_len None is the model's own.

    rows run at a time; budget is the most tokens of a step, and never less than rows; block is the tokens of a KV
    block; kv_bytes bounds the memory for keys and values, None is 1 GiB on a CPU and what is free on a GPU.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    rows: int = 32
    budget: int = 512
    block: int = 32
    kv_bytes: int | None = None
    max_choices: int = 128
    max_logprobs: int = 20


class PagedLoop:
    """A loaded model, the memory for keys and values, and the runs on it. One thread at a time may call it."""

    def __init__(self, settings: TransformersSettings) -> None:
        loaded = load(
            settings.model, device=settings.device, dtype=settings.dtype, max_model_len=settings.max_model_len
        )
        blocks = BlockPool(_affordable(settings, loaded), settings.block)
        length = min(loaded.max_model_len, blocks.total * blocks.size)
        if settings.max_model_len is not None and length < settings.max_model_len:
            raise ModelRefused(
                f"max_model_len must be at most {length}, what the KV memory holds for {settings.model}, "
                f"got {settings.max_model_len}"
            )
        self._loaded = loaded
        self._cache = KVCache(blocks=blocks.total, size=blocks.size)
        self._sampler = Sampler()
        self.scheduler = Scheduler(rows=settings.rows, blocks=blocks, budget=max(settings.budget, settings.rows))
        self.runs = Runs(self.scheduler, max_model_len=length, eos=loaded.eos)
        self.limits = Limits(
            engine="transformers",
            vocab_size=loaded.vocab_size,
            max_model_len=length,
            max_choices=settings.max_choices,
            max_logprobs=min(settings.max_logprobs, loaded.vocab_size),
        )
        log.info(
            "engine.loaded",
            model=settings.model,
            device=str(loaded.device),
            dtype=str(loaded.model.dtype),
            max_model_len=length,
            kv_tokens=blocks.total * blocks.size,
            kv_bytes=blocks.total * blocks.size * loaded.bytes_per_token,
        )

    def step(self) -> None:
        """Computes one step; what came of it is in ``runs``."""
        plan = self.scheduler.plan()
        if not plan:
            return
        with torch.inference_mode():
            step = build_step(plan, self._cache, self._loaded.device)
            logits = forward(self._loaded.model, step)
            self.scheduler.computed(plan)
            rows = [piece.row for piece in step.sampling]
            sampled = self._sampler.sample(logits, rows) if rows else []
        for row, new in zip(rows, sampled, strict=True):
            if new.token is None:
                self.runs.fail(row, InternalError(f"no token can be sampled at output position {row.made}"))
            else:
                self.runs.take(row, new.token, new.logprob)


def _affordable(settings: TransformersSettings, loaded: Loaded) -> int:
    """As many blocks as all rows could ever fill, or as the memory holds."""
    memory = settings.kv_bytes
    if memory is None:
        on_gpu = loaded.device.type == "cuda"
        memory = int(torch.cuda.mem_get_info(loaded.device)[0] * CUDA_KV_SHARE) if on_gpu else CPU_KV_BYTES
    block_bytes = loaded.bytes_per_token * settings.block
    if memory < block_bytes:
        raise ModelRefused(f"kv_bytes must be at least {block_bytes}, one block for {settings.model}, got {memory}")
    return min(settings.rows * -(-loaded.max_model_len // settings.block), memory // block_bytes)
