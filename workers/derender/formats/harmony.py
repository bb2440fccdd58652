"""The scanner for Harmony: an output of messages, each behind a header that says what it is and for whom.

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

No text is an error. A header may lack any of its parts and stand without the message before it being closed; text
without a header is content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.workers.derender.formats.arguments import Arguments
from headrace.workers.derender.formats.bodies import HARMONY
from headrace.workers.derender.formats.content import Content
from headrace.workers.derender.formats.declared import NONE, Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.harmony_header import (
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MAX_HEADER,
    MESSAGE,
    START,
    Header,
    read_header,
)
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.message import Phase, ScanState
from headrace.workers.derender.formats.named_call import NamedSection
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from headrace.workers.derender.formats.tools import ToolFormat

_FUNCTIONS: Final = "functions."
_OTHERS: Final = frozenset({"assistant", "user", "python", "browser", "container"})
"""Recipients, or namespaces of some, that are no function of the client's."""


class HarmonyScanner:
    """What to look for in the outputs of one request. Holds no state of a stream.

    While a header is read, the state holds all of it, its marker included.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self._tools = tools
        self._analysis: Phase = "reasoning" if reasoning else "other"
        self._content = Content(before_calls=tools is not None, text_after=True, stop=stop, include_stop=include_stop)
        self._markers: Mapping[Phase, Markers] = {
            "reasoning": Markers((START, *ENDS)),
            "content": Markers(HARMONY),
            "other": Markers((START, CHANNEL, *ENDS)),
        }
        self._arguments = Arguments((START, CHANNEL, *ENDS))

    def fits(self, state: ScanState) -> bool:
        """Whether this scanner can have made the state."""
        if state.phase == "call":
            return self._tools is not None and isinstance(state.section, NamedSection)
        return state.phase == "header" or state.phase in self._markers

    def feed(self, state: ScanState, text: str, found: Found, declared: Declared = NONE) -> None:
        """Read the next piece of the output."""
        self._read(state, text, found, declared, last=False)

    def finish(self, state: ScanState, found: Found, declared: Declared = NONE) -> None:
        """The output is over: give out what was held back, unless it is part of a header or a call that was cut."""
        self._read(state, "", found, declared, last=True)
        self._content.finish(state, found)

    def _read(self, state: ScanState, text: str, found: Found, declared: Declared, *, last: bool) -> None:
        text, state.held, at, waits = state.held + text, "", 0, False
        while at < len(text) and state.stopped is None and not waits:
            if state.phase == "header":
                at, waits = self._header(state, text, at, found, declared, last)
            elif isinstance(state.section, NamedSection):
                at, waits = self._call(state, state.section, text, at, found)
            else:
                at, waits = self._body(state, text, at, found, last)
        if waits and not last:
            state.held = text[at:]

    def _header(
        self, state: ScanState, text: str, at: int, found: Found, declared: Declared, last: bool
    ) -> tuple[int, bool]:
        header = read_header(text[at : at + MAX_HEADER + 1], last=last)
        if header is None:
            return at, True
        if header.foreign:
            state.phase = "other"
        elif header.parts is not None:
            self._message(state, header, found, declared)
        return at + header.end, False

    def _message(self, state: ScanState, header: Header, found: Found, declared: Declared) -> None:
        """A message begins: whom it is for decides what it is, and then its channel."""
        if function := _function(header.recipient, declared):
            self._open(state, function, header.constraint, found)
        elif header.channel == "analysis":
            state.phase = self._analysis
        else:
            state.phase = "other" if header.recipient and header.channel != "final" else "content"

    def _open(self, state: ScanState, function: str, constraint: str, found: Found) -> None:
        if self._tools is None:
            state.phase = "other"
            return
        state.phase, state.section = "call", NamedSection(at="arguments", announced=True)
        if constraint not in ("", "json"):
            state.section.arguments.at = "text"
        self._content.call(state)
        found.opened = state.calls
        found.open_call(function)
        state.calls = found.opened

    def _call(self, state: ScanState, section: NamedSection, text: str, at: int, found: Found) -> tuple[int, bool]:
        found.opened = state.calls
        at = self._arguments.read(section.arguments, text, at, found)
        if section.arguments.at == "over":
            state.phase, state.section = "other", None
            return at, False
        return at, at < len(text)

    def _body(self, state: ScanState, text: str, at: int, found: Found, last: bool) -> tuple[int, bool]:
        hit = self._markers[state.phase].find(text, at)
        if hit is None or (last and not hit.whole):
            self._give(state, text[at:], found)
            return len(text), False
        self._give(state, text[at : hit.start], found)
        if not hit.whole:
            return hit.start, True
        marker = text[hit.start : hit.end]
        if marker in (MESSAGE, CONSTRAIN):
            return hit.end, False
        state.phase = "header"
        return hit.end if marker in ENDS else hit.start, False

    def _give(self, state: ScanState, text: str, found: Found) -> None:
        if state.phase == "reasoning":
            found.reasoning.append(text)
        elif state.phase == "content" and text:
            self._content.give(state, text, found)


def _function(recipient: str, declared: Declared) -> str:
    """The function that a message is for; empty where it is for none."""
    name = recipient.removeprefix(_FUNCTIONS)
    if name == recipient and name not in declared.names and name.partition(".")[0] in _OTHERS:
        return ""
    return name
