"""Mistral's tekken.json: byte tokens by rank, after a block of special tokens."""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final

from msgspec import Raw, Struct

from headrace.workers.derender.vocabulary.configuration import decoded, generation_eos
from headrace.workers.derender.vocabulary.spelling import from_text, in_text
from headrace.workers.derender.vocabulary.table import MAX_IDS, InBytes, Tokens, Vocabulary

_EOS: Final = "</s>"
_MARKUP: Final = frozenset({"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"})
"""Special tokens that are text to whoever reads calls and thoughts: never skipped."""
_CALL_ID: Final = "[CALL_ID]"
"""Special as the others, but what comes after it is a call's id: it has text where special tokens are kept."""
# fmt: off
_BEFORE_V8: Final = (
    "<unk>", "<s>", _EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)
# fmt: on
"""Special tokens of files that name none, by id: those of format version 7 and earlier."""
_BYTES: Final = re.compile(rb'"token_bytes"\s*:\s*"([A-Za-z0-9+/=]*)"')


class _Special(Struct, gc=False):
    rank: int
    token_str: str


class _Config(Struct):
    default_vocab_size: int
    default_num_special_tokens: int


class _File(Struct):
    vocab: Raw
    config: _Config
    special_tokens: list[_Special] | None = None


def read(file: Path) -> Vocabulary:
    """The vocabulary of a tekken.json. Raises ValueError, naming the file."""
    parsed = decoded(file, _File)
    count, size = parsed.config.default_num_special_tokens, parsed.config.default_vocab_size
    if not 0 <= count <= size <= MAX_IDS:
        raise ValueError(f"{file} cannot be read: it says {count} special tokens of {size}")
    special = [f"<SPECIAL_{i}>" for i in range(count)]
    named = parsed.special_tokens
    for rank, token in enumerate(_BEFORE_V8) if named is None else ((token.rank, token.token_str) for token in named):
        if not 0 <= rank < count:
            raise ValueError(f"{file} cannot be read: its special token {token!r} has rank {rank} of {count}")
        special[rank] = token
    ordinary = islice(_byte_tokens(memoryview(parsed.vocab)), size - count)
    tokens = Tokens(enumerate(token.encode() for token in chain(special, map(in_text, ordinary))))
    if len(tokens) < size:
        raise ValueError(f"{file} cannot be read: it has {len(tokens)} tokens where it says {size}")
    return Vocabulary(
        tokens=tokens,
        decoding=InBytes(from_text, textless=frozenset(special) - _MARKUP - {_CALL_ID}),
        special=frozenset(i for i, token in enumerate(special) if token not in _MARKUP),
        control=frozenset(range(count)),
        eos=frozenset(i for i, token in enumerate(special) if token == _EOS) | generation_eos(file.parent),
    )


def _byte_tokens(vocab: memoryview) -> Iterator[bytes]:
    """The tokens in the order of their ranks, which is that of the file. One by one, as in tokenizer.json."""
    return (a2b_base64(entry[1]) for entry in _BYTES.finditer(vocab))
