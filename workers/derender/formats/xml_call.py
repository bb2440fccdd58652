"""Scanner for tool calls written as tags: one with the function's name, and within it one for each parameter.

Parameters have no types in the markup: the tool's schema says what their text is (schema.py). A string is passed on
while it comes in, any other value when it is complete. Nothing in a value is escaped, so markup in it is text unless
it ends the value: its own end tag does, the next parameter's tag, and the end of the call, if more of the section or
nothing at all stands behind it.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring as quoted
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from headrace.workers.derender.formats.bodies import XmlBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Hit, Markers
from headrace.workers.derender.formats.schema import ANY, TEXT, Kinds, json_begun, json_of, kinds_of

MAX_NAME: Final = 1024
"""Characters of a tag's head, which has the name of a function or parameter. Longer ones make it unreadable."""
MAX_KEPT: Final = 1 << 18
"""Characters of a value that may wait for its end. A longer one is a string, whatever the schema says."""
MAX_BLANK: Final = 64
"""White space that may stand between the end of a call and what follows it, to tell that end from text."""

At = Literal["outside", "name", "inside", "key", "gap", "value"]
Role = Literal["start", "call", "name_end", "param", "key_end", "value", "value_end", "call_end", "end"]


class XmlSection(Struct, omit_defaults=True, tag="xml", tag_field="body"):
    """Where in a section of calls the scanner is."""

    done: bool = False
    refused: Literal[""] = ""
    at: At = "outside"
    """Outside of a call, in its name, between its parameters, in a key, in the gap behind one, in a value."""
    head: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The name or key so far; behind it, the key itself."""
    function: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The open call's; empty where none is open, or one that cannot be passed on."""
    argued: bool = False
    text: bool = False
    """The value is a string, passed on while it comes in."""
    begun: bool = False
    kept: Annotated[str, Meta(max_length=MAX_KEPT)] = ""


_PLACES: Final[dict[Role, At]] = {
    "start": "outside",
    "call": "name",
    "name_end": "inside",
    "param": "key",
    "key_end": "value",
    "value": "value",
    "value_end": "inside",
    "call_end": "outside",
    "end": "outside",
}
"""Where each role of a marker leads."""
_BETWEEN_CALLS: Final = frozenset({"start", "call", "call_end", "end"})
_WITH_VALUE: Final = frozenset({"key_end", "value"})
_UNREADABLE: Final[dict[At, At]] = {"name": "outside", "key": "inside"}
_BLANK: Final = re.compile(rf"\s{{0,{MAX_BLANK}}}")
_HEAD: Final = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|["']?([^\s"']*))""")


class XmlCalls:
    """The scanner. `starts`: what begins a section. Holds no state of a stream."""

    def __init__(self, body: XmlBody, starts: tuple[str, ...]) -> None:
        self._body = body
        self._roles = _roles(body, starts)
        self._markers = {at: Markers(roles) for at, roles in self._roles.items()}
        self._places: dict[Role, At] = {**_PLACES, "key_end": "gap"} if body.value else _PLACES
        self._behind_call = tuple(filter(None, (*starts, body.call, body.end)))
        self._longest = max(map(len, self._behind_call))
        self._lead, self._tail = body.around
        self._tails = tuple(self._tail[:size] for size in range(len(self._tail), 0, -1))

    def begin(self, marker: str) -> XmlSection:
        """See CallScanner."""
        return XmlSection(at="name" if marker == self._body.call else "outside")

    def feed(self, call: XmlSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner."""
        return self._read(call, text, at, found, declared, last=False)

    def finish(self, call: XmlSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner. A tail that may be the start of a marker is no text of the value that was cut."""
        self._read(call, tail, 0, found, declared, last=True)
        if call.at == "value" and not call.text and call.kept.strip():
            self._say_key(call, found)
            self._say(call, json_begun(call.kept, self._kinds(call, declared)), found)

    def _read(self, call: XmlSection, text: str, at: int, found: Found, declared: Declared, *, last: bool) -> int:
        while at < len(text) and not call.done:
            hit = self._next(call, text, at, last)
            end = len(text) if hit is None else hit.start
            if hit is None or not hit.whole:
                end -= self._waiting(call, text, at, end)
                self._take(call, text[at:end], found)
                return end
            if self._take(call, text[at:end], found, ended=True):
                self._meet(call, self._roles[call.at][text[end : hit.end]], found, declared)
                end = hit.end
            at = end
        return at

    def _next(self, call: XmlSection, text: str, at: int, last: bool) -> Hit | None:
        """The next marker. In a value the end of a call is one if what stands behind it says so."""
        roles, markers = self._roles[call.at], self._markers[call.at]
        hit = markers.find(text, at)
        while hit and hit.whole and call.at == "value" and roles[text[hit.start : hit.end]] in _BETWEEN_CALLS:
            ends = self._ends_call(text, hit.end, last)
            if ends is None:
                return Hit(hit.start, len(text), whole=False)
            if ends:
                return hit
            hit = markers.find(text, hit.end)
        return hit

    def _ends_call(self, text: str, at: int, last: bool) -> bool | None:
        """Whether what stands here is the section's, or the end of the output. None: more text decides."""
        blank = _BLANK.match(text, at)
        at = blank.end() if blank else at
        if text.startswith(self._behind_call, at):
            return True
        rest = text[at : at + self._longest]
        open_end = any(marker.startswith(rest) for marker in self._behind_call)
        return (last or None) if open_end else False

    def _waiting(self, call: XmlSection, text: str, at: int, end: int) -> int:
        """How many of the last characters wait, because they may be what stands around a value."""
        if call.at != "value":
            return 0
        if not call.begun and end - at < len(self._lead) and self._lead.startswith(text[at:end]):
            return end - at
        if not text.endswith(self._tails, at, end):
            return 0
        return next(len(tail) for tail in self._tails if text.endswith(tail, at, end))

    def _take(self, call: XmlSection, piece: str, found: Found, *, ended: bool = False) -> bool:
        """Read what is no marker. False if that is no longer what was being read."""
        if call.at == "value":
            self._take_value(call, piece, found, ended=ended)
        elif call.at in _UNREADABLE:
            call.head += piece
            if len(call.head) > MAX_NAME:
                call.head, call.at = "", _UNREADABLE[call.at]
                return False
        return True

    def _take_value(self, call: XmlSection, piece: str, found: Found, *, ended: bool) -> None:
        first, call.begun = not call.begun, call.begun or bool(piece)
        piece = piece.removeprefix(self._lead) if first else piece
        piece = piece.removesuffix(self._tail) if ended else piece
        if call.text:
            self._say(call, quoted(piece)[1:-1], found)
            return
        call.kept += piece
        if len(call.kept) > MAX_KEPT:
            self._say_key(call, found)
            self._say(call, quoted(call.kept)[:-1], found)
            call.text, call.kept = True, ""

    def _meet(self, call: XmlSection, role: Role, found: Found, declared: Declared) -> None:
        """Go where a marker leads."""
        left, call.at, attributes = call.at, self._places[role], ""
        if left == "name":
            self._open(call, found)
        elif left == "value":
            self._end_value(call, found, declared)
        if role in _BETWEEN_CALLS:
            self._close(call, found)
            call.done = role == "end"
        if role not in _WITH_VALUE:
            call.head = ""
            return
        if left == "key":
            call.head, attributes = self._named(call.head)
        if not call.head:
            call.at = "inside"
        elif call.at == "value":
            self._begin_value(call, attributes, found, declared)

    def _open(self, call: XmlSection, found: Found) -> None:
        call.function, _ = self._named(call.head)
        call.head = ""
        if call.function:
            found.open_call(call.function)

    def _close(self, call: XmlSection, found: Found) -> None:
        self._say(call, "}" if call.argued else "{}", found)
        call.function, call.argued = "", False

    def _begin_value(self, call: XmlSection, attributes: str, found: Found, declared: Declared) -> None:
        kinds, mark = self._kinds(call, declared), self._body.text_mark
        marked = bool(mark) and mark in attributes
        call.text = kinds == TEXT or (marked and ("string" in kinds or kinds == ANY))
        if call.text:
            self._say_key(call, found)
            self._say(call, '"', found)

    def _end_value(self, call: XmlSection, found: Found, declared: Declared) -> None:
        if call.text:
            self._say(call, '"', found)
        else:
            self._say_key(call, found)
            self._say(call, json_of(call.kept, self._kinds(call, declared)), found)
        call.text, call.begun, call.kept = False, False, ""

    def _say_key(self, call: XmlSection, found: Found) -> None:
        self._say(call, f"{', ' if call.argued else '{'}{quoted(call.head)}: ", found)
        call.argued = True

    def _say(self, call: XmlSection, arguments: str, found: Found) -> None:
        if call.function:
            found.add_arguments(arguments)

    def _kinds(self, call: XmlSection, declared: Declared) -> Kinds:
        schema = declared.parameter(call.function, call.head)
        if schema is None:
            return ANY if self._body.text_mark else TEXT
        return kinds_of(schema, declared.parameters(call.function))

    def _named(self, head: str) -> tuple[str, str]:
        """The name in a tag's head, and the attributes behind it."""
        match = _HEAD.match(head) if self._body.attributes else None
        if match is None:
            return head.strip(), ""
        return match[match.lastindex or 0].strip(), head[match.end() :]


def _roles(body: XmlBody, starts: tuple[str, ...]) -> dict[At, dict[str, Role]]:
    """What each marker means in each place, where it means anything."""
    param: dict[str, Role] = {body.param: "param"}
    value: dict[str, Role] = {body.value: "value"} if body.value else {}
    value_end: dict[str, Role] = {body.value_end: "value_end"}
    ends: dict[str, Role] = {body.call_end: "call_end", body.end: "end"} if body.end else {body.call_end: "end"}
    between: dict[str, Role] = {**dict.fromkeys(starts, "start"), body.call: "call", **ends}
    return {
        "outside": {body.call: "call", body.end or body.call_end: "end"},
        "name": {**between, **param, **value, **({body.name_end: "name_end"} if body.name_end else {})},
        "inside": {**between, **param},
        "key": {**between, **param, **value, **value_end, body.key_end: "key_end"},
        "gap": {**between, **param, **value},
        "value": {**ends, **value_end, **({} if body.value else param)},
    }
