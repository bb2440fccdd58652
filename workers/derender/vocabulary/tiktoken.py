"""A tiktoken file: a line of base64 and a rank for each token. Special tokens stand in the configuration."""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from headrace.workers.derender.vocabulary.configuration import Configuration, generation_eos, ids_of
from headrace.workers.derender.vocabulary.spelling import from_alphabet, in_alphabet
from headrace.workers.derender.vocabulary.table import MAX_IDS, InBytes, Tokens, Vocabulary

_IN_CODE: Final = {
    "qwen.tiktoken": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
}
"""What comes after the last rank, by file, for models that say so in their code alone. The first ends a text."""


def read(file: Path) -> Vocabulary:
    """The vocabulary of a tiktoken file, spelled as byte-level. Raises ValueError, naming the file.

    Special tokens are those that the configuration next to it names; an id before the last of the added tokens that
    has none is called reserved, as other readers do.
    """
    configuration = Configuration(file.parent)
    in_code, added = _IN_CODE.get(file.name, ()), configuration.added_tokens()
    try:
        tokens = Tokens(_spellings(file.read_bytes(), in_code, added))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    named = ids_of(configuration.special_tokens(), {token: i for i, token in added.items()}, tokens)
    unnamed = frozenset(i for token in in_code if (i := tokens.find(token)) is not None)
    special = unnamed | frozenset(named.values())
    return Vocabulary(
        tokens=tokens,
        decoding=InBytes(from_alphabet),
        special=special,
        control=special,
        eos=generation_eos(file.parent) | {i for name, i in named.items() if name == "eos_token"},
    )


def _spellings(data: bytes, in_code: tuple[str, ...], added: Mapping[int, str]) -> Iterator[tuple[int, bytes]]:
    size = 0
    for line in data.splitlines():
        if line:
            token, rank = line.split()
            size = max(size, int(rank) + 1)
            yield int(rank), in_alphabet(a2b_base64(token)).encode()
    names = dict(enumerate(in_code, size)) | dict(added)
    for token_id in range(size, min(max(names, default=-1) + 1, MAX_IDS)):
        yield token_id, names.get(token_id, f"<|reserved_token_{token_id}|>").encode()
