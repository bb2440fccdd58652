"""Where a JSON value ends, in a text that comes in pieces."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Kind = Literal["", "string", "nested", "scalar"]


class ValueState(Struct, omit_defaults=True):
    """Where in a value the reader is. `kind` is empty outside of one."""

    kind: Kind = ""
    depth: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    quoted: bool = False
    escaped: bool = False


_KINDS: Final[dict[str, Kind]] = {'"': "string", "{": "nested", "[": "nested"}


class JsonValue:
    """Reads to the end of a value without keeping it. A value also ends, unfinished, before one of `markers`,

    which count everywhere but inside a string; with `in_strings`, inside one too. The brackets' kinds are not told
    apart: a model that mixes them up meant to close.
    """

    def __init__(self, markers: tuple[str, ...] = (), *, in_strings: bool = False) -> None:
        self._markers = markers
        self._in_strings = in_strings
        self._starts = frozenset(marker[0] for marker in markers)
        starts = "".join(sorted(map(re.escape, self._starts)))
        self._in_string = re.compile(rf'["\\{starts if in_strings else ""}]')
        self._in_nested = re.compile(rf'["{{}}\[\]{starts}]')
        self._in_scalar = re.compile(rf'["{{}}\[\],{starts}]')

    def begin(self, character: str) -> ValueState:
        """The state before a value that starts with this character."""
        return ValueState(kind=_KINDS.get(character, "scalar"))

    def end(self, state: ValueState, text: str, at: int, stop: int) -> tuple[int, bool]:
        """Where the value's text ends, and whether the value does."""
        while at < stop:
            if state.escaped:
                state.escaped = False
                at += 1
                continue
            pattern = (
                self._in_string if state.quoted else self._in_scalar if state.kind == "scalar" else self._in_nested
            )
            match = pattern.search(text, at, stop)
            if match is None:
                return stop, False
            at, character = match.end(), match[0]
            if state.kind == "scalar":
                state.kind = _KINDS.get(character, "scalar")
            if character in self._starts and self._marked(state, text, at - 1):
                return at - 1, False
            elif character == "\\":
                state.escaped = True
            elif state.kind == "scalar" and character in ",}]":
                return at - 1, True
            elif character == '"':
                state.quoted = not state.quoted
                if state.kind == "string" and not state.quoted:
                    return at, True
            elif character in "{[}]" and not state.quoted:
                state.depth = max(state.depth + (1 if character in "{[" else -1), 0)
                if state.depth == 0:
                    return at, True
        return at, False

    def _marked(self, state: ValueState, text: str, at: int) -> bool:
        return (self._in_strings or not state.quoted) and text.startswith(self._markers, at)
