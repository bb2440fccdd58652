"""Token ids to text, a few at a time, with the text that the engine itself would give out.

A token is given out once the text up to it is whole: never half a character, never a space that the next token
would take back. Two ways lead there. Where tokens are bytes (byte-level, tekken, tiktoken), the bytes not yet given
out are all there is to decode. Others (Metaspace, byte fallback) only decode in context, so a window of earlier
tokens is decoded along. Both keep the same window, in the terms of DerenderStreamState, so a state of either, or
of another implementation, continues here.

As with the engine, bytes at the end of an output that make no character are never given out, and special tokens
that are kept stand without spaces of their own, whatever `spaces_between_special_tokens` says: that is for
tokenizers written in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from headrace.workers.derender.vocabulary import REPLACEMENT, InBytes, InContext, Vocabulary

PROMPT_WINDOW: Final = 5
PROMPT_TAIL: Final = PROMPT_WINDOW + 2
MAX_PENDING: Final = 256
"""Tokens that may be held back for a character to become whole. Only garbage gets there: it is then given out."""
KNOWN: Final = 1 << 14
"""Tokens whose text is remembered: all would take more memory than their table, and most of a vocabulary is rare."""

_Piece = TypeVar("_Piece")


class Window(Struct):
    """Tokens that decoding still reads: `tokens[prefix:read]` are given out, `tokens[read:]` are held back."""

    tokens: list[str]
    prefix: int = 0
    read: int = 0
    pending: bytes = b""
    """Of bytes only: the bytes of `tokens[read:]`."""
    before: bytes = b""
    """Of bytes only: the bytes of `tokens[prefix:read]` where these end within a character, else empty."""
    given: int = 0
    """In context only: the characters of `tokens[prefix:read]`."""


class Detokenizer(Protocol):
    """One vocabulary's way from tokens to text. Holds no state of a stream; safe to share between threads."""

    def open(self, prompt: Sequence[int] | None, *, skip_special: bool) -> Window:
        """A window that continues after the prompt, of which only the last few ids are read."""

    def resume(self, tokens: list[str], prefix: int, read: int) -> Window:
        """A window from the fields of a carried state, which the caller has bounded."""

    def feed(self, window: Window, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Advance the window by these tokens and give the text that became whole. Unknown ids have no text."""

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens by themselves, special tokens included."""


def detokenizer(vocabulary: Vocabulary) -> Detokenizer:
    """The detokenizer that fits the vocabulary."""
    match vocabulary.decoding:
        case InBytes() as decoding:
            return Bytewise(vocabulary, decoding)
        case InContext() as decoding:
            return Windowed(vocabulary, decoding)


class Bytewise:
    """Vocabularies whose tokens are bytes, however these are spelled."""

    def __init__(self, vocabulary: Vocabulary, decoding: InBytes) -> None:
        self._vocabulary = vocabulary
        self._bytes_of = decoding.bytes_of
        self._textless = decoding.textless
        self._known: dict[int, tuple[str, str]] = {}

    def open(self, prompt: Sequence[int] | None, *, skip_special: bool) -> Window:
        return self.resume(*_prompt_tail(self._vocabulary, prompt, skip_special))

    def resume(self, tokens: list[str], prefix: int, read: int) -> Window:
        before = b"".join(map(self._said, tokens[prefix:read]))
        return Window(
            tokens=tokens,
            prefix=prefix,
            read=read,
            pending=b"".join(map(self._said, tokens[read:])),
            before=before if _decode(before).endswith(REPLACEMENT) else b"",
        )

    def feed(self, window: Window, token_ids: Sequence[int], *, skip_special: bool) -> str:
        if not token_ids:
            return ""
        special = self._vocabulary.special if skip_special else ()
        known, look_up, parts = self._known, self._look_up, []
        nothing_waits, last = len(window.tokens) == window.read and not window.before, ""
        if nothing_waits and len(token_ids) == 1 and token_ids[0] not in special:
            spelling, whole = known.get(token_ids[0]) or look_up(token_ids[0])
            if whole:
                window.tokens, window.prefix, window.read = [spelling], 0, 1
                return whole
        for token_id in token_ids:
            if token_id in special:
                continue
            spelling, whole = known.get(token_id) or look_up(token_id)
            if whole and nothing_waits:  # as nearly always; the window is set when it is needed
                parts.append(whole)
                last = spelling
                continue
            last = _set(window, last)
            if text := self._advance(window, spelling):
                parts.append(text)
            nothing_waits = len(window.tokens) == window.read and not window.before
        _set(window, last)
        return "".join(parts)

    def text(self, token_ids: Sequence[int]) -> str:
        spellings = (self._vocabulary.token(token_id) for token_id in token_ids)
        return _decode(b"".join([self._bytes_of(spelling) for spelling in spellings if spelling is not None]))

    def _advance(self, window: Window, spelling: str) -> str:
        if not _hold(window, spelling):
            return ""
        window.pending += self._said(spelling)
        text = _decode(window.before + window.pending)
        given = len(_decode(window.before)) if window.before else 0
        if (len(text) <= given or text.endswith(REPLACEMENT)) and not _is_full(window):
            return ""
        _release(window)
        window.pending = window.before = b""
        return text[given:]

    def _said(self, spelling: str) -> bytes:
        """The bytes that a token adds to an output."""
        return b"" if spelling in self._textless else self._bytes_of(spelling)

    def _look_up(self, token_id: int) -> tuple[str, str]:
        """A token's spelling, and its text where that is whole by itself, else "". An unknown id has neither."""
        spelling = self._vocabulary.token(token_id) or ""
        text = _decode(self._said(spelling))
        return _learn(self._known, token_id, (spelling, "" if text.endswith(REPLACEMENT) else text))


class Windowed:
    """Vocabularies whose tokens decode only in context."""

    def __init__(self, vocabulary: Vocabulary, decoding: InContext) -> None:
        self._vocabulary = vocabulary
        self._join = decoding.join
        self._known: dict[int, tuple[str, int]] = {}

    def open(self, prompt: Sequence[int] | None, *, skip_special: bool) -> Window:
        return self.resume(*_prompt_tail(self._vocabulary, prompt, skip_special))

    def resume(self, tokens: list[str], prefix: int, read: int) -> Window:
        return Window(tokens, prefix, read, given=len(self._join(tokens[prefix:read])))

    def feed(self, window: Window, token_ids: Sequence[int], *, skip_special: bool) -> str:
        if not token_ids:
            return ""
        _drop_prefix(window)
        special = self._vocabulary.special if skip_special else ()
        parts = []
        for token_id in token_ids:
            if token_id in special:
                continue
            spelling, alone = self._known.get(token_id) or self._look_up(token_id)
            if not _hold(window, spelling):
                continue
            text = self._join(window.tokens)
            if (len(text) <= window.given or text.endswith(REPLACEMENT)) and not _is_full(window):
                continue
            parts.append(text[window.given :])
            _release(window)
            window.given = alone if len(window.tokens) == 1 else len(self._join(window.tokens))
        return "".join(parts)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._join([token for i in token_ids if (token := self._vocabulary.token(i)) is not None])

    def _look_up(self, token_id: int) -> tuple[str, int]:
        """A token's spelling, and the characters of its text by itself. An unknown id has neither."""
        spelling = self._vocabulary.token(token_id) or ""
        return _learn(self._known, token_id, (spelling, len(self._join([spelling]))))


def _learn(known: dict[int, _Piece], token_id: int, piece: _Piece) -> _Piece:
    if len(known) >= KNOWN:
        known.clear()
    known[token_id] = piece
    return piece


def _prompt_tail(
    vocabulary: Vocabulary, prompt: Sequence[int] | None, skip_special: bool
) -> tuple[list[str], int, int]:
    tail = prompt[-PROMPT_TAIL:] if prompt else ()
    tokens = [vocabulary.token(i) or "" for i in tail if not (skip_special and i in vocabulary.special)]
    return tokens, max(len(tokens) - PROMPT_WINDOW, 0), len(tokens)


def _set(window: Window, last: str) -> str:
    """Make this token, given out whole, the window; without one, only drop what the window no longer needs."""
    if last:
        window.tokens, window.prefix, window.read = [last], 0, 1
    else:
        _drop_prefix(window)
    return ""


def _drop_prefix(window: Window) -> None:
    if window.prefix:
        del window.tokens[: window.prefix]
        window.read -= window.prefix
        window.prefix = 0


def _hold(window: Window, token: str) -> bool:
    """Hold a token back. False where that changes nothing: one without text is not worth a place in a crowd."""
    if not token and len(window.tokens) - window.read >= MAX_PENDING // 2:
        return False
    window.tokens.append(token)
    return True


def _is_full(window: Window) -> bool:
    """Whether what is held back must be given out as it is."""
    return len(window.tokens) - window.read > MAX_PENDING


def _release(window: Window) -> None:
    del window.tokens[: window.read]
    window.read = len(window.tokens)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")
