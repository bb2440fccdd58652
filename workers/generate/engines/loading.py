"""Loads a model for the paged loop, and proves at load that the loop computes what the model does.

Weights come as safetensors, or as GGUF where transformers reads it; never pickled. The proof (``prove``): a prompt in
chunks beside another one, then decoding, must give the logits that the library's own attention gives in one pass. It
refuses models that keep state besides keys and values, or that attend in a way we do not know of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headrace.workers.generate.blocks import BlockPool
from headrace.workers.generate.engine import ModelRefused
from headrace.workers.generate.engines.attention import NAME, KVCache, Step, build_step, paged_attention
from headrace.workers.generate.row import Ending, Row
from headrace.workers.generate.scheduler import Slice

DTYPES: Final[Mapping[str, torch.dtype | str]] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""How far the logits of the proof may be apart, as a share of their norm."""

_KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WATCHED: Final = "headrace_watched"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that the loop can run. Lengths in tokens; ``bytes_per_token`` of keys and values in all layers."""

    model: PreTrainedModel
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos: frozenset[int]
    bytes_per_token: int


def load(name: str, *, device: str = "auto", dtype: str = "auto", max_model_len: int | None = None) -> Loaded:
    """The model in a folder, a .gguf file, or under a hub name. Raises ModelRefused."""
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if dtype not in DTYPES:
        raise ModelRefused(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    model = _read(name, DTYPES[dtype])
    model.to(place).eval()  # type: ignore[arg-type]
    text = model.config.get_text_config(decoder=True)
    length = _length(name, text, max_model_len)
    with torch.inference_mode():
        cache = prove(name, model, length)
    return Loaded(
        model=model,
        device=place,
        vocab_size=_vocabulary(model),
        max_model_len=length,
        eos=_eos(model),
        bytes_per_token=cache.bytes_per_token,
    )


def _read(name: str, dtype: torch.dtype | str) -> PreTrainedModel:
    source, files = _source(name)
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(source, **{k: v for k, v in files.items() if k == "gguf_file"})
        _check_config(name, config)
        loaded: object = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=NAME, output_loading_info=True, **files
        )
        model, told = cast("tuple[PreTrainedModel, Mapping[str, Collection[str]]]", loaded)
        _check_complete(name, config, told["missing_keys"])
        return model
    except ModelRefused:
        raise
    except Exception as error:  # whatever the library says about a folder that it cannot read
        raise ModelRefused(f"{name} cannot be loaded: {error}") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _source(name: str) -> tuple[str, dict[str, str | bool]]:
    """Where the library reads from, and which files. What is neither a folder nor a file is a hub name."""
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return name, {"use_safetensors": True}
    quantised = sorted(path.glob("*.gguf"))
    if len(quantised) == 1:
        return name, {"gguf_file": quantised[0].name}
    if quantised:
        raise ModelRefused(f"{name} has {len(quantised)} .gguf files: name one of them")
    if any(file for pattern in _PICKLED for file in path.glob(pattern)):
        raise ModelRefused(f"{name} has only pickled weights, which can run code: convert them to safetensors")
    raise ModelRefused(f"{name} has no weights: neither .safetensors nor .gguf")


def _check_config(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} ({config.model_type}) has an encoder: only decoder-only models are served")
    unknown = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        raise ModelRefused(
            f"{name} ({config.model_type}) has {', '.join(sorted(unknown))} layers, which are not served"
        )


def _check_complete(name: str, config: PreTrainedConfig, missing: Collection[str]) -> None:
    """The library fills in at random what the files lack: an encoder's, or a bare trunk's, head for instance."""
    if missing:
        raise ModelRefused(
            f"{name} ({config.model_type}) lacks {len(missing)} of its weights, {min(missing)} for one: only complete "
            "models with a language head are served"
        )


def _length(name: str, text: PreTrainedConfig, wanted: int | None) -> int:
    longest: int | None = getattr(text, "max_position_embeddings", None)
    if longest is None:
        if wanted is None:
            raise ModelRefused(f"{name} does not say how long it may get: set max_model_len")
        return wanted
    if wanted is not None and wanted > longest:
        raise ModelRefused(f"max_model_len must be at most {longest} for {name}, got {wanted}")
    return wanted or longest


def _vocabulary(model: PreTrainedModel) -> int:
    """Token ids that can be embedded."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _eos(model: PreTrainedModel) -> frozenset[int]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def prove(name: str, model: PreTrainedModel, max_model_len: int) -> KVCache:
    """Compares the paged loop with the library's eager attention; the cache it filled shows each layer's shape.

    Raises ModelRefused.
    """
    seen: list[tuple[int, int | None]] = []

    def watch(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        seen.append((int(module.layer_idx), kwargs.get("sliding_window")))  # type: ignore[arg-type]
        return paged_attention(module, *args, **kwargs)

    AttentionInterface.register(_WATCHED, watch)
    try:
        model.set_attn_implementation("eager")
        expected = _plain(model)
        model.set_attn_implementation(_WATCHED)
        cache, got = _paged(model)
    except Exception as error:  # whatever a model says about being run like this
        raise ModelRefused(f"{name} ({model.config.model_type}) does not run in the paged loop: {error}") from error
    finally:
        model.set_attn_implementation(NAME)
    _check_layers(name, model, seen, max_model_len)
    apart = float((got.float() - expected.float()).norm() / expected.float().norm())
    if not apart <= TOLERANCE[model.dtype]:
        raise ModelRefused(
            f"{name} ({model.config.model_type}) gives other logits in the paged loop than by itself, {apart:.2g} of "
            "their norm apart: it attends in a way that is not served"
        )
    return cache


def _proof_prompts(model: PreTrainedModel) -> list[list[int]]:
    return [[(3 + 7 * i * n) % _vocabulary(model) for i in range(length)] for n, length in ((1, 9), (2, 12))]


# How many tokens of each of its two prompts a step of the proof computes: chunks side by side, then one at a time.
_PROOF_STEPS: Final = ((6, 8), (1, 3), (1, 1), (1, 0))


def _plain(model: PreTrainedModel) -> Tensor:
    """Logits after the last token of each prompt, [2, vocabulary], by the model alone."""
    prompts = (torch.tensor([ids], device=model.device) for ids in _proof_prompts(model))
    return torch.stack([model(input_ids=ids, use_cache=False).logits[0, -1] for ids in prompts])


def _paged(model: PreTrainedModel) -> tuple[KVCache, Tensor]:
    """The same through the paged loop."""
    pool = BlockPool(blocks=6, size=4)
    cache = KVCache(blocks=pool.total, size=pool.size)
    rows = [
        Row(run="", index=0, tokens=ids, prompt=len(ids), ending=Ending(1), blocks=pool.take(pool.needed(len(ids))))
        for ids in _proof_prompts(model)
    ]
    logits: dict[Row, Tensor] = {}
    for counts in _PROOF_STEPS:
        plan = [Slice.of(row, count) for row, count in zip(rows, counts, strict=True) if count]
        step = build_step(plan, cache, model.device)
        made = forward(model, step)
        logits.update({piece.row: row for piece, row in zip(step.sampling, made, strict=True)})
        for piece in plan:
            piece.row.computed = piece.stop
    return cache, torch.stack([logits[row] for row in rows])


def _check_layers(name: str, model: PreTrainedModel, seen: list[tuple[int, int | None]], max_model_len: int) -> None:
    """Each layer must attend through us, once a step, and tell us of its window."""
    text = model.config.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    through_us = {layer for layer, _ in seen}
    if [layer for layer, _ in seen] != list(range(layers)) * len(_PROOF_STEPS):
        raise ModelRefused(
            f"{name} ({model.config.model_type}) cannot be served: {len(through_us)} of its {layers} layers attend "
            "through transformers' AttentionInterface"
        )
    for layer, window in seen[:layers]:
        expected = _window(text, layer, max_model_len)
        if expected not in (None, window):
            raise ModelRefused(
                f"{name} ({model.config.model_type}) cannot be served: layer {layer} does not tell its attention "
                f"function of its window of {expected} tokens"
            )


def _window(text: PreTrainedConfig, layer: int, max_model_len: int) -> int | None:
    """The window that a layer should have by the configuration, where it can matter."""
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    slides = types[layer] == "sliding_attention" if types else getattr(text, "use_sliding_window", True)
    return window if slides and window is not None and window < max_model_len else None


def forward(model: PreTrainedModel, step: Step) -> Tensor:
    """One pass through the model: the logits to sample from, [rows that sample, vocabulary]."""
    with step.applied():
        out = model(input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, logits_to_keep=step.last)
    logits: Tensor = out.logits[0]
    return logits
