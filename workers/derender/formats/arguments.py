"""The arguments of a call that end at a marker: passed on while they come in, as the model wrote them."""

from __future__ import annotations

import re
from typing import Final, Literal

from msgspec import field

from headrace.workers.derender.formats.argument_text import NOTHING, ArgumentText, said, written
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.json_value import JsonValue, ValueState
from headrace.workers.derender.formats.markers import Markers

At = Literal["before", "json", "text", "over"]


class ArgumentsState(ArgumentText, omit_defaults=True):
    """How far they have come. `text`: they are no JSON object, list or string."""

    at: At = "before"
    value: ValueState = field(default_factory=ValueState)


_BLANK: Final = re.compile(r"\s*")


class Arguments:
    """Reads to the arguments' end without keeping them. Holds no state of a stream.

    JSON ends where its value does, or before one of `ends` outside of its strings; other text ends before any of
    them.
    """

    def __init__(self, ends: tuple[str, ...]) -> None:
        self._ends = Markers(ends)
        self._value = JsonValue(ends)

    def read(self, state: ArgumentsState, text: str, at: int, found: Found) -> int:
        """Read on from `at` and say up to where: the arguments' end, or a tail to be seen again."""
        if state.at == "before":
            at = self._begin(state, text, at, found)
        if state.at == "json":
            return self._json(state, text, at, found)
        if state.at == "text":
            return self._text(state, text, at, found)
        return at

    def _begin(self, state: ArgumentsState, text: str, at: int, found: Found) -> int:
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        if at == len(text):
            return at
        if text[at] in '{["':
            state.at, state.written, state.value = "json", written(text[at]), self._value.begin(text[at])
            return at
        hit = self._ends.find(text, at)
        if hit is None or hit.start > at:
            state.at, state.written = "text", written(text[at])
        elif hit.whole:
            state.at = "over"
            found.add_arguments(NOTHING)
        return at

    def _json(self, state: ArgumentsState, text: str, at: int, found: Found) -> int:
        """Only the end of the text may be the start of a marker, and in a string it is none."""
        stop = self._ends.tail(text, at)
        end, whole = self._value.end(state.value, text, at, stop)
        if end == stop and state.value.quoted:
            end, whole = self._value.end(state.value, text, end, len(text))
        over = whole or end < stop
        found.add_arguments(said(state, text[at:end], over))
        if over:
            state.at, state.value = "over", ValueState()
        return end

    def _text(self, state: ArgumentsState, text: str, at: int, found: Found) -> int:
        hit = self._ends.find(text, at)
        end = len(text) if hit is None else hit.start
        over = hit is not None and hit.whole
        found.add_arguments(said(state, text[at:end], over))
        if over:
            state.at = "over"
        return end
