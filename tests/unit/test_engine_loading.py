"""A model is loaded from safetensors or GGUF, proved, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaModel, PreTrainedModel, Qwen2Config

from headrace.workers.generate.engine import ModelRefused
from headrace.workers.generate.engines import loading
from headrace.workers.generate.engines.attention import paged_attention
from headrace.workers.generate.engines.loading import load
from headrace.workers.generate.engines.loop import PagedLoop, TransformersSettings
from tests.tiny_models import EOS, HEADS, MODEL_LEN, REFUSED, SERVED, SHAPE, VOCABULARY, random_model, saved

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(tmp_path / "llama", SERVED["llama"]())


def edited(folder: Path, file: str = "config.json", **fields: object) -> Path:
    """The folder, with fields of a JSON file changed."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def test_a_folder_is_loaded_with_its_lengths_its_vocabulary_and_its_end(llama: Path) -> None:
    loaded = load(str(llama), device="cpu", dtype="float32")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos) == (VOCABULARY, MODEL_LEN, frozenset([EOS]))
    assert loaded.bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert loaded.model.dtype == torch.float32


def saved_as_gguf(path: Path, model: PreTrainedModel) -> None:
    """A Qwen2 model as llama.cpp lays it out, in float32."""
    writer, config = GGUFWriter(path, "qwen2"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in model.state_dict().items():
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        block = ""
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            block = f"blk.{number}."
        writer.add_tensor(f"{block}{GGUF_NAMES[stem]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("named", [False, True], ids=["folder", "file"])
def test_gguf_weights_are_loaded_where_transformers_reads_them(tmp_path: Path, named: bool) -> None:
    model = random_model(Qwen2Config(**SHAPE))
    saved_as_gguf(tmp_path / "model.gguf", model)
    loaded = load(str(tmp_path / "model.gguf" if named else tmp_path), device="cpu")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos) == (VOCABULARY, MODEL_LEN, frozenset([EOS]))
    ids = torch.tensor([[5, 6, 7]])
    loaded.model.set_attn_implementation("eager")
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)


def test_the_generation_config_names_all_ids_that_end_a_sequence(llama: Path) -> None:
    edited(llama, "generation_config.json", eos_token_id=[5, 9])
    assert load(str(llama), device="cpu").eos == {5, 9}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_proof_too(llama: Path, dtype: str) -> None:
    assert str(load(str(llama), device="cpu", dtype=dtype).model.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_loop_cannot_run_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    config, why = REFUSED[name]
    folder = saved(tmp_path / "odd", config())
    with pytest.raises(ModelRefused, match=why) as refused:
        load(str(folder), device="cpu")
    assert str(folder) in str(refused.value)


def test_a_model_whose_attention_we_do_not_reproduce_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
        return honest(module, *args, **{**kwargs, "scaling": 1.0})  # type: ignore[arg-type]

    honest = paged_attention
    monkeypatch.setattr(loading, "paged_attention", careless)
    with pytest.raises(ModelRefused, match=r"\(llama\) gives other logits in the paged loop than by itself"):
        load(str(llama), device="cpu", dtype="float32")


def test_a_layer_that_keeps_its_window_to_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "mistral", SERVED["mistral"]())
    edited(folder, sliding_window=200)
    load(str(folder), device="cpu")
    monkeypatch.setattr(loading, "_window", lambda *_: 199)
    with pytest.raises(ModelRefused, match="layer 0 does not tell its attention function of its window of 199 tokens"):
        load(str(folder), device="cpu")


def test_layers_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "qwen3", SERVED["qwen3"]())
    edited(folder, layer_types=["full_attention", "chunked_attention", "full_attention"])
    with pytest.raises(ModelRefused, match=r"\(qwen3\) has chunked_attention layers, which are not served"):
        load(str(folder), device="cpu")


def test_layers_that_do_not_attend_through_the_interface_are_counted(llama: Path) -> None:
    model = random_model(LlamaConfig(**HEADS))
    seen: list[tuple[int, int | None]] = [(0, None), (2, None)]
    with pytest.raises(ModelRefused, match="2 of its 3 layers attend through transformers' AttentionInterface"):
        loading._check_layers("odd", model, seen, MODEL_LEN)


def test_an_encoder_is_refused(llama: Path) -> None:
    edited(llama, is_encoder_decoder=True)
    with pytest.raises(ModelRefused, match="has an encoder: only decoder-only models are served"):
        load(str(llama), device="cpu")


def test_a_model_whose_files_lack_a_weight_is_refused_and_not_filled_in_at_random(tmp_path: Path) -> None:
    LlamaModel(LlamaConfig(**HEADS)).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"\(llama\) lacks 1 of its weights, lm_head.weight for one"):
        load(str(tmp_path), device="cpu")


def test_pickled_weights_are_refused_without_being_opened(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ModelRefused, match="has only pickled weights, which can run code"):
        load(str(llama), device="cpu")


def test_a_folder_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"has no weights: neither \.safetensors nor \.gguf"):
        load(str(llama), device="cpu")


def test_one_of_several_gguf_files_must_be_named(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    for name in ("a.gguf", "b.gguf"):
        (llama / name).write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"has 2 \.gguf files: name one of them"):
        load(str(llama), device="cpu")


def test_weights_that_cannot_be_read_are_a_clear_refusal(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ModelRefused, match="llama cannot be loaded: "):
        load(str(llama), device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ({"max_model_len": MODEL_LEN + 1}, "max_model_len must be at most 256 for .*, got 257"),
        ({"max_model_len": 200, "kv_bytes": 384 * 100}, "max_model_len must be at most 96, what the KV memory holds"),
        ({"kv_bytes": 10}, "kv_bytes must be at least 12288, one block for .*, got 10"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_with_their_bound(
    llama: Path, settings: dict[str, object], message: str
) -> None:
    given = {"device": "cpu", "dtype": "float32", "block": 32, **settings}
    with pytest.raises(ModelRefused, match=message):
        PagedLoop(TransformersSettings(str(llama), **given))  # type: ignore[arg-type]


def test_a_length_nobody_asked_for_shrinks_to_what_the_memory_holds(llama: Path) -> None:
    loop = PagedLoop(TransformersSettings(str(llama), device="cpu", dtype="float32", block=4, kv_bytes=384 * 50))
    assert loop.limits.max_model_len == 48
