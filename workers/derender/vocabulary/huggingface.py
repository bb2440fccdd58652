"""Hugging Face's tokenizer.json. The encoder (merges, pre-tokenizer) is never built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from headrace.workers.derender.vocabulary.configuration import Configuration, decoded, generation_eos, ids_of
from headrace.workers.derender.vocabulary.decoder import in_context
from headrace.workers.derender.vocabulary.spelling import from_alphabet
from headrace.workers.derender.vocabulary.table import InBytes, InContext, Tokens, Vocabulary

_T = TypeVar("_T")
_PART: Final = 1 << 16


class _AddedToken(msgspec.Struct, gc=False):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: msgspec.Raw


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, object] | None = None


def read(file: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json. Raises ValueError, naming the file.

    Special tokens are those that the configuration next to it names; end-of-sequence tokens are its `eos_token` and
    the `eos_token_id` of `generation_config.json`.
    """
    parsed, configuration = decoded(file, _File), Configuration(file.parent)
    added = {token.content: token.id for token in parsed.added_tokens}
    try:
        own = _spellings(bytes(parsed.model.vocab))
        tokens = Tokens(chain(own, ((i, token.encode()) for token, i in added.items())))
        decoding = _decoding(parsed.decoder)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    named = ids_of(configuration.special_tokens(), added, tokens)
    special = frozenset(named.values())
    return Vocabulary(
        tokens=tokens,
        decoding=decoding,
        special=special,
        control=special | {token.id for token in parsed.added_tokens if token.special},
        eos=generation_eos(file.parent) | {i for name, i in named.items() if name == "eos_token"},
    )


def _decoding(decoder: dict[str, object] | None) -> InBytes | InContext:
    return InBytes(from_alphabet) if decoder and decoder.get("type") == "ByteLevel" else in_context(decoder)


def _spellings(vocab: bytes) -> Iterator[tuple[int, bytes]]:
    """The tokens of a vocabulary in JSON: an object of ids, or a list of pairs whose place is the id."""
    if vocab.startswith(b"{"):
        for ids in _parts(vocab, dict[str, int]):
            yield from ((token_id, token.encode()) for token, token_id in ids.items())
    elif vocab.startswith(b"["):
        pairs = chain.from_iterable(_parts(vocab, list[tuple[str, float]]))
        yield from ((place, token.encode()) for place, (token, _) in enumerate(pairs))
    else:
        raise ValueError("its vocabulary is neither an object nor a list")


def _parts(value: bytes, kind: type[_T]) -> Iterator[_T]:
    """A JSON object or list in parts, of which only one is there at a time: all are tens of megabytes of objects.

    Raises ValueError for one of another kind.
    """
    decode = msgspec.json.Decoder(kind).decode
    at, end = 1, len(value) - 1
    while at < end:
        for stop in _stops(value, at, end):
            with suppress(msgspec.MsgspecError):  # The comma was one within an entry.
                part = decode(value[:1] + value[at:stop] + value[-1:])
                break
        else:
            raise ValueError(f"its vocabulary is no {kind} at character {at}")
        yield part
        at = stop + 1


def _stops(value: bytes, at: int, end: int) -> Iterator[int]:
    """Where a part may end: where all does if that is near, else before one of its commas, the last one first."""
    if end - at <= _PART:
        yield end
        return
    stop = at + _PART
    while (stop := value.rfind(b",", at, stop)) >= 0:
        yield stop
