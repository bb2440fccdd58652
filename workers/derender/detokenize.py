"""Token ids to text, a few at a time, with the text that the engine itself would give out.

A token is given out once the text up to it is whole: never half a character, never a space that the next token
would take back. Two ways lead there. Byte-level vocabularies have bytes for tokens, so the bytes not yet given
out are all there is to decode. Others (Metaspace, byte fallback) only decode in context, so a window of earlier
tokens is decoded along. Both keep the same window, in the terms of DerenderStreamState, so a state of either, or
of another implementation, continues here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from headrace.workers.derender.vocabulary import Vocabulary

REPLACEMENT: Final = "\ufffd"

PROMPT_WINDOW: Final = 5
PROMPT_TAIL: Final = PROMPT_WINDOW + 2
MAX_PENDING: Final = 256
"""Tokens that may be held back for a character to become whole. Only garbage gets there: it is then given out."""


class Window(Struct):
    """Tokens that decoding still reads: `tokens[prefix:read]` are given out, `tokens[read:]` are held back."""

    tokens: list[str]
    prefix: int = 0
    read: int = 0
    pending: bytes = b""
    """Byte-level only: the bytes of `tokens[read:]`."""
    before: bytes = b""
    """Byte-level only: the bytes of `tokens[prefix:read]` where these end within a character, else empty."""


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
    return ByteLevel(vocabulary) if vocabulary.byte_level else Windowed(vocabulary)


class ByteLevel:
    """Vocabularies whose tokens are bytes, each byte spelled as one printable character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._entries: dict[int, tuple[str, bytes, str]] = {}
        """By id, filled on first use: spelling, bytes, and the text where the token is whole by itself, else ""."""

    def open(self, prompt: Sequence[int] | None, *, skip_special: bool) -> Window:
        return self.resume(*_prompt_tail(self._vocabulary, prompt, skip_special))

    def resume(self, tokens: list[str], prefix: int, read: int) -> Window:
        before = b"".join(map(_spelled_bytes, tokens[prefix:read]))
        return Window(
            tokens=tokens,
            prefix=prefix,
            read=read,
            pending=b"".join(map(_spelled_bytes, tokens[read:])),
            before=before if _decode(before).endswith(REPLACEMENT) else b"",
        )

    def feed(self, window: Window, token_ids: Sequence[int], *, skip_special: bool) -> str:
        if not token_ids:
            return ""
        _drop_prefix(window)
        special = self._vocabulary.special if skip_special else ()
        parts = []
        for token_id in token_ids:
            if token_id in special:
                continue
            spelling, spelled, whole = self._entries.get(token_id) or self._entry(token_id)
            if whole and len(window.tokens) == window.read and not window.before:
                parts.append(whole)
                window.tokens, window.read = [spelling], 1
            elif text := self._advance(window, spelling, spelled):
                parts.append(text)
        return "".join(parts)

    def text(self, token_ids: Sequence[int]) -> str:
        return _decode(b"".join([self._entry(token_id)[1] for token_id in token_ids]))

    def _advance(self, window: Window, spelling: str, spelled: bytes) -> str:
        full = _hold(window, spelling)
        window.pending += spelled
        text = _decode(window.before + window.pending)
        given = len(_decode(window.before)) if window.before else 0
        if (len(text) <= given or text.endswith(REPLACEMENT)) and not full:
            return ""
        _release(window)
        window.pending = window.before = b""
        return text[given:]

    def _entry(self, token_id: int) -> tuple[str, bytes, str]:
        entry = self._entries.get(token_id)
        if entry is not None:
            return entry
        spelling = self._vocabulary.token(token_id)
        if spelling is None:
            return "", b"", ""
        spelled = _spelled_bytes(spelling)
        text = _decode(spelled)
        entry = self._entries[token_id] = (spelling, spelled, "" if text.endswith(REPLACEMENT) else text)
        return entry


class Windowed:
    """Vocabularies whose tokens decode only in context."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._join: Callable[[list[str]], str] = vocabulary.join
        self._alone: dict[str, str] = {}
        """Text of single tokens: what the window before a token nearly always is."""

    def open(self, prompt: Sequence[int] | None, *, skip_special: bool) -> Window:
        return Window(*_prompt_tail(self._vocabulary, prompt, skip_special))

    def resume(self, tokens: list[str], prefix: int, read: int) -> Window:
        return Window(tokens, prefix, read)

    def feed(self, window: Window, token_ids: Sequence[int], *, skip_special: bool) -> str:
        if not token_ids:
            return ""
        _drop_prefix(window)
        special = self._vocabulary.special if skip_special else ()
        parts = []
        for token_id in token_ids:
            if token_id in special:
                continue
            full = _hold(window, self._vocabulary.token(token_id) or "")
            given = len(self._given(window))
            text = self._join(window.tokens)
            if (len(text) <= given or text.endswith(REPLACEMENT)) and not full:
                continue
            parts.append(text[given:])
            _release(window)
        return "".join(parts)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._join([token for i in token_ids if (token := self._vocabulary.token(i)) is not None])

    def _given(self, window: Window) -> str:
        if window.read != 1:
            return self._join(window.tokens[: window.read])
        token = window.tokens[0]
        text = self._alone.get(token)
        if text is None:
            text = self._join([token])
            if len(self._alone) < len(self._vocabulary.tokens):
                self._alone[token] = text
        return text


def _prompt_tail(
    vocabulary: Vocabulary, prompt: Sequence[int] | None, skip_special: bool
) -> tuple[list[str], int, int]:
    tail = prompt[-PROMPT_TAIL:] if prompt else ()
    tokens = [vocabulary.token(i) or "" for i in tail if not (skip_special and i in vocabulary.special)]
    return tokens, max(len(tokens) - PROMPT_WINDOW, 0), len(tokens)


def _drop_prefix(window: Window) -> None:
    if window.prefix:
        del window.tokens[: window.prefix]
        window.read -= window.prefix
        window.prefix = 0


def _hold(window: Window, token: str) -> bool:
    """Hold a token back; true when the window is full and must be given out as it is.

    A token without text is not worth a place in a crowded window.
    """
    pending = len(window.tokens) - window.read
    if token or pending < MAX_PENDING // 2:
        window.tokens.append(token)
    return pending >= MAX_PENDING


def _release(window: Window) -> None:
    del window.tokens[: window.read]
    window.read = len(window.tokens)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte: itself where it has one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES: Final = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a token stands for; a token with a character outside the alphabet stands for itself."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")
