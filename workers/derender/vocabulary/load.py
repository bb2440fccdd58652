"""Find the tokenizer in a model's folder and read its decode side."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace.workers.derender.vocabulary import huggingface, sentencepiece, tekken, tiktoken
from headrace.workers.derender.vocabulary.table import Vocabulary

_NAMES: Final = (
    "tokenizer.json",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "tokenizer.model",
    "tokenizer.model.*",
)
"""What a tokenizer's file is called; where a folder has several, the first is read."""
_MISTRAL: Final = ("tekken.json", "tokenizer.model.*")
_MISTRAL_WEIGHTS: Final = "consolidated*.safetensors"
"""Next to weights in Mistral's own format, the engine reads Mistral's own tokenizer too."""
_RANKED: Final = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
"""How a tiktoken file starts, whatever its name."""


def load_vocabulary(path: str | Path) -> Vocabulary:
    """Read the tokenizer in this folder, or this tokenizer file; the configuration next to it is read as well.

    Raises FileNotFoundError and ValueError, naming the file.
    """
    file = _file(Path(path))
    return _reader(file)(file)


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    names = ("tekken.json", *_NAMES) if any(path.glob(_MISTRAL_WEIGHTS)) else _NAMES
    found = (file for name in names for file in sorted(path.glob(name)) if file.is_file())
    first = next(found, None)
    if first is None:
        raise FileNotFoundError(f"{path} has no tokenizer: derendering needs one of {', '.join(_NAMES)}")
    return first


def _reader(file: Path) -> Callable[[Path], Vocabulary]:
    if file.suffix == ".json":
        return tekken.read if file.name.startswith("tekken") else huggingface.read
    with file.open("rb") as opened:
        return tiktoken.read if _RANKED.match(opened.read(256)) else sentencepiece.read
