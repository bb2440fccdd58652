"""The model: Qwen3 architecture, 2.6 M parameters, with two replacements that make training on a CPU faster."""

import json
from pathlib import Path

import torch
import transformers.models.qwen3.modeling_qwen3 as qwen3
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ops.demo_model.tokenizer import CONTEXT

_CAUSAL = torch.full((CONTEXT, CONTEXT), -1e4, dtype=torch.bfloat16).triu(1)


def _plain_attention(
    _module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None, *, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal attention for right-padded batches; plain matmuls are faster here than the CPU's flash kernel.

    q: [batch, query heads, time, head]; k and v: [batch, key-value heads, time, head].
    Returns [batch, time, query heads, head].
    """
    batch, _heads, time, size = q.shape
    groups = k.shape[1]
    scores = (q * scaling).reshape(batch, groups, -1, size) @ k.transpose(-1, -2)
    scores = scores.view(batch, groups, -1, time, time) + _CAUSAL[:time, :time]
    shares = scores.softmax(-1, dtype=scores.dtype).view(batch, groups, -1, time)
    return (shares @ v).view(batch, -1, time, size).transpose(1, 2).contiguous(), None


def _fused_norm(norm: qwen3.Qwen3RMSNorm, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), norm.weight.to(x.dtype), norm.variance_epsilon)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh fp32 model for training, with the replacements in place for the whole process."""
    ALL_ATTENTION_FUNCTIONS.register("plain", _plain_attention)
    qwen3.Qwen3RMSNorm.forward = _fused_norm  # type: ignore[method-assign, assignment]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("plain")
    return model


def load_weights(model: Qwen3ForCausalLM, folder: Path) -> None:
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes model (bf16) and tokenizer as transformers folders; the settings are also what transformers 4 reads."""
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_") and key != "dtype"}
    plain = Qwen3ForCausalLM(Qwen3Config(**config))
    plain.bfloat16()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings: dict[str, dict[str, object]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
        "generation_config.json": {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "do_sample": False,
        },
    }
    for name, values in settings.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
