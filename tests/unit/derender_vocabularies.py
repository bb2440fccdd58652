"""Small tokenizers in the files of other kinds than Hugging Face's, written out for these tests."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [b" the", b"get", "你".encode(), "好，".encode(), b" \xf0\x9f", b"\x91\xa9", "\ufffd".encode(), b"\n\n"]
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6


def tekken(
    folder: Path, tokens: Sequence[bytes] = (*BYTES, *WORDS), special: Sequence[str] | None = None, *, count: int = 24
) -> Path:
    """A tekken.json of these tokens after `count` special ones, and one token more than its vocabulary has."""
    config = {"pattern": ".", "default_vocab_size": count + len(tokens), "default_num_special_tokens": count}
    file = {
        "config": config,
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*tokens, b"never"])
        ],
        "special_tokens": special
        and [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)],
    }
    return _written(folder / "tekken.json", json.dumps(file).encode())


def tiktoken(
    folder: Path, tokens: Sequence[bytes] = (*BYTES, *WORDS), *, name: str = "tiktoken.model", **config: object
) -> Path:
    """A tiktoken file, with this tokenizer_config.json next to it."""
    lines = b"".join(b"%b %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))
    return _with_config(_written(folder / name, lines), config)


def sentencepiece(
    folder: Path, pieces: Iterable[tuple[str, int | None]], *, adds_space: bool | None = None, **config: object
) -> Path:
    """A tokenizer.model of these pieces and their types, with this tokenizer_config.json next to it."""
    message = b"".join(_field(1, _piece(text, kind)) for text, kind in pieces)
    message += _field(2, b"\x18\x02")  # how it was trained
    normalizer = _field(1, b"identity") + (b"" if adds_space is None else bytes([3 << 3, adds_space]))
    return _with_config(_written(folder / "tokenizer.model", message + _field(3, normalizer)), config)


def _piece(text: str, kind: int | None) -> bytes:
    score = bytes([2 << 3 | 5, 0, 0, 128, 191])
    return _field(1, text.encode()) + score + (b"" if kind is None else bytes([3 << 3, kind]))


def _field(number: int, value: bytes) -> bytes:
    length = bytes([len(value)]) if len(value) < 128 else bytes([len(value) & 127 | 128, len(value) >> 7])
    return bytes([number << 3 | 2]) + length + value


def _with_config(file: Path, config: dict[str, object]) -> Path:
    if config:
        _written(file.parent / "tokenizer_config.json", json.dumps(config).encode())
    return file


def _written(file: Path, data: bytes) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    return file
