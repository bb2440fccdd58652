"""Scanner for tool calls written as one JSON object: `{"name": ..., "arguments": {...}}`.

Arguments are passed on as the model wrote them, while they come in; nothing is read twice. The object's own
punctuation is not insisted on (a missing colon or comma is not a lost call). Its end marker counts everywhere but
inside a string.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.json_value import JsonValue, ValueState, string_of
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.tools import JsonBody

MAX_NAME: Final = 1024
"""Characters of a key or a name, as JSON text. Longer ones make the call unreadable."""
MAX_KEPT: Final = 1 << 20
"""Characters of arguments that may wait for a name that comes after them."""

At = Literal["open", "key", "value", "closed", "lost"]
Reading = Literal["", "key", "name", "arguments", "other"]


class JsonSection(Struct, omit_defaults=True, tag="json", tag_field="body"):
    """Where in a call the scanner is: between the object's parts (`at`), or inside a value (`reading`)."""

    done: bool = False
    refused: str = ""
    at: At = "open"
    reading: Reading = ""
    value: ValueState = field(default_factory=ValueState)
    raw: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The key or name so far, as JSON text; between key and value the key itself."""
    kept: Annotated[str, Meta(max_length=MAX_KEPT)] = ""
    announced: bool = False
    argued: bool = False


_BLANK: Final = re.compile(r"[\s,:]*")


class JsonCalls:
    """The scanner. Holds no state of a stream."""

    def __init__(self, body: JsonBody) -> None:
        self._body = body
        self._end = Markers([body.end])
        self._value = JsonValue((body.end,))

    def begin(self, marker: str) -> JsonSection:
        """See CallScanner."""
        return JsonSection()

    def feed(self, call: JsonSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner. Only the end of the text may be the start of the end marker; in a string it is not."""
        hit = self._end.find(text, max(at, len(text) - len(self._body.end) + 1))
        stop = hit.start if hit is not None and not hit.whole else len(text)
        at = self._read(call, text, at, stop, found)
        if call.value.quoted and at == stop:
            at = self._read(call, text, at, len(text), found)
        return at

    def finish(self, call: JsonSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner. A call that was written to its end without arguments gets empty ones."""
        self._complete(call, found)

    def _read(self, call: JsonSection, text: str, at: int, stop: int, found: Found) -> int:
        while at < stop and not call.done:
            if call.reading:
                at = self._inside(call, text, at, stop, found)
            elif call.at in ("closed", "lost"):
                at = self._to_end(call, text, at, stop)
            else:
                at = self._between(call, text, at, stop)
        if call.done:
            self._complete(call, found)
        return at

    def _complete(self, call: JsonSection, found: Found) -> None:
        if call.announced and not call.argued and (call.done or call.at == "closed"):
            call.argued = True
            found.add_arguments("{}")

    def _between(self, call: JsonSection, text: str, at: int, stop: int) -> int:
        blank = _BLANK.match(text, at, stop)
        at = blank.end() if blank else at
        if at == stop:
            return at
        if text.startswith(self._body.end, at):
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
        call.value, call.raw = self._value.begin(character), ""
        return at

    def _part(self, call: JsonSection) -> Reading:
        if call.raw in self._body.name_keys and not call.announced:
            return "name"
        if call.raw in self._body.argument_keys and not call.argued:
            call.argued = True
            return "arguments"
        return "other"

    def _inside(self, call: JsonSection, text: str, at: int, stop: int, found: Found) -> int:
        end, whole = self._value.end(call.value, text, at, stop)
        piece = text[at:end]
        if call.reading == "arguments":
            self._argue(call, piece, found)
        elif call.reading != "other":
            call.raw += piece
        if len(call.raw) > MAX_NAME or len(call.kept) > MAX_KEPT:
            call.reading, call.raw, call.kept, call.value, call.at = "", "", "", ValueState(), "lost"
            return end
        if whole:
            self._finish_value(call, found)
        elif end < stop:
            call.reading, call.value = "", ValueState()
            return self._to_end(call, text, end, stop)
        return end

    def _argue(self, call: JsonSection, piece: str, found: Found) -> None:
        if call.announced:
            found.add_arguments(piece)
        else:
            call.kept += piece

    def _finish_value(self, call: JsonSection, found: Found) -> None:
        reading, call.reading, call.value = call.reading, "", ValueState()
        call.at = "value" if reading == "key" else "key"
        if reading not in ("key", "name"):
            return
        text = string_of(call.raw)
        call.raw = ""
        if reading == "key":
            call.raw = text or ""
        elif text:
            call.announced = True
            found.open_call(text, call.kept)
            call.kept = ""
        else:
            call.at = "lost"

    def _to_end(self, call: JsonSection, text: str, at: int, stop: int) -> int:
        """Skip to behind the end marker. A call that is closed or lost has nothing else to say."""
        end = text.find(self._body.end, at, stop)
        if end < 0:
            return stop
        call.done = True
        return end + len(self._body.end)
