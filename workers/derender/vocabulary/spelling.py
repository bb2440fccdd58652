"""Tokens that are bytes, spelled as text: a carried state is JSON, and a byte is not always a character."""

from __future__ import annotations

from typing import Final

REPLACEMENT: Final = "\ufffd"


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte: itself where it has one, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES: Final = _byte_alphabet()
_CHARACTERS: Final = {byte: character for character, byte in _BYTES.items()}


def in_alphabet(token: bytes) -> str:
    """Byte-level spelling: each byte as one printable character."""
    return "".join([_CHARACTERS[byte] for byte in token])


def from_alphabet(spelling: str) -> bytes:
    """The bytes of a byte-level spelling; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([_BYTES[character] for character in spelling])
    except KeyError:
        return spelling.encode("utf-8", "surrogatepass")


def in_text(token: bytes) -> str:
    """Plain spelling: the token's own text; where that is not all of it, U+FFFD and then the bytes' characters."""
    text = token.decode("utf-8", "replace")
    return REPLACEMENT + in_alphabet(token) if REPLACEMENT in text else text


def from_text(spelling: str) -> bytes:
    """The bytes of a plain spelling."""
    if len(spelling) > 1 and spelling[0] == REPLACEMENT and _BYTES.keys() >= set(spelling[1:]):
        return from_alphabet(spelling[1:])
    return spelling.encode("utf-8", "surrogatepass")
