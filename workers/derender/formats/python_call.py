"""Scanner for tool calls written in Python: `[f(city='Paris', days=3), g()]`.

A mere bracket begins a list of calls only if a function of the request's is called behind it, or, where nothing was
said before, any function with named arguments. Behind a marker of the format's own everything is meant for a call.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from headrace.workers.derender.formats.bodies import PythonBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.python_json import CallState
from headrace.workers.derender.formats.python_value import NAME, Reading

Stage = Literal["open", "between", "closed"]


class PythonSection(CallState, omit_defaults=True, tag="python", tag_field="body"):
    """Where among the calls the scanner is: before the list, between calls, behind the list, or within a call."""

    done: bool = False
    refused: str = ""
    stage: Stage = "open"
    marked: bool = False
    """A marker began the section, not a mere bracket."""


_LIST: Final = "["
_BLANK: Final = re.compile(r"\s*")
_LISTED: Final = re.compile(r"\s*\[")
_FUNCTION: Final = r"\w[\w.\-]*"
"""A function's name, which tools may begin with a digit."""
_HEAD: Final = re.compile(rf"\s*({_FUNCTION})[ \t]*\(")
_HEAD_BEGUN: Final = re.compile(rf"\s*(?:{_FUNCTION}[ \t]*)?\Z")
_ARGUED: Final = re.compile(rf"\s*(?:\)|{NAME}\s*=)")
_ARGUED_BEGUN: Final = re.compile(rf"\s*(?:{NAME}\s*)?\Z")
_NO_CALL: Final = re.compile(rf"{_FUNCTION}|[\s\S]")


class PythonCalls:
    """The scanner. Holds no state of a stream."""

    def __init__(self, body: PythonBody) -> None:
        self._listed = body.listed
        self._marker = body.end
        self._end = Markers([body.end]) if body.end else None

    def begin(self, marker: str) -> PythonSection:
        """See CallScanner."""
        return PythonSection(stage="open" if self._listed else "between", marked=marker != _LIST)

    def feed(self, section: PythonSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner. The end of the text may be the start of the end marker."""
        stop = self._end.tail(text, at) if self._end else len(text)
        return self._read(section, Reading(section, text, stop, found, declared, marker=self._marker), at)

    def finish(self, section: PythonSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner. A list in which no call was begun is content, as far as it was written."""
        reading = Reading(section, tail, len(tail), found, declared, marker=self._marker, final=True)
        at = self._read(section, reading, 0)
        if section.stage == "open":
            self._refuse(section)
        if section.done:
            section.refused += tail[at:]

    def _read(self, section: PythonSection, reading: Reading, at: int) -> int:
        while at < reading.stop and not section.done and not reading.waiting:
            if section.stage != "open" and not (section.within and section.quoted):
                blank = _BLANK.match(reading.text, at, reading.stop)
                at = blank.end() if blank else at
                if self._marker and reading.text.startswith(self._marker, at):
                    reading.close()
                    section.done = True
                    return at + len(self._marker)
            if at < reading.stop:
                at = reading.step(at) if section.within else self._step(section, reading, at)
        return at

    def _step(self, section: PythonSection, reading: Reading, at: int) -> int:
        match section.stage:
            case "open":
                return self._open(section, reading, at)
            case "between":
                return self._between(section, reading, at)
            case "closed":
                section.done = True
                return at

    def _open(self, section: PythonSection, reading: Reading, at: int) -> int:
        text, trusted = reading.text, section.marked or not reading.out.found.begun
        end, more = reading.window(at)
        if section.marked and (listed := _LISTED.match(text, at, end)):
            section.stage = "between"
            return listed.end()
        head = _HEAD.match(text, at, end)
        trusted = trusted and head is not None and not head[1][0].isdigit()
        if head and (head[1] in reading.declared.names or (trusted and _ARGUED.match(text, head.end(), end))):
            section.stage = "between"
            return at
        if more and (_ARGUED_BEGUN.match(text, head.end(), end) if head else _HEAD_BEGUN.match(text, at, end)):
            return reading.wait(at)
        self._refuse(section)
        return at

    def _refuse(self, section: PythonSection) -> None:
        section.done, section.refused = True, "" if section.marked else _LIST

    def _between(self, section: PythonSection, reading: Reading, at: int) -> int:
        if reading.text[at] == "]":
            section.done, section.stage = not section.marked, "closed"
            return at + 1
        if reading.text[at] in ",;[(){}":
            return at + 1
        end, more = reading.window(at)
        if head := _HEAD.match(reading.text, at, end):
            reading.out.open(head[1])
            return head.end()
        if more and _HEAD_BEGUN.match(reading.text, at, end):
            return reading.wait(at)
        if not section.marked:
            section.done = True
            return at
        other = _NO_CALL.match(reading.text, at, end)
        return other.end() if other else end
