"""Scanner for a call that was demanded and that the model was made to write as plain JSON, without any marker.

It is the first thing in the content: a list of calls, one call by itself, or, where a function was demanded by name,
its arguments alone.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct, field

from headrace.workers.derender.formats.bodies import JsonBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.json_call import JsonCalls
from headrace.workers.derender.formats.json_section import JsonSection
from headrace.workers.derender.formats.json_value import JsonValue, ValueState
from headrace.workers.derender.formats.markers import Hit

_OPENING: Final = re.compile(r"\s*+((\{)|\[\s{0,64}(?:(\{)|\Z))")


class DemandedSection(JsonSection, tag="demanded", tag_field="body"):
    """Where in the demanded calls the scanner is."""


class ArgumentsSection(Struct, omit_defaults=True, tag="arguments", tag_field="body"):
    """Where in the arguments of the demanded function the scanner is: before the brace that was read, or behind it."""

    done: bool = False
    refused: str = ""
    opened: bool = False
    value: ValueState = field(default_factory=lambda: ValueState("nested", 1))


class DemandedArguments:
    """The scanner of arguments alone. Holds no state of a stream."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._value = JsonValue()

    def begin(self, marker: str) -> ArgumentsSection:
        """See CallScanner. The marker is the first brace."""
        return ArgumentsSection()

    def feed(self, call: ArgumentsSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner."""
        self._open(call, found)
        end, call.done = self._value.end(call.value, text, at, len(text))
        found.add_arguments(text[at:end])
        return end

    def finish(self, call: ArgumentsSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner."""
        self._open(call, found)

    def _open(self, call: ArgumentsSection, found: Found) -> None:
        if not call.opened:
            call.opened = True
            found.open_call(self._function, "{")


class Demanded:
    """Where the demanded calls begin, and who reads them. `function`: the one that was demanded by name, if one was."""

    def __init__(self, function: str = "") -> None:
        calls = JsonCalls(JsonBody(), bare=("[", "{"), tentative=True, section=DemandedSection)
        self.scanners = {"[": calls, "{": DemandedArguments(function) if function else calls}
        """By the bracket that begins the JSON."""

    def find(self, text: str, at: int) -> Hit | None:
        """That bracket, if there is nothing but white space before it."""
        match = _OPENING.match(text, at)
        if match is None:
            return None
        start, whole = match.start(1), bool(match[2] or match[3])
        return Hit(start, start + 1 if whole else len(text), whole)
