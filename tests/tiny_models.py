"""Tiny models with random weights, one for each architecture that the engine tests run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

torch.set_num_threads(1)

VOCABULARY = 128
MODEL_LEN = 256
EOS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    # Large enough for logits that differ, so that a wrong key or mask shows in the tokens.
    "initializer_range": 0.3,
}
HEADS: dict[str, Any] = {**SHAPE, "head_dim": 8}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}

SERVED: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**HEADS),
    "qwen2": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**HEADS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**HEADS, **EXPERTS),
    "mistral": lambda: MistralConfig(**HEADS, sliding_window=9),
    "gemma2": lambda: Gemma2Config(**HEADS, sliding_window=9, attn_logit_softcapping=5.0, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**HEADS, sliding_window=9),
    "phi3": lambda: Phi3Config(**SHAPE),
    "gpt_oss": lambda: GptOssConfig(
        **HEADS, sliding_window=9, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_type": "default"}
    ),
    "stablelm": lambda: StableLmConfig(**SHAPE),
}
"""Architectures on which the engine's greedy output must equal that of transformers."""

REFUSED: Mapping[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bert": (lambda: BertConfig(**SHAPE, is_decoder=False), "attends in a way that is not served"),
    "mamba": (
        lambda: MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        "has linear_attention layers, which are not served",
    ),
}
"""Models that the engine must refuse, and a part of what it says."""


def random_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """A model whose norms, biases and sinks are random too."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or "sinks" in name:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    model.train(False)
    return model


def saved(folder: Path, config: PreTrainedConfig) -> Path:
    """The folder, with a random model of this configuration in float32."""
    random_model(config).save_pretrained(folder)
    return folder
