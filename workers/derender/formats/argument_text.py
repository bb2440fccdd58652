"""What a call's arguments say, where they are JSON in a string, or nothing at all."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from headrace.workers.derender.formats.json_string import unescaped

MAX_RAW: Final = 64
"""Characters that may wait, until it is known what they are a part of."""
NOTHING: Final = "{}"
"""The arguments of a call that has none."""

Written = Literal["", "null", "quoted", "json"]


class ArgumentText(Struct, omit_defaults=True):
    """How arguments are written, and what of them is undecided."""

    raw: Annotated[str, Meta(max_length=MAX_RAW)] = ""
    written: Written = ""
    """As they are, as what may be null or is in quotes, or as JSON in a string."""


_BEGUN: Final[dict[str, Written]] = {'"': "quoted", "n": "null"}
_QUOTED: Final = re.compile(r'"(?:\s{0,8}(?:(\{)|[^\s{])|\s{9})')
"""How a string begins; the group is there if it may hold an object."""
_NULL_BEGUN: Final = re.compile(r"n(?:u(?:ll?)?)?|null\s{1,8}")
_NONE: Final = re.compile(r'null\s{0,8}|""')


def written(character: str) -> Written:
    """How arguments that begin with this character are written."""
    return _BEGUN.get(character, "")


def said(state: ArgumentText, piece: str, whole: bool) -> str:
    """The arguments' next piece as JSON text. `whole`: it is the last one."""
    if not state.written:
        return piece
    state.raw += piece
    if whole and _NONE.fullmatch(state.raw):
        state.raw, state.written = "", ""
        return NOTHING
    if state.written == "quoted":
        _decide(state, whole)
    elif state.written == "null" and (whole or not _NULL_BEGUN.fullmatch(state.raw)):
        state.written = ""
    if not state.written:
        piece, state.raw = state.raw, ""
        return piece
    if state.written != "json":
        return ""
    piece, rest = unescaped(state.raw[:-1] if whole else state.raw)
    state.raw = "" if whole else rest
    return piece


def _decide(state: ArgumentText, whole: bool) -> None:
    """Tell JSON in a string from a string like others, as soon as it has begun."""
    opening = _QUOTED.match(state.raw)
    if opening and opening[1]:
        state.written, state.raw = "json", state.raw[opening.start(1) :]
    elif whole or (opening and state.raw != '""'):
        state.written = ""
