"""Token log probabilities with their text filled in: the engine knows ids, clients read strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from headrace.protocol import wire
from headrace.workers.derender.detokenize import KNOWN, Detokenizer
from headrace.workers.derender.vocabulary import REPLACEMENT, InContext, Vocabulary

CONTEXT: Final = 4
"""Sampled tokens before a token that may hold the first bytes of its character: UTF-8 needs no more."""

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobText:
    """Fills in `token` and `bytes`. Holds no state of a stream; safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, detokenizer: Detokenizer) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = detokenizer
        self._marker = vocabulary.decoding.marker if isinstance(vocabulary.decoding, InContext) else None
        self._alone = lru_cache(KNOWN)(self._decoded)

    def resolve(
        self, logprobs: wire.TokenLogprobs, context: Sequence[int], *, by_id: bool = False
    ) -> wire.ChatLogprobs:
        """The chat form of these log probabilities; `context` holds the sampled ids before them.

        The first tokens of a character that is split over several get no text, its last one gets it all. A
        candidate that was not sampled is completed from the same context. `by_id`: tokens are named `token_id:N`,
        their text is in their bytes alone.
        """
        if logprobs.content is None:
            return wire.ChatLogprobs()
        before = list(context)
        entries = []
        for entry in logprobs.content:
            token, data = self._piece(entry.token_id, before, by_id)
            candidates = []
            for top in entry.top_logprobs:
                top_token, top_data = self._piece(top.token_id, before, by_id)
                candidates.append(wire.ChatLogprob(token=top_token, logprob=_finite(top.logprob), bytes=top_data))
            entries.append(
                wire.ChatLogprobEntry(token=token, logprob=_finite(entry.logprob), bytes=data, top_logprobs=candidates)
            )
            before = [*before[1 - CONTEXT :], entry.token_id]
        return wire.ChatLogprobs(content=entries)

    def _piece(self, token_id: int, context: list[int], by_id: bool) -> tuple[str, list[int] | None]:
        text, data = self._alone(token_id)
        if text.endswith(REPLACEMENT):
            text = self._completed(token_id, context)
            data = list(text.encode())
        return (f"token_id:{token_id}" if by_id else text), data

    def _decoded(self, token_id: int) -> tuple[str, list[int] | None]:
        """The token's own text and its bytes; an unknown id has no bytes."""
        spelling = self._vocabulary.token(token_id)
        if spelling is None:
            return "", None
        text = self._spaced(spelling, self._detokenizer.text([token_id]))
        return text, list(text.encode("utf-8", "replace"))

    def _spaced(self, spelling: str, text: str) -> str:
        """With the spaces that decoding only drops where a text starts."""
        marker = self._marker
        if marker is None or not spelling.startswith(marker):
            return text
        spaces = len(spelling) - len(spelling.lstrip(marker))
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


def to_completion(logprobs: wire.ChatLogprobs, offset: int, *, by_id: bool = False) -> wire.CompletionLogprobs:
    """The same log probabilities as parallel lists; `offset` is where in the text the first token starts.

    `by_id` as they were resolved: the text that counts is then in the bytes.
    """
    entries = logprobs.content or ()
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(bytes(entry.bytes or ()).decode() if by_id else entry.token)
    return wire.CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[entry.logprob for entry in entries],
        tokens=[entry.token for entry in entries],
        top_logprobs=[{top.token: top.logprob for top in entry.top_logprobs} or None for entry in entries],
    )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _common(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
