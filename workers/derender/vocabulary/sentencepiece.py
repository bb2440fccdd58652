"""SentencePiece's tokenizer.model: a protobuf message of which decoding needs so little that no library reads it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from headrace.workers.derender.vocabulary.configuration import Configuration, generation_eos, ids_of
from headrace.workers.derender.vocabulary.decoder import SPACE, in_context
from headrace.workers.derender.vocabulary.table import Tokens, Vocabulary

_EOS: Final = "</s>"
_PIECES, _NORMALIZER = 1, 3
"""Fields of the message."""
_TEXT, _TYPE = 1, 3
"""Fields of a piece."""
_UNKNOWN, _CONTROL = 2, 3
"""Types of a piece."""
_ADDSSPACE: Final = 3
"""A field of the normalizer, true unless it says otherwise: it puts a space before a text, which decoding drops."""


def read(file: Path) -> Vocabulary:
    """The vocabulary of a SentencePiece model. Raises ValueError, naming the file.

    It decodes as its tokenizer.json would, tokens that the configuration next to it adds included. Special are
    those that it names, and the unknown and the control pieces.
    """
    configuration = Configuration(file.parent)
    added = configuration.added_tokens()
    try:
        pieces, special, adds_space = _model(file.read_bytes())
        tokens = Tokens(chain(enumerate(pieces), ((i, token.encode()) for i, token in sorted(added.items()))))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    named = ids_of({"eos_token": _EOS} | configuration.special_tokens(), {t: i for i, t in added.items()}, tokens)
    special |= set(named.values())
    return Vocabulary(
        tokens=tokens,
        decoding=in_context(_decoder(adds_space)),
        special=frozenset(special),
        control=frozenset(special),
        eos=generation_eos(file.parent) | {i for name, i in named.items() if name == "eos_token"},
    )


def _decoder(adds_space: bool) -> dict[str, object]:
    steps: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _model(message: bytes) -> tuple[list[bytes], set[int], bool]:
    """The pieces by id, which of them are special, and whether a space is put before a text."""
    pieces: list[bytes] = []
    special, adds_space = set(), True
    for field, value in _fields(message):
        if field == _PIECES:
            piece = dict(_fields(value))
            if piece.get(_TYPE) in (bytes([_UNKNOWN]), bytes([_CONTROL])):
                special.add(len(pieces))
            pieces.append(piece.get(_TEXT, b""))
        elif field == _NORMALIZER:
            adds_space = dict(_fields(value)).get(_ADDSSPACE) != b"\0"
    if not pieces:
        raise ValueError("it has no pieces")
    return pieces, special, adds_space


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """A message's fields: number and value, a number's as it is written. Raises ValueError for anything else."""
    at = 0
    while at < len(message):
        key, start = _number(message, at)
        match key & 7:
            case 0:  # a number
                _, at = _number(message, start)
            case 1:
                at = start + 8
            case 2:  # its length, then the value
                length, start = _number(message, start)
                at = start + length
            case 5:
                at = start + 4
            case written:
                raise ValueError(f"a field is written in the way {written}")
        if at > len(message):
            raise ValueError("it ends within a field")
        yield key >> 3, message[start:at]


def _number(message: bytes, at: int) -> tuple[int, int]:
    """The number that is written there, seven bits a byte, and where it ends."""
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("it ends within a number")
