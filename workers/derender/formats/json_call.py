"""Scanner for tool calls written as JSON: `{"name": ..., "arguments": {...}}`, one object, several, or a list of them.

Arguments are passed on as the model wrote them, while they come in; nothing is read twice. JSON's own punctuation is
not insisted on (a missing colon or comma is not a lost call), and an object that is none is skipped to its closing
brace. A marker of the format ends everything that it comes in, but for a string.

A start that other text has too is held until it is sure to be a call: until its name and arguments have begun, or
its name is a declared tool's and it ends there.
"""

from __future__ import annotations

import re
from typing import Final

from headrace.workers.derender.formats.argument_text import NOTHING, said, written
from headrace.workers.derender.formats.bodies import JsonBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.json_section import MAX_KEPT, MAX_NAME, JsonSection, Reading
from headrace.workers.derender.formats.json_string import string_of
from headrace.workers.derender.formats.json_value import JsonValue, ValueState
from headrace.workers.derender.formats.markers import Markers

_BLANK: Final = re.compile(r"[\s,:;]*")
_WRAPPER: Final = "function"
"""The key of a call within its object, as requests declare tools."""


class JsonCalls:
    """The scanner. Holds no state of a stream.

    `starts`: markers that begin a section, and so end the one before. `bare`: starts that are content, and so is what
    follows them, if that is no call. `tentative`: what follows any start is. `section`: the kind of the states.
    """

    def __init__(
        self,
        body: JsonBody,
        starts: tuple[str, ...] = (),
        bare: tuple[str, ...] = (),
        *,
        tentative: bool = False,
        section: type[JsonSection] = JsonSection,
    ) -> None:
        self._body = body
        self._bare = bare
        self._tentative = tentative
        self._section = section
        self._cuts = (*body.ends, *starts)
        header = (body.header.id, body.header.arguments) if body.header else ()
        self._id_mark, self._arguments_mark = header or ("", "")
        self._tails = Markers((*self._cuts, *header)) if self._cuts or header else None
        self._value = JsonValue(self._cuts)
        self._lost = JsonValue(self._cuts, in_strings=True)
        self._call = re.compile("|".join(["{", *map(re.escape, self._cuts)]))
        self._header = re.compile("|".join(["{", *map(re.escape, (*self._cuts, *header))]))

    def begin(self, marker: str) -> JsonSection:
        """See CallScanner. Brackets at a marker's end are open already."""
        return self._section(
            unsure=None if not self._tentative else marker if marker in self._bare else "",
            at="key" if marker.endswith("{") else "calls",
            listed=marker.rstrip(" \n{").endswith("["),
        )

    def feed(self, call: JsonSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner. Only the end of the text may be the start of a marker; in a string it is not."""
        start, held = at, len(call.unsure or "")
        calm = self._tails.tail(text, at) if self._tails else len(text)
        while not call.done:
            stop = len(text) if at >= calm and call.value.quoted and call.reading != "lost" else calm
            if call.unsure is not None:
                stop = min(stop, start + call.room - held)
            if at >= stop:
                break
            at = self._step(call, text, at, stop, found, declared)
        if call.unsure is not None:
            call.unsure += text[start:at]
            if call.done or len(call.unsure) >= call.room:
                call.refuse()
        return at

    def finish(self, call: JsonSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner. A bracket in the tail is not the start of a marker but JSON."""
        at = 0
        while call.reading and not call.done and at < len(tail) and tail[0] == "[":
            at = self._step(call, tail, at, len(tail), found, declared)
        if call.at == "name":
            call.name = call.raw.strip()
        if call.at == "id" and call.name:
            self._open(call, call.name, found)
        elif call.name:
            self._settle(call, found, declared)
        if call.unsure is not None:
            call.unsure += tail
            call.refuse()

    def _step(self, call: JsonSection, text: str, at: int, stop: int, found: Found, declared: Declared) -> int:
        if call.reading:
            return self._inside(call, text, at, stop, found, declared)
        if call.at in ("name", "id"):
            return self._in_header(call, text, at, stop, found)
        blank = _BLANK.match(text, at, stop)
        at = blank.end() if blank else at
        if at == stop:
            return at
        if self._cuts and text.startswith(self._cuts, at):
            return self._cut(call, text, at, found, declared)
        if call.at == "calls":
            return self._between_calls(call, text, at, stop)
        return self._between_members(call, text, at, found, declared)

    def _between_calls(self, call: JsonSection, text: str, at: int, stop: int) -> int:
        character = text[at]
        if character == "{":
            call.at = "key"
        elif character == "[" and not call.listed:
            call.listed = True
        elif character == "}" and call.listed:
            return at + 1
        elif self._body.header and not call.listed:
            call.at = "name"
            return at
        elif self._body.ends:
            match = self._call.search(text, at, stop)
            return match.start() if match else stop
        else:
            call.done = True
            return at + (character == "]" and call.listed and call.unsure is None)
        return at + 1

    def _in_header(self, call: JsonSection, text: str, at: int, stop: int, found: Found) -> int:
        """Within the name or the id that stands before the arguments."""
        stop = min(stop, at + MAX_NAME + 1 - len(call.raw))
        match = self._header.search(text, at, stop)
        end = match.start() if match else stop
        call.raw += text[at:end]
        if len(call.raw) > MAX_NAME:
            call.done, call.raw = True, ""
        elif match:
            part, call.raw = call.raw.strip(), ""
            call.name, call.id = (part, call.id) if call.at == "name" else (call.name, part)
            if match[0] == self._id_mark:
                call.at = "id"
                return match.end()
            call.at, call.done = "arguments", not call.name
            if call.name:
                self._open(call, call.name, found)
            return match.end() if match[0] == self._arguments_mark else end
        return end

    def _between_members(self, call: JsonSection, text: str, at: int, found: Found, declared: Declared) -> int:
        character = text[at]
        if call.at == "arguments":
            if character not in '{["':
                self._close(call, found, declared)
                return at
            call.reading, call.argued = "arguments", True
        elif character == "}":
            self._close(call, found, declared)
            return at + 1
        elif call.at == "value" and character == "{" and self._wraps(call):
            call.at, call.raw = "key", ""
            return at + 1
        elif call.at == "value":
            call.reading, call.raw = self._part(call, found), ""
        elif character == '"':
            call.reading = "key"
        else:
            self._lose(call)
            return at
        call.value, call.written = (
            self._value.begin(character),
            written(character) if call.reading == "arguments" else "",
        )
        return at

    def _wraps(self, call: JsonSection) -> bool:
        """Whether the call is the value of this member."""
        known = call.announced or call.name or call.argued
        return call.raw == _WRAPPER and not (known or self._body.keyed)

    def _part(self, call: JsonSection, found: Found) -> Reading:
        """What the value of the member with this key is."""
        key, body = call.raw, self._body
        if body.keyed and key:
            self._open(call, key, found)
        elif key in body.name_keys and not call.announced and not call.name:
            return "name"
        elif key in body.id_keys:
            return "id"
        elif key not in body.argument_keys or call.argued:
            return "other"
        elif call.name:
            self._open(call, call.name, found)
        call.argued = True
        return "arguments"

    def _inside(self, call: JsonSection, text: str, at: int, stop: int, found: Found, declared: Declared) -> int:
        if call.reading == "arguments" and not call.announced:
            stop = min(stop, at + MAX_KEPT + 1 - len(call.kept))  # too much is found out at its first character
        value = self._lost if call.reading == "lost" else self._value
        end, whole = value.end(call.value, text, at, stop)
        if call.reading == "arguments" and not self._argue(call, text[at:end], whole or end < stop, found):
            self._lose(call, within=call.value)
        elif call.reading in ("key", "name", "id"):
            call.raw += text[at:end]
            if len(call.raw) > MAX_NAME:
                call.reading, call.raw = "other", ""
            if whole:
                self._finish_text(call, found)
        elif whole:
            self._finish_value(call, found, declared)
        if end < stop and not whole:
            return self._cut(call, text, end, found, declared)
        return end

    def _argue(self, call: JsonSection, piece: str, whole: bool, found: Found) -> bool:
        """Pass more arguments on, or keep them; false where they are too long for that."""
        piece = said(call, piece, whole)
        if call.announced:
            found.add_arguments(piece)
        elif len(call.kept) + len(piece) > MAX_KEPT:
            return False
        else:
            call.kept += piece
        return True

    def _finish_text(self, call: JsonSection, found: Found) -> None:
        """A key, a name or an id has come to its end."""
        reading, text = call.reading, string_of(call.raw) or ""
        call.at, call.raw = ("value", text) if call.at == "key" else ("key", "")
        call.reading, call.value = "", ValueState()
        if reading == "id":
            call.id = text
        elif reading == "name" and not text:
            self._lose(call)
        elif reading == "name" and call.unsure is not None and not call.argued:
            call.name = text
        elif reading == "name":
            self._open(call, text, found)

    def _finish_value(self, call: JsonSection, found: Found, declared: Declared) -> None:
        """Arguments, another value, a key that was too long or a lost object have come to their end."""
        reading, call.reading, call.value = call.reading, "", ValueState()
        if reading == "lost" or call.at == "arguments":
            self._close(call, found, declared)
            return
        call.at, call.raw = "value" if call.at == "key" else "key", ""
        if reading == "arguments" and self._body.keyed:
            call.announced = call.argued = False

    def _open(self, call: JsonSection, name: str, found: Found) -> None:
        found.open_call(name, call.kept, call.id or None)
        call.announced, call.unsure, call.kept, call.name, call.id = True, None, "", "", ""

    def _lose(self, call: JsonSection, within: ValueState | None = None) -> None:
        """The object is no call after all: skip to its end, from between its members or from within a value."""
        call.kept = call.raw = call.name = ""
        call.reading, call.done = "lost", call.unsure is not None
        call.value = ValueState("nested", 1) if within is None else within
        if within is not None:
            call.value.kind, call.value.depth = "nested", within.depth + 1

    def _settle(self, call: JsonSection, found: Found, declared: Declared) -> None:
        """Nothing more belongs to the call. A declared tool's name is one without arguments, too."""
        if call.name in declared.names:
            self._open(call, call.name, found)
        if call.announced and not call.argued:
            found.add_arguments(NOTHING)

    def _close(self, call: JsonSection, found: Found, declared: Declared) -> None:
        """A call is over."""
        self._settle(call, found, declared)
        call.at, call.raw, call.name, call.id, call.kept = "calls", "", "", "", ""
        call.announced = call.argued = False
        call.done = call.unsure is not None or not (call.listed or self._body.ends)

    def _cut(self, call: JsonSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """A marker ends the calls."""
        self._settle(call, found, declared)
        call.done = True
        return at + len(next((end for end in self._body.ends if text.startswith(end, at)), ""))
