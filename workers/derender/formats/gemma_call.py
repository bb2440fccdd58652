"""Scanner for tool calls as Gemma writes them: `call:f{city:<|"|>Paris<|"|>,days:[1,2]}`.

Keys are bare, strings stand between delimiters and have no escapes. Arguments become JSON while they come in. The end
marker counts everywhere but inside a string; what is no call is skipped.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from headrace.workers.derender.formats.bodies import GemmaBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.schema import ANY, TEXT, Kinds, json_begun, json_of, kinds_of

WINDOW: Final = 128
"""Characters of a name, a key or a value that is no string. A longer value is text; of a longer key the end counts."""
MAX_DEPTH: Final = 200
"""Containers within each other. What is deeper is left out."""
MAX_KEPT: Final = 1 << 16
"""Characters of a string that may wait for its end to become another type. A longer one is a string."""

At = Literal["head", "key", "value", "string", "text", "after"]


class GemmaSection(Struct, omit_defaults=True, tag="gemma", tag_field="body"):
    """Where in a section of calls the scanner is: `at` names what comes next, `within` the open brackets."""

    done: bool = False
    refused: str = ""
    at: At = "head"
    within: Annotated[str, Meta(max_length=MAX_DEPTH, pattern=r"^[{\[(]*$")] = ""
    begun: bool = False
    """The innermost container has a member."""
    name: Annotated[str, Meta(max_length=WINDOW)] = ""
    key: Annotated[str, Meta(max_length=WINDOW)] = ""
    """The argument that is being read."""
    kept: Annotated[str, Meta(max_length=MAX_KEPT)] | None = None
    """A string that may become another type at its end."""


_CLOSES: Final = {"{": "}", "[": "]", "(": "}"}
_NAME: Final = r"[\w.\-]+"
_BLANK: Final = re.compile(r"\s*")
_HEAD: Final = re.compile(rf"(?:call\s*:|:)?\s*({_NAME})\s*([{{(])")
_HEAD_BEGUN: Final = re.compile(rf"(?:call\s*:|:)?\s*(?:{_NAME}\s*)?\Z")
_NO_CALL: Final = re.compile(rf"{_NAME}|[\s\S]")
_KEY: Final = re.compile(r"([^:,{}\[\]]+):")
_KEY_BEGUN: Final = re.compile(r"[^:,{}\[\]]*\Z")
_VALUES: Final = {kind: re.compile(rf"[^,}}\]{')' if kind == '(' else ''}]*") for kind in _CLOSES}


class GemmaCalls:
    """The scanner. Holds no state of a stream."""

    def __init__(self, body: GemmaBody) -> None:
        self.end = body.end
        self.quote = body.quote
        self.typed = body.typed
        quote = re.escape(body.quote)
        self.quoted_key = re.compile(rf"{quote}(.*?){quote}\s*:", re.DOTALL)
        self.text_end = re.compile(rf"[,}}\]]|{re.escape(body.end)}")
        self._marks = Markers([body.end, body.quote])

    def begin(self, marker: str) -> GemmaSection:
        """See CallScanner."""
        return GemmaSection()

    def feed(self, section: GemmaSection, text: str, at: int, found: Found, declared: Declared) -> int:
        """See CallScanner. The end of the text may be the start of a marker or a delimiter."""
        return _Reading(self, section, text, self._marks.tail(text, at), found, declared).read(at)

    def finish(self, section: GemmaSection, tail: str, found: Found, declared: Declared) -> None:
        """See CallScanner. A value that was cut is passed on as far as it can be."""
        reading = _Reading(self, section, tail, len(tail), found, declared, final=True)
        reading.read(0)
        if section.kept:
            found.add_arguments(json_begun(section.kept, reading.kinds()))


class _Reading:
    """One piece of text, to `stop`, on its way into `found`. `final`: no more text comes behind it."""

    def __init__(
        self,
        scanner: GemmaCalls,
        section: GemmaSection,
        text: str,
        stop: int,
        found: Found,
        declared: Declared,
        *,
        final: bool = False,
    ) -> None:
        self.scanner = scanner
        self.section = section
        self.text = text
        self.stop = stop
        self.found = found
        self.declared = declared
        self.final = final
        self.waiting = False

    def read(self, at: int) -> int:
        """Read on from `at`, and say up to where."""
        section, text, end = self.section, self.text, self.scanner.end
        while at < self.stop and not section.done and not self.waiting:
            if section.at == "string":
                at = self._string(at)
                continue
            if section.at != "text" and (blank := _BLANK.match(text, at, self.stop)):
                at = blank.end()
            if text.startswith(end, at):
                self._end()
                return at + len(end)
            if at < self.stop:
                at = self._step(at)
        return at

    def kinds(self) -> Kinds:
        """The types that the value which is being read may have."""
        section = self.section
        schema = self.declared.parameter(section.name, section.key) if len(section.within) == 1 else None
        return ANY if schema is None else kinds_of(schema, self.declared.parameters(section.name))

    def _step(self, at: int) -> int:
        match self.section.at if self.section.within else "head":
            case "key":
                return self._key(at)
            case "value":
                return self._value(at)
            case "after":
                return self._after(at)
            case "text":
                return self._text(at)
            case _:
                return self._head(at)

    def _wait(self, at: int) -> int:
        """Leave the text from `at` on unread until there is more."""
        self.waiting = True
        return at

    def _window(self, at: int) -> tuple[int, bool]:
        """Where a lexeme from `at` on ends at the latest, and whether more text may change what it is."""
        end, marker = min(at + WINDOW, self.stop), self.scanner.end
        hit = self.text.find(marker, at, end + len(marker) - 1)
        return (end, not self.final and end < at + WINDOW) if hit < 0 else (hit, False)

    def _head(self, at: int) -> int:
        end, more = self._window(at)
        if head := _HEAD.match(self.text, at, end):
            section = self.section
            section.name, section.within, section.begun, section.at = head[1], head[2], False, "key"
            self.found.open_call(head[1], "{")
            return head.end()
        if more and _HEAD_BEGUN.match(self.text, at, end):
            return self._wait(at)
        other = _NO_CALL.match(self.text, at, end)
        return other.end() if other else end

    def _key(self, at: int) -> int:
        section, scanner, text = self.section, self.scanner, self.text
        if text[at] in ",)]}":
            return self._after(at)
        if quoted := text.startswith(scanner.quote, at):
            end = min(at + WINDOW, self.stop)
            more = not self.final and end < at + WINDOW
            key = scanner.quoted_key.match(text, at, end)
        else:
            end, more = self._window(at)
            key = _KEY.match(text, at, end)
        if key:
            name = key[1] if quoted else key[1].strip()
            self.found.add_arguments(f"{', ' if section.begun else ''}{encode_basestring(name)}: ")
            section.begun, section.at = True, "value"
            section.key = name if len(section.within) == 1 else section.key
            return key.end()
        if quoted or _KEY_BEGUN.match(text, at, end):
            return self._wait(at) if more else at + len(scanner.quote) if quoted else end
        return at + 1

    def _value(self, at: int) -> int:
        section, text, quote = self.section, self.text, self.scanner.quote
        if text[at] in ",)]}":
            self._absent()
            return at
        if text.startswith(quote, at):
            self._member()
            self._begin_string()
            return at + len(quote)
        if text[at] in "{[" and len(section.within) < MAX_DEPTH:
            self._member()
            self.found.add_arguments(text[at])
            section.within, section.begun = section.within + text[at], False
            section.at = "key" if text[at] == "{" else "value"
            return at + 1
        return self._bare(at)

    def _absent(self) -> None:
        """Where a value was due there is none."""
        if self.section.at == "value" and not self.section.within.endswith("["):
            self.found.add_arguments("null")
        self.section.at = "after"

    def _end(self) -> None:
        """The calls end here, and so does whatever is open."""
        section = self.section
        self._absent()
        self.found.add_arguments("".join(_CLOSES[kind] for kind in reversed(section.within)))
        section.done, section.within = True, ""

    def _bare(self, at: int) -> int:
        section = self.section
        end, more = self._window(at)
        value = _VALUES[section.within[-1]].match(self.text, at, end)
        edge = value.end() if value else end
        if edge == end and more:
            return self._wait(at)
        if edge == at + WINDOW or edge == at:
            self._member()
            self.found.add_arguments('"')
            section.at = "text"
            return at
        written = json_of(self.text[at:edge].strip(), self.kinds())
        if edge < self.stop or not self.final or written[0] != '"':
            self._member()
            self.found.add_arguments(written)
            section.at = "after"
        return edge

    def _text(self, at: int) -> int:
        """A value without delimiters that is too long to be anything but text."""
        hit = self.scanner.text_end.search(self.text, at, self.stop)
        edge = hit.start() if hit else self.stop
        self.found.add_arguments(encode_basestring(self.text[at:edge])[1:-1])
        if hit:
            self.found.add_arguments('"')
            self.section.at = "after"
        return edge

    def _begin_string(self) -> None:
        """A string whose parameter may be of another type waits for its end."""
        self.section.at = "string"
        if self.scanner.typed and self.kinds() != TEXT:
            self.section.kept = ""
        else:
            self.found.add_arguments('"')

    def _string(self, at: int) -> int:
        section, quote = self.section, self.scanner.quote
        hit = self.text.find(quote, at, self.stop)
        edge = hit if hit >= 0 else self.stop
        self._say(self.text[at:edge])
        if hit < 0:
            return edge
        self.found.add_arguments('"' if section.kept is None else json_of(section.kept, self.kinds()))
        section.kept, section.at = None, "after"
        return edge + len(quote)

    def _say(self, text: str) -> None:
        section = self.section
        if section.kept is not None:
            if len(section.kept) + len(text) <= MAX_KEPT:
                section.kept += text
                return
            self.found.add_arguments(f'"{encode_basestring(section.kept)[1:-1]}')
            section.kept = None
        self.found.add_arguments(encode_basestring(text)[1:-1])

    def _after(self, at: int) -> int:
        """Behind a member: a bracket closes the innermost container, whatever its kind."""
        section, mark = self.section, self.text[at]
        if mark == ")" and section.within[-1] != "(":
            return at + 1
        if mark not in ")]}":
            section.at = "value" if section.within[-1] == "[" else "key"
            return at + 1 if mark == "," else at
        self.found.add_arguments(_CLOSES[section.within[-1]])
        section.within, section.begun = section.within[:-1], True
        section.at = "after" if section.within else "head"
        return at + 1

    def _member(self) -> None:
        section = self.section
        if section.within[-1] == "[":
            self.found.add_arguments(", " if section.begun else "")
            section.begun = True
