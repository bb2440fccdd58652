"""The values that all kinds of tokenizers come down to for derendering."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

MAX_IDS: Final = 1 << 24
"""Ids of a vocabulary, holes included: many times more than any has."""


class Tokens:
    """Every token's spelling by its id, end to end in one block: no object per token. Immutable.

    An id without a token, and one whose token has no characters, is a hole.
    """

    __slots__ = ("_block", "_edges")

    def __init__(self, spellings: Iterable[tuple[int, bytes]]) -> None:
        """From ids and spellings in UTF-8, best in the order of the ids; for the same id the last one stands.

        Raises ValueError for an id that no vocabulary has.
        """
        block, edges, late = bytearray(), array("I", [0]), dict[int, bytes]()
        size = 0
        for token_id, spelling in spellings:
            if token_id != size:
                if not 0 <= token_id < MAX_IDS:
                    raise ValueError(f"a token has the id {token_id}, which is not from 0 to {MAX_IDS - 1}")
                if token_id < size:
                    if token_id in late or block[edges[token_id] : edges[token_id + 1]] != spelling:
                        late[token_id] = spelling
                    continue
                edges.extend([len(block)] * (token_id - size))
            block += spelling
            edges.append(len(block))
            size = token_id + 1
        self._block, self._edges = bytes(block), edges
        if late:
            self._replace(late)

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, token_id: int) -> str | None:
        """The token's spelling; None for a hole and for any id outside the table."""
        if not 0 <= token_id < len(self._edges) - 1:
            return None
        return self._block[self._edges[token_id] : self._edges[token_id + 1]].decode("utf-8", "replace") or None

    def find(self, spelling: str) -> int | None:
        """The first id with this spelling; None where there is none. Walks the block: for set-up only."""
        wanted = spelling.encode()
        at = self._block.find(wanted) if wanted else -1
        while at >= 0:
            token_id = bisect_right(self._edges, at) - 1
            if (at, at + len(wanted)) == (self._edges[token_id], self._edges[token_id + 1]):
                return token_id
            at = self._block.find(wanted, at + 1)
        return None

    def _replace(self, spellings: Mapping[int, bytes]) -> None:
        edges = self._edges
        every = [spellings.get(i, self._block[edges[i] : edges[i + 1]]) for i in range(len(self))]
        self._block, self._edges = b"".join(every), array("I", accumulate(map(len, every), initial=0))


@dataclass(frozen=True, slots=True)
class InBytes:
    """Tokens are bytes, each for itself."""

    bytes_of: Callable[[str], bytes]
    """What a spelling stands for."""
    textless: frozenset[str] = frozenset()
    """Spellings of special tokens that have no text in an output, skipped or not."""


@dataclass(frozen=True, slots=True)
class InContext:
    """Tokens have text in a row: spaces and bytes depend on their neighbours."""

    join: Callable[[list[str]], str]
    """The text of these spellings in a row."""
    marker: str | None = None
    """The character that is spelled for a space at the start of a token, where decoding may drop that space."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The decode side of a tokenizer."""

    tokens: Tokens
    decoding: InBytes | InContext
    special: frozenset[int] = frozenset()
    """Left out where special tokens are skipped."""
    control: frozenset[int] = frozenset()
    """Special tokens, and those that the tokenizer marks as such: no text that a model means to say."""
    eos: frozenset[int] = frozenset()
    """Tokens that end a sequence."""

    def token(self, token_id: int) -> str | None:
        """The token's spelling; None for an id outside the vocabulary."""
        return self.tokens[token_id]

    def find(self, token: str) -> int | None:
        """The id of a token by its exact spelling; None where there is none. For set-up only."""
        return self.tokens.find(token)
