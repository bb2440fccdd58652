"""The arguments of a call in Python, from behind its first bracket to its last, as JSON text while they come in.

What is neither a literal nor a container is passed on as text. The grammar is not insisted on: a quote that nothing
legal follows is part of its string, and a bracket closes whatever is open within it.

Text is read lexeme by lexeme. None but the text between quotes is longer than `WINDOW`, so the little that more text
has to decide is left unread and seen again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import islice
from json.encoder import encode_basestring
from typing import Final

from headrace.workers.derender.formats import python_text
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.python_json import CONTAINERS, MAX_DEPTH, WINDOW, CallState, Quote, Writer
from headrace.workers.derender.formats.schema import kinds_of

NAME: Final = r"[^\W\d][\w.\-]*"
_KEYWORD: Final = re.compile(rf"(?:\(\s*)?(?:({NAME})|(['\"])({NAME})\2)\s*[=:]")
_KEYWORD_BEGUN: Final = re.compile(rf"(?:\(\s*)?(?:{NAME}\s*|['\"](?:{NAME}(?:['\"]\s*)?)?)?\Z")
_MEMBERS: Final = re.compile(r"\*\*\s*\{")
_MEMBERS_BEGUN: Final = re.compile(r"\*\*?\s*\Z")
_PREFIX: Final = "[rRbBuUfFtT]{0,2}"
_STRING: Final = re.compile(rf"({_PREFIX})('''|\"\"\"|'|\")")
_STRING_BEGUN: Final = re.compile(rf"{_PREFIX}(?:''?|\"\"?)?\Z")
_JOINT: Final = re.compile(rf"\s+{_PREFIX}['\"]|['\"]")
_JOINT_BEGUN: Final = re.compile(rf"\s+{_PREFIX}\Z")
_ENDED: Final = re.compile(r"\s*(?:[,)\]}]|\Z)")
_ENDED_KEY: Final = re.compile(r"\s*(?:[,)\]}:=]|\Z)")
_BLANK: Final = re.compile(r"\s*\Z")
_RUN: Final = re.compile(r"[^,()\[\]{}'\"]*")
_KEY_RUN: Final = re.compile(r"[^,()\[\]{}'\":=]*")
_QUOTED: Final[dict[str, Quote]] = {"'": "'", '"': '"', "'''": "'''", '"""': '"""'}
_QUOTES: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}


class Reading:
    """One piece of text, to `stop`, on its way into `found`. `marker` ends the call wherever it is no string's part.

    `final`: no more text comes behind this piece.
    """

    def __init__(
        self,
        state: CallState,
        text: str,
        stop: int,
        found: Found,
        declared: Declared,
        *,
        marker: str = "",
        final: bool = False,
    ) -> None:
        self.state = state
        self.text = text
        self.stop = stop
        self.out = Writer(state, found)
        self.declared = declared
        self.marker = marker
        self.final = final
        self.waiting = False
        """The text from here on is to be seen again with more behind it."""

    def step(self, at: int) -> int:
        """Read the lexeme at `at`, within a call, and say where the next one begins."""
        match self.state.at:
            case "string":
                return self._string(at)
            case "after":
                return self._after(at)
            case "value":
                return self._value(at)
            case "argument":
                return self._argument(at)
            case "key":
                return self._key(at)
            case "colon":
                return self._colon(at)
            case "text":
                return self._text(at)
            case "joint":
                return self._joint(at)

    def close(self) -> None:
        """The calls end here, and so does whatever is open."""
        state = self.state
        if not state.within:
            return
        if state.at == "joint":
            self._end_string(0)
        if state.at == "colon":
            self.out.say(": ")
            state.at = "value"
        self._absent()
        while state.within:
            self.out.leave()

    def wait(self, at: int) -> int:
        """Leave the text from `at` on unread until there is more."""
        self.waiting = True
        return at

    def window(self, at: int) -> tuple[int, bool]:
        """Where a lexeme from `at` on ends at the latest, and whether more text may change what it is."""
        end = min(at + WINDOW, self.stop)
        if self.marker and (hit := self.text.find(self.marker, at, end + len(self.marker) - 1)) >= 0:
            return hit, False
        return end, not self.final and end < at + WINDOW

    def _argument(self, at: int) -> int:
        text, state = self.text, self.state
        if text[at] == ",":
            return at + 1
        if text[at] in ")]}":
            return self._close(at)
        end, more = self.window(at)
        if keyword := _KEYWORD.match(text, at, end):
            self.out.key(encode_basestring(keyword[1] or keyword[3]))
            return keyword.end() - 1
        if more and (_KEYWORD_BEGUN.match(text, at, end) or _MEMBERS_BEGUN.match(text, at, end)):
            return self.wait(at)
        if self.final and _KEYWORD_BEGUN.match(text, at, end):
            return end
        members = _MEMBERS.match(text, at, end)
        if members or (text[at] == "{" and not self._takes_object()):
            state.within, state.at = f"{state.within}k", "key"
            return members.end() if members else at + 1
        self.out.key(encode_basestring(self._place() or str(state.placed)))
        state.placed += 1
        return self._colon(at)

    def _place(self) -> str | None:
        """The parameter whose turn it is, if the request says so."""
        properties = self.declared.parameters(self.state.name).get("properties")
        names = properties if isinstance(properties, Mapping) else ()
        return next(islice(names, self.state.placed, None), None)

    def _takes_object(self) -> bool:
        name, place = self.state.name, self._place()
        schema = self.declared.parameter(name, place) if place else None
        return schema is not None and "object" in kinds_of(schema, self.declared.parameters(name))

    def _key(self, at: int) -> int:
        text, state = self.text, self.state
        if text[at] == ",":
            return at + 1
        if text[at] in ")]}":
            return self._close(at)
        end, more = self.window(at)
        if more and _STRING_BEGUN.match(text, at, end):
            return self.wait(at)
        if string := _STRING.match(text, at, end):
            self.out.say(', "' if state.begun else '"')
            state.begun = state.keyed = True
            return self._begin_string(string)
        run = _KEY_RUN.match(text, at, end)
        if run is None or run.end() == at:  # nothing that a key begins with
            return at + 1
        if run.end() == end and more:
            return self.wait(at)
        if run.end() < end or not self.final:
            self.out.key(python_text.key(run[0].strip()))
        return run.end()

    def _colon(self, at: int) -> int:
        self.out.say(": ")
        self.state.at = "value"
        return at + 1 if self.text[at] in ":=" else at

    def _value(self, at: int) -> int:
        text, state = self.text, self.state
        if text[at] in ",)]}":
            self._absent()
            return at
        if text[at] in "([{":
            if len(state.within) >= MAX_DEPTH:
                return self._begin_text(at)
            self.out.enter(text[at])
            return at + 1
        end, more = self.window(at)
        if more and _STRING_BEGUN.match(text, at, end):
            return self.wait(at)
        if string := _STRING.match(text, at, end):
            self.out.element()
            self.out.say('"')
            return self._begin_string(string)
        return self._scalar(at, end, more)

    def _absent(self) -> None:
        """Where a value was due there is none."""
        if self.state.at == "value" and self.state.within[-1] in "fkd":
            self.out.say("null")
        self.state.at = "after"

    def _scalar(self, at: int, end: int, more: bool) -> int:
        text = self.text
        run = (_KEY_RUN if self.state.within[-1] == "{" else _RUN).match(text, at, end)
        edge = run.end() if run else at
        if edge == at:
            return at + 1
        if edge == end and more:
            return self.wait(at)
        bare = text[at:edge].strip()
        value = python_text.scalar(bare)
        if edge == end == at + WINDOW or (edge < end and text[edge] in "([{"):
            return self._begin_text(at)
        if edge < end and text[edge] in "'\"":
            ended = _ENDED.match(text, edge + 1, end)
            if more and (ended is None or ended.end() == end) and _BLANK.match(text, edge + 1, end):
                return self.wait(at)
            if ended is None:
                return self._begin_text(at)
            value, edge = encode_basestring(bare), edge + 1
        elif edge == end == self.stop and (value is None or (value != bare and not value.isalpha())):
            return end  # cut before it was sure what it says
        self.out.element()
        self.out.say(encode_basestring(bare) if value is None else value)
        self.state.at = "after"
        return edge

    def _begin_text(self, at: int) -> int:
        self.out.settle("s", "t")
        self.out.element()
        self.out.say('"')
        self.state.at, self.state.depth, self.state.quote = "text", 0, ""
        return at

    def _text(self, at: int) -> int:
        """Text that is passed on as it is, up to a comma or a bracket that is not its own."""
        state = self.state
        pattern = _QUOTES[state.quote[0]] if state.quote else _text_stops(self.marker)
        stop = pattern.search(self.text, at, self.stop)
        if stop is None:
            self.out.say(python_text.inside(self.text[at : self.stop]))
            return self.stop
        edge, mark = stop.end(), stop[0]
        if mark == "\\":
            if edge == self.stop and not self.final:
                self.out.say(python_text.inside(self.text[at : stop.start()]))
                return self.wait(stop.start())
            edge = min(edge + 1, self.stop)
        elif state.quote:
            state.quote = ""
        elif mark in _QUOTES:
            state.quote = _QUOTED[mark]
        elif mark in ("(", "[", "{"):
            state.depth += 1
        elif state.depth and mark in (")", "]", "}"):
            state.depth -= 1
        elif not state.depth or mark == self.marker:
            self.out.say(python_text.inside(self.text[at : stop.start()]) + '"')
            state.at = "after"
            return stop.start()
        self.out.say(python_text.inside(self.text[at:edge]))
        return edge

    def _begin_string(self, string: re.Match[str]) -> int:
        self.state.verbatim = "r" in string[1].lower()
        self.state.quote = _QUOTED[string[2]]
        self.state.at = "string"
        return string.end()

    def _string(self, at: int) -> int:
        text, state = self.text, self.state
        if not state.quote:
            return self._end_string(at)
        hit = _QUOTES[state.quote[0]].search(text, at, self.stop)
        edge = hit.start() if hit else self.stop
        self.out.say(python_text.inside(text[at:edge]))
        if hit is None:
            return edge
        if text[edge] == "\\":
            return self._escape(edge)
        if text.startswith(state.quote, edge, self.stop):
            return self._quote(edge)
        if not self.final and state.quote.startswith(text[edge : self.stop]):
            return self.wait(edge)
        self.out.say(python_text.inside(text[edge]))
        return edge + 1

    def _escape(self, at: int) -> int:
        end = min(at + WINDOW, self.stop)
        if self.state.verbatim:
            if end == at + 1 and not self.final:
                return self.wait(at)
            end = min(at + 2, end)
            self.out.say(python_text.inside(self.text[at:end]))
            return end
        escape = python_text.escape(self.text, at, end)
        if escape is None:  # never written to its end, if the text is over
            return end if self.final else self.wait(at)
        self.out.say(escape[0])
        return escape[1]

    def _quote(self, at: int) -> int:
        """A single quote ends its string if what follows may follow a string. Else it should have been escaped."""
        text, state = self.text, self.state
        behind = at + len(state.quote)
        end, more = self.window(behind)
        ended = _ENDED_KEY if state.keyed or state.within[-1] == "{" else _ENDED
        if more and (_BLANK.match(text, behind, end) or _JOINT_BEGUN.match(text, behind, end)):
            return self.wait(at)
        if ended.match(text, behind, end):
            return self._end_string(behind)
        if _JOINT.match(text, behind, end):
            twice = text[behind] == state.quote
            if twice and more and _BLANK.match(text, behind + 1, end):
                return self.wait(at)
            if not (twice and ended.match(text, behind + 1, end)):
                state.quote, state.at = "", "joint"
                return behind
        elif len(state.quote) == 3:
            return self._end_string(behind)
        self.out.say(python_text.inside(text[at]))
        return behind

    def _joint(self, at: int) -> int:
        end, more = self.window(at)
        if more and _STRING_BEGUN.match(self.text, at, end):
            return self.wait(at)
        string = _STRING.match(self.text, at, end)
        return self._begin_string(string) if string else self._end_string(at)

    def _end_string(self, at: int) -> int:
        state = self.state
        self.out.say('"')
        state.at = "colon" if state.keyed else "after"
        state.quote, state.verbatim, state.keyed = "", False, False
        return at

    def _after(self, at: int) -> int:
        mark, state = self.text[at], self.state
        if mark in ")]}":
            return self._close(at)
        if mark in ":=":
            if state.within[-1] == "{" and state.kept:
                state.kept = state.kept if state.kept[0] == '"' else python_text.key(state.kept)
                self.out.decide("d")
                return self._colon(at)
            return at + 1
        self.out.settle("s", "t")
        state.at = CONTAINERS[state.within[-1]].member
        return at + 1 if mark == "," else at

    def _close(self, at: int) -> int:
        if self.out.close(self.text[at]):
            return at + 1
        if self.text[at] == "]":  # of the list of calls
            self.out.leave()
            return at
        return at + 1


@cache
def _text_stops(marker: str) -> re.Pattern[str]:
    return re.compile(r"[,()\[\]{}'\"]" + (f"|{re.escape(marker)}" if marker else ""))
