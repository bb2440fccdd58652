"""From Python's literals to JSON text: constants, numbers and the escapes in strings. Nothing is evaluated."""

from __future__ import annotations

import json
import re
import unicodedata
from json.encoder import encode_basestring
from typing import Final

_CONSTANTS: Final = {"None": "null", "True": "true", "False": "false", "null": "null", "true": "true", "false": "false"}
_NUMBER: Final = re.compile(
    r"(?P<sign>[-+]?)\s*"
    r"(?:(?P<based>0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+)"
    r"|(?P<whole>[0-9](?:_?[0-9])*)?(?:\.(?P<part>[0-9](?:_?[0-9])*)?)?(?P<power>[eE][-+]?[0-9](?:_?[0-9])*)?)"
)
_ESCAPE: Final = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<octal>[0-7]{1,3})"
    r"|N\{(?P<name>[A-Za-z0-9 \-]{1,100})\}|(?P<other>\r\n|[\s\S]))"
)
_ESCAPE_BEGUN: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2}|N(?:\{[A-Za-z0-9 \-]{0,100})?|\r)?\Z"
)
_ESCAPED: Final = {
    "\n": "",
    "\r": "",
    "\r\n": "",
    "\\": r"\\",
    "'": "'",
    '"': r"\"",
    "a": r"\u0007",
    "b": r"\b",
    "f": r"\f",
    "n": r"\n",
    "r": r"\r",
    "t": r"\t",
    "v": r"\u000b",
}


def scalar(text: str) -> str | None:
    """The JSON text of a constant or a number; None for anything else."""
    return _CONSTANTS.get(text) or _number(text)


def key(text: str) -> str:
    """The JSON string that a dictionary's key becomes, as `json.dumps` has it; unquoted names are taken as they are."""
    value = scalar(text)
    return encode_basestring(text if value is None else json.dumps(json.loads(value)))


def inside(text: str) -> str:
    """What stands between the quotes of the JSON string of this text."""
    return encode_basestring(text)[1:-1]


def escape(text: str, at: int, end: int) -> tuple[str, int] | None:
    """The JSON of the escape that begins at `at`, and where it ends; an unknown one stands for itself, as in Python.

    None if it may go on at `end`.
    """
    match = None if _ESCAPE_BEGUN.match(text, at, end) else _ESCAPE.match(text, at, end)
    if match is None:
        return None
    kind, found = match.lastgroup, match[match.lastgroup or 0]
    if kind == "other":
        return _ESCAPED.get(found, inside(match[0])), match.end()
    character = _named(found) if kind == "name" else _coded(int(found, 8 if kind == "octal" else 16))
    return json.dumps(character)[1:-1] if character else inside(match[0]), match.end()


def _named(name: str) -> str | None:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        return None


def _coded(code: int) -> str | None:
    return chr(code) if code <= 0x10FFFF else None


def _number(text: str) -> str | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, based, whole, part, power = match.group("sign", "based", "whole", "part", "power")
    if based is None and whole is None and part is None:
        return None
    minus = "-" if sign == "-" else ""
    if based is not None:
        return f"{minus}{int(based, 0)}"
    digits = (whole or "").replace("_", "").lstrip("0") or "0"
    fraction = f".{part or '0'}" if "." in text else ""
    return f"{minus}{digits}{fraction}{power or ''}".replace("_", "")
