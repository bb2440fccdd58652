"""Decoders as tokenizer.json writes them: how tokens that are no bytes join into text."""

from __future__ import annotations

import json
from collections.abc import Callable
from string import hexdigits
from typing import Final

from headrace.workers.derender.vocabulary.spelling import REPLACEMENT
from headrace.workers.derender.vocabulary.table import InContext

SPACE: Final = "\u2581"
"""What SentencePiece spells for a space."""

Join = Callable[[list[str]], str]

_NO_MODEL: Final = {"type": "BPE", "vocab": {}, "merges": []}
_BYTES: Final = {f"<0x{high}{low}>": int(high + low, 16) for high in f"+{hexdigits}" for low in hexdigits}
"""What names a byte, in all the ways that the library takes for one."""


def in_context(decoder: dict[str, object] | None) -> InContext:
    """How tokens with this decoder come to text. Raises ValueError for a decoder that does not exist."""
    match decoder:
        case None:
            return InContext(" ".join)
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *ends,
            ],
        } if ends in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
            return InContext(_byte_fallback(drops_space=bool(ends)), SPACE)
    return InContext(_built(decoder), _marker(decoder))


def _byte_fallback(*, drops_space: bool) -> Join:
    """What SentencePiece's vocabularies have: a marker for spaces, and a name for each byte.

    The library does the same in ten times the time.
    """

    def join(spellings: list[str]) -> str:
        text = "".join(spellings)
        text = text.replace(SPACE, " ") if "<0x" not in text else _with_bytes(spellings)
        return text[1:] if drops_space and text.startswith(" ") else text

    return join


def _with_bytes(spellings: list[str]) -> str:
    parts, run = [], bytearray()
    for spelling in spellings:
        byte = _BYTES.get(spelling)
        if byte is not None:
            run.append(byte)
            continue
        if run:
            parts.append(_characters(run))
            run = bytearray()
        parts.append(spelling.replace(SPACE, " "))
    parts.append(_characters(run))
    return "".join(parts)


def _characters(run: bytearray) -> str:
    """Bytes in a row are characters all together, or else a replacement each."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)


def _built(decoder: dict[str, object]) -> Join:
    # Imported here: most vocabularies do without it.
    from tokenizers import Tokenizer

    bare = {"version": "1.0", "added_tokens": [], "model": _NO_MODEL, "decoder": decoder}
    try:
        join: Join = Tokenizer.from_str(json.dumps(bare)).decoder.decode
    except Exception as error:  # The library raises Exception itself.
        raise ValueError(f"its decoder cannot be built: {error}") from error
    return join


def _marker(decoder: object) -> str | None:
    """What a Metaspace decoder, or a replacement that does the same, makes a space of."""
    match decoder:
        case {"type": "Sequence", "decoders": list(parts)}:
            return next((marker for part in parts if (marker := _marker(part)) is not None), None)
        case {"type": "Metaspace", "replacement": str(marker)}:
            return marker
        case {"type": "Replace", "pattern": {"String": str(marker)}, "content": " "}:
            return marker
    return None
