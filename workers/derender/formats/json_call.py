"""Scanner for a tool call written as one JSON object: `{"name": ..., "arguments": {...}}`.

Arguments are passed on as the model wrote them, while they come in; nothing is read twice. The object's own
punctuation is not insisted on (a missing colon or comma is not a lost call). Its end marker counts everywhere but
inside a string.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.tools import ToolFormat

MAX_NAME: Final = 1024
"""Characters of a key or a name, as JSON text. Longer ones make the call unreadable."""
MAX_KEPT: Final = 1 << 20
"""Characters of arguments that may wait for a name that comes after them."""

At = Literal["open", "key", "value", "closed", "lost"]
Reading = Literal["", "key", "name", "arguments", "other"]
Kind = Literal["", "string", "nested", "scalar"]


class CallState(Struct, omit_defaults=True):
    """Where in a call the scanner is: between the object's parts (`at`), or inside a value (`reading`)."""

    at: At = "open"
    reading: Reading = ""
    kind: Kind = ""
    depth: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    quoted: bool = False
    escaped: bool = False
    raw: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The key or name so far, as JSON text; between key and value the key itself."""
    kept: Annotated[str, Meta(max_length=MAX_KEPT)] = ""
    announced: bool = False
    argued: bool = False
    done: bool = False


_BLANK: Final = re.compile(r"[\s,:]*")
_IN_STRING: Final = re.compile(r'["\\]')
_IN_NESTED: Final = re.compile(r'["{}\[\]<]')
_IN_SCALAR: Final = re.compile(r'["{}\[\],<]')
_KINDS: Final[dict[str, Kind]] = {'"': "string", "{": "nested", "[": "nested"}


class JsonCall:
    """The scanner. Holds no state of a stream."""

    def __init__(self, tools: ToolFormat) -> None:
        self._tools = tools
        self._end = Markers([tools.end])

    def feed(self, call: CallState, index: int, text: str, start: int, found: Found) -> int:
        """Read on from `start` and say up to where: behind the call's end, or before a tail to be seen again.

        Only the end of the text may be the start of the end marker. Inside a string it is not, so it is read then.
        """
        hit = self._end.find(text, max(start, len(text) - len(self._tools.end) + 1))
        stop = hit.start if hit is not None and not hit.whole else len(text)
        at = self._read(call, index, text, start, stop, found)
        if call.quoted and at == stop:
            at = self._read(call, index, text, at, len(text), found)
        return at

    def _read(self, call: CallState, index: int, text: str, at: int, stop: int, found: Found) -> int:
        while at < stop and not call.done:
            if call.reading:
                at = self._inside(call, index, text, at, stop, found)
            elif call.at in ("closed", "lost"):
                at = self._to_end(call, text, at, stop)
            else:
                at = self._between(call, text, at, stop)
        if call.done:
            self.finish(call, index, found)
        return at

    def finish(self, call: CallState, index: int, found: Found) -> None:
        """No more text comes: a call that was written to its end without arguments gets empty ones."""
        if call.announced and not call.argued and (call.done or call.at == "closed"):
            call.argued = True
            found.add_arguments(index, "{}")

    def _between(self, call: CallState, text: str, at: int, stop: int) -> int:
        blank = _BLANK.match(text, at, stop)
        at = blank.end() if blank else at
        if at == stop:
            return at
        if text.startswith(self._tools.end, at):
            return self._to_end(call, text, at, stop)
        character = text[at]
        if call.at == "open":
            call.at = "key" if character == "{" else "lost"
            return at + 1
        if character == "}":
            call.at = "closed"
            return at + 1
        if call.at == "key" and character != '"':
            call.at = "lost"
            return at
        call.reading = "key" if call.at == "key" else self._part(call)
        call.kind, call.depth, call.quoted, call.raw = _KINDS.get(character, "scalar"), 0, False, ""
        return at

    def _part(self, call: CallState) -> Reading:
        if call.raw in self._tools.name_keys and not call.announced:
            return "name"
        if call.raw in self._tools.argument_keys and not call.argued:
            call.argued = True
            return "arguments"
        return "other"

    def _inside(self, call: CallState, index: int, text: str, at: int, stop: int, found: Found) -> int:
        end, whole = _end_of_value(call, text, at, stop, self._tools.end)
        piece = text[at:end]
        if call.reading == "arguments":
            self._argue(call, index, piece, found)
        elif call.reading != "other":
            call.raw += piece
        if len(call.raw) > MAX_NAME or len(call.kept) > MAX_KEPT:
            call.reading, call.raw, call.kept, call.quoted, call.at = "", "", "", False, "lost"
            return end
        if whole:
            self._finish_value(call, index, found)
        elif end < stop:
            call.reading = ""
            return self._to_end(call, text, end, stop)
        return end

    def _argue(self, call: CallState, index: int, piece: str, found: Found) -> None:
        if call.announced:
            found.add_arguments(index, piece)
        else:
            call.kept += piece

    def _finish_value(self, call: CallState, index: int, found: Found) -> None:
        reading, call.reading, call.kind = call.reading, "", ""
        call.at = "value" if reading == "key" else "key"
        if reading not in ("key", "name"):
            return
        text = _string(call.raw)
        call.raw = ""
        if reading == "key":
            call.raw = text or ""
        elif text:
            call.announced = True
            found.add_call(index, text, call.kept)
            call.kept = ""
        else:
            call.at = "lost"

    def _to_end(self, call: CallState, text: str, at: int, stop: int) -> int:
        """Skip to behind the end marker. A call that is closed or lost has nothing else to say."""
        end = text.find(self._tools.end, at, stop)
        if end < 0:
            return stop
        call.done = True
        return end + len(self._tools.end)


def _end_of_value(call: CallState, text: str, at: int, stop: int, marker: str) -> tuple[int, bool]:
    """Where the value's text ends, and whether the value does; it also ends, unfinished, before the marker."""
    while at < stop:
        if call.escaped:
            call.escaped = False
            at += 1
            continue
        pattern = _IN_STRING if call.quoted else _IN_SCALAR if call.kind == "scalar" else _IN_NESTED
        match = pattern.search(text, at, stop)
        if match is None:
            return stop, False
        at, character = match.end(), match[0]
        if call.kind == "scalar":
            call.kind = _KINDS.get(character, "scalar")
        if character == "\\":
            call.escaped = True
        elif character == "<":
            if text.startswith(marker, at - 1):
                return at - 1, False
        elif call.kind == "scalar" and character in ",}]":
            return at - 1, True
        elif character == '"':
            call.quoted = not call.quoted
            if call.kind == "string" and not call.quoted:
                return at, True
        else:
            call.depth = max(call.depth + (1 if character in "{[" else -1), 0)
            if call.depth == 0:
                return at, True
    return at, False


def _string(raw: str) -> str | None:
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
