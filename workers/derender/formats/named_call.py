"""Scanner for calls that are written as a name, a separator and arguments, with markers around each and around all.

The markup is not insisted on. A name also ends where the arguments plainly begin; arguments also end where the next
call or the section does; what stands between two calls is markup, whatever it is.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from headrace.workers.derender.formats.arguments import Arguments, ArgumentsState
from headrace.workers.derender.formats.bodies import NamedBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers

MAX_NAME: Final = 1024
"""Characters between a call's marker and its arguments. More of them are no name."""
OBJECT: Final = "{"

At = Literal["between", "name", "arguments"]


class NamedSection(Struct, omit_defaults=True, tag="named", tag_field="body"):
    """Where in a section the scanner is: between two calls, in a call's name, or in its arguments."""

    done: bool = False
    refused: Literal[""] = ""
    at: At = "between"
    raw: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The name so far, and what else stands there."""
    announced: bool = False
    arguments: ArgumentsState = field(default_factory=ArgumentsState)


_NAME: Final = re.compile(r"\s*([^\n<`]*)")
_NUMBERED: Final = re.compile(r"(?:functions\.)?(.*?)(:\d+)?", re.DOTALL)


class NamedCalls:
    """The scanner. Holds no state of a stream."""

    def __init__(self, body: NamedBody) -> None:
        self._body = body
        around = tuple(filter(None, (body.call, body.section_end)))
        self._around = Markers(around)
        self._behind_name = Markers((body.separator, OBJECT, *around))
        self._arguments = Arguments(tuple(filter(None, (body.end, *around))))

    def begin(self, marker: str) -> NamedSection:
        """See CallScanner."""
        return NamedSection(at="name" if marker == self._body.call else "between")

    def feed(self, section: NamedSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner."""
        waits = False
        while at < len(text) and not (section.done or waits):
            if section.at == "arguments":
                at, waits = self._in_arguments(section, text, at, found)
            elif section.at == "name":
                at, waits = self._in_name(section, text, at, found)
            else:
                at, waits = self._between(section, text, at)
        return at

    def finish(self, section: NamedSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner. A call that was cut within its name is none; behind the name it has no arguments."""
        if section.at == "name" and tail and self._body.separator.startswith(tail):
            self._open(section, found)

    def _between(self, section: NamedSection, text: str, at: int) -> tuple[int, bool]:
        hit = self._around.find(text, at)
        if hit is None:
            return len(text), False
        if not hit.whole:
            return hit.start, True
        if text[hit.start : hit.end] == self._body.call:
            section.at = "name"
        else:
            section.done = True
        return hit.end, False

    def _in_name(self, section: NamedSection, text: str, at: int, found: Found) -> tuple[int, bool]:
        hit = self._behind_name.find(text, at)
        end = len(text) if hit is None else hit.start
        if len(section.raw) + end - at > MAX_NAME:
            section.at, section.raw = "between", ""
            return end, False
        section.raw += text[at:end]
        if hit is None or not hit.whole:
            return end, hit is not None
        self._open(section, found)
        marker = text[hit.start : hit.end]
        section.at = "arguments"
        return hit.end if marker == self._body.separator else hit.start, False

    def _in_arguments(self, section: NamedSection, text: str, at: int, found: Found) -> tuple[int, bool]:
        at = self._arguments.read(section.arguments, text, at, found if section.announced else Found())
        if section.arguments.at == "over":
            section.at, section.arguments = "between", ArgumentsState()
            return at, False
        return at, at < len(text)

    def _open(self, section: NamedSection, found: Found) -> None:
        """Announce the call. One without a name is passed over, arguments and all."""
        raw, section.raw = section.raw, ""
        if self._body.before_name:
            raw = raw.rpartition(self._body.before_name)[2]
        found_name = _NAME.match(raw)
        name, call_id = found_name[1].strip() if found_name else "", None
        if self._body.numbered and (parts := _NUMBERED.fullmatch(name)):
            name, call_id = parts[1], name if parts[2] else None
        section.announced = bool(name)
        if name:
            found.open_call(name, id=call_id)
