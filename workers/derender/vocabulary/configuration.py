"""What the files next to a tokenizer say of its tokens: which are special, which end a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.workers.derender.vocabulary.table import Tokens

_T = TypeVar("_T")


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def decoded(file: Path, kind: type[_T]) -> _T:
    """A JSON file as a value. Raises ValueError, naming the file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


class Configuration:
    """`tokenizer_config.json`, over `special_tokens_map.json`; decoded as far as it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Read both, as far as they are there. Raises ValueError, naming the file."""
        self._folder = folder
        self._fields: dict[str, msgspec.Raw] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                self._fields |= decoded(folder / name, dict[str, msgspec.Raw])

    def __getitem__(self, name: str) -> object:
        return msgspec.json.decode(self._fields[name]) if name in self._fields else None

    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the name that they are given (`eos_token`, ...); unnamed ones by themselves."""
        extra = self["extra_special_tokens"] or self["additional_special_tokens"] or []
        named = dict(extra) if isinstance(extra, dict) else {str(content(token)): token for token in _list(extra)}
        named |= {name: self[name] for name in self._fields if name.endswith("_token")}
        return {name: text for name, token in named.items() if (text := content(token)) is not None}

    def added_tokens(self) -> dict[int, str]:
        """Tokens added to those of the vocabulary's own file, by id; `added_tokens.json` is the older place."""
        file = self._folder / "added_tokens.json"
        older = decoded(file, dict[str, int]) if file.is_file() else {}
        added = self["added_tokens_decoder"]
        entries: Mapping[str, object] = added if isinstance(added, dict) else {}
        newer = {int(i): text for i, token in entries.items() if i.isdecimal() and (text := content(token)) is not None}
        return {i: token for token, i in older.items()} | newer


def ids_of(named: Mapping[str, str], added: Mapping[str, int], tokens: Tokens) -> dict[str, int]:
    """The ids of named tokens, where these exist: an added token goes before one of the vocabulary's own."""
    ids = {name: added[token] if token in added else tokens.find(token) for name, token in named.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def generation_eos(folder: Path) -> frozenset[int]:
    """The end-of-sequence ids of `generation_config.json`, where there is one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return frozenset()
    eos = decoded(file, _GenerationConfig).eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def content(token: object) -> str | None:
    """A token's string; configurations write it bare or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
