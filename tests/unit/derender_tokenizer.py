"""Small tokenizers of the two kinds that derendering knows, made for these tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
METASPACE = "\u2581"

_CORPUS = (
    'the weather in Paris is fine {"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}',
    "Let me think about the question, and then answer it. 你好，世界！ Zürich 👩‍👧 done",
)


def byte_level(folder: Path) -> Tokenizer:
    """A byte-level BPE with chat markers (added, not special) and an end token (special); saved in the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return _save(tokenizer, folder, {"eos_token": END})


def byte_fallback(folder: Path) -> Tokenizer:
    """A Metaspace vocabulary of letters and short words, every byte as a fallback; saved in the folder."""
    words = [METASPACE, *"abcdefghijklmnopqrstuvwxyz", f"{METASPACE}the", f"{METASPACE}a", "你", f"{METASPACE * 2}x"]
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(METASPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["</s>"])
    return _save(tokenizer, folder, {"eos_token": {"content": "</s>"}, "unk_token": "<unk>"})


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    """The ids of tokens by their exact strings."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def _save(tokenizer: Tokenizer, folder: Path, config: dict[str, object]) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
