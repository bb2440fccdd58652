"""Token log probabilities with their text filled in: the engine knows ids, clients read strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.protocol import wire
from headrace.workers.derender.detokenize import REPLACEMENT, Detokenizer
from headrace.workers.derender.vocabulary import Vocabulary

CONTEXT: Final = 4
"""Sampled tokens before a token that may hold the first bytes of its character: UTF-8 needs no more."""

_METASPACE: Final = "\u2581"
_LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobText:
    """Fills in `token` and `bytes`. Holds no state of a stream; safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, detokenizer: Detokenizer) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = detokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def resolve(self, logprobs: wire.TokenLogprobs, context: Sequence[int]) -> wire.ChatLogprobs:
        """The chat form of these log probabilities; `context` holds the sampled ids before them.

        The first tokens of a character that is split over several get no text, its last one gets it all. A
        candidate that was not sampled is completed from the same context.
        """
        if logprobs.content is None:
            return wire.ChatLogprobs()
        before = list(context)
        entries = []
        for entry in logprobs.content:
            token, data = self._piece(entry.token_id, before)
            candidates = []
            for top in entry.top_logprobs:
                top_token, top_data = self._piece(top.token_id, before)
                candidates.append(wire.ChatLogprob(token=top_token, logprob=_finite(top.logprob), bytes=top_data))
            entries.append(
                wire.ChatLogprobEntry(token=token, logprob=_finite(entry.logprob), bytes=data, top_logprobs=candidates)
            )
            before = [*before[1 - CONTEXT :], entry.token_id]
        return wire.ChatLogprobs(content=entries)

    def _piece(self, token_id: int, context: list[int]) -> tuple[str, list[int]]:
        piece = self._known.get(token_id)
        if piece is None:
            text = self._alone(token_id)
            piece = (text, list(text.encode()))
            if self._vocabulary.token(token_id) is not None:
                self._known[token_id] = piece
        if not piece[0].endswith(REPLACEMENT):
            return piece
        text = self._completed(token_id, context)
        return text, list(text.encode())

    def _alone(self, token_id: int) -> str:
        """The token's own text. A decoder that drops a leading space only does so at the start of a text."""
        text = self._detokenizer.text([token_id])
        spelling = self._vocabulary.token(token_id) or ""
        if self._vocabulary.byte_level or not spelling.startswith(_METASPACE):
            return text
        spaces = len(spelling) - len(spelling.lstrip(_METASPACE))
        return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text

    def _completed(self, token_id: int, context: list[int]) -> str:
        """The text that becomes whole with this token, given the fewest tokens before it that make it whole."""
        text_of = self._detokenizer.text
        for count in range(1, len(context) + 1):
            tail = context[-count:]
            text = text_of([*tail, token_id])
            if text.endswith(REPLACEMENT):
                continue
            while tail and text_of(tail[-1:]).endswith(REPLACEMENT):
                tail.pop()
            return text[_common(text_of(tail), text) :]
        return ""


def to_completion(logprobs: wire.ChatLogprobs, offset: int) -> wire.CompletionLogprobs:
    """The same log probabilities as parallel lists; `offset` is where in the text the first token starts."""
    entries = logprobs.content or ()
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return wire.CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[entry.logprob for entry in entries],
        tokens=[entry.token for entry in entries],
        top_logprobs=[{top.token: top.logprob for top in entry.top_logprobs} or None for entry in entries],
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _common(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
