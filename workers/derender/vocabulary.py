"""What derendering needs of a tokenizer: its token strings, which of them are special, how they join into text.

Only the decode tables are kept. The encoder (merges, pre-tokenizer) is never built, so a vocabulary of 150,000
tokens loads in a tenth of a second and holds its strings alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

_T = TypeVar("_T", bound=msgspec.Struct)
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: msgspec.Raw = msgspec.Raw(b"null")


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The decode side of a tokenizer. `tokens[id]` is None where the vocabulary has a hole."""

    tokens: tuple[str | None, ...]
    special: frozenset[int]
    eos: frozenset[int]
    byte_level: bool
    join: Callable[[list[str]], str]

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read a Hugging Face tokenizer from its folder (or from its `tokenizer.json` alone).

        Special tokens are those that `tokenizer_config.json` names; end-of-sequence tokens are its `eos_token` and
        the `eos_token_id` of `generation_config.json`. Raises FileNotFoundError and ValueError, naming the file.
        """
        path = Path(path)
        folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: derendering needs a tokenizer in that form")
        parsed = _decode(file, _TokenizerFile)
        ids = _ids(parsed)
        named = _named_special_tokens(folder)
        eos = {ids[token] for name, token in named.items() if name == "eos_token" and token in ids}
        return cls(
            tokens=_by_id(ids),
            special=frozenset(ids[token] for token in named.values() if token in ids),
            eos=frozenset(eos | _generation_eos(folder)),
            byte_level=_is_byte_level(parsed.decoder),
            join=_joiner(parsed.decoder),
        )

    def token(self, token_id: int) -> str | None:
        """The token's string in the vocabulary's own spelling; None for an id outside it."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None

    def find(self, token: str) -> int | None:
        """The id of a token by its exact string; None where there is none. Walks the table: for set-up only."""
        return self.tokens.index(token) if token in self.tokens else None


def _decode(file: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _ids(file: _TokenizerFile) -> dict[str, int]:
    vocab = file.model.vocab
    ids = dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
    return ids | {token.content: token.id for token in file.added_tokens}


def _by_id(ids: dict[str, int]) -> tuple[str | None, ...]:
    tokens: list[str | None] = [None] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    return tuple(tokens)


def _named_special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by the name that the configuration gives them (`eos_token`, ...); unnamed ones by themselves."""
    config: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= json.loads((folder / name).read_bytes())
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = dict(extra) if isinstance(extra, dict) else {str(_text(token)): token for token in _list(extra)}
    named |= {name: token for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, token in named.items() if (text := _text(token)) is not None}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _generation_eos(folder: Path) -> set[int]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return set()
    eos = _decode(file, _GenerationConfig).eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


def _is_byte_level(decoder: msgspec.Raw) -> bool:
    parsed = json.loads(bytes(decoder))
    return isinstance(parsed, dict) and parsed.get("type") == "ByteLevel"


def _joiner(decoder: msgspec.Raw) -> Callable[[list[str]], str]:
    parsed = json.loads(bytes(decoder))
    if parsed is None:
        return " ".join
    bare = {"version": "1.0", "added_tokens": [], "model": _NO_MODEL, "decoder": parsed}
    join: Callable[[list[str]], str] = Tokenizer.from_str(json.dumps(bare)).decoder.decode
    return join
