"""The scanner for a whole message: reasoning, content and tool calls between their markers.

It reads each character once and keeps its place in `ScanState`, a small plain value: constant but for text that
has to be held back because what follows decides what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from headrace.workers.derender.formats.calls import CallScanner, Section, call_scanner
from headrace.workers.derender.formats.content import MAX_BLANK, Content, ContentState
from headrace.workers.derender.formats.declared import NONE, Declared
from headrace.workers.derender.formats.demanded import Demanded
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from headrace.workers.derender.formats.tools import ToolFormat

VERSION: Final = 1

MAX_HELD: Final = 512

Phase = Literal["begin", "label", "reasoning", "between", "content", "call", "header", "other"]
"""What the text is. `begin`: nothing came yet; `label`: behind a start of the reasoning; `between`: a header; in
messages of their own, `header` is what stands before their text, and `other` text that no client sees."""
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class ScanState(ContentState, omit_defaults=True):
    """One choice's place in its message. A default is left out of its JSON."""

    v: Literal[1] = VERSION
    tokens: Count = 0
    """Output tokens read so far."""
    phase: Phase = "content"
    held: Annotated[str, Meta(max_length=MAX_HELD)] = ""
    """The start of what may become a marker, or a header so far."""
    calls: Count = 0
    """Calls opened, in whole or in part."""
    section: Section | None = None
    """The place within a section of calls, in that phase."""
    waiting: Annotated[str, Meta(max_length=MAX_BLANK)] = ""
    """White space that may end the reasoning, or a header that may be content."""

    @property
    def thinking(self) -> bool:
        """Within the reasoning or its markup."""
        return self.phase in ("label", "reasoning") or (self.phase == "header" and "analysis" in self.held)


class MessageScanner:
    """What to look for in the outputs of one request. Holds no state of a stream."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        *,
        demanded: str | None = None,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        """`demanded`: a call must come, as plain JSON if the format has it so: this function's, or any for ""."""
        self.tools = tools
        self._calls = call_scanner(tools) if tools else None
        self._demanded = Demanded(demanded) if tools and tools.forced_json and demanded is not None else None
        self._scanners = _scanners(self._calls, self._demanded)
        self._tentative = tools is not None and tools.tentative
        self._content = Content(
            before_calls=tools is not None,
            text_after=tools is None or tools.text_after,
            trim=reasoning is not None and reasoning.trim_content,
            stop=stop,
            include_stop=include_stop,
        )
        self._label = reasoning.label if reasoning else ""
        self._trims = reasoning is not None and reasoning.trim_reasoning
        tables = _tables(reasoning, tools)
        self._enters = {marker: phase for table in tables.values() for marker, phase in table.items()}
        self._markers: Mapping[Phase, Markers | None] = {
            phase: Markers(table) if table else None for phase, table in tables.items()
        }

    def feed(self, state: ScanState, text: str, found: Found, declared: Declared = NONE) -> None:
        """Read the next piece of the output."""
        # First of all what nearly all text is: nothing waits, and no marker begins in it.
        if not state.held and state.section is None and state.stopped is None:
            if state.phase == "content" and state.content == self._content.flows:
                given = found.content
            elif state.phase == "reasoning" and not self._trims:
                given = found.reasoning
            else:
                given = None
            if given is not None and ((markers := self._markers[state.phase]) is None or not markers.first(text)):
                given.append(text)
                return
        text, state.held, at = state.held + text, "", 0
        while at < len(text) and state.stopped is None:
            if state.section is None:
                at = self._text(state, text, at, found)
            else:
                at = self._section(state, state.section, text, at, found, declared)

    def finish(self, state: ScanState, found: Found, declared: Declared = NONE) -> None:
        """The output is over: give out what was held back, unless it belongs to a call that was cut."""
        held, state.held = state.held, ""
        if state.section is None:
            self._give(state, held, found)
        else:
            found.opened, found.begun = state.calls, state.content == "begun"
            self._scanners[type(state.section)].finish(state.section, held, found, declared)
            self._after_section(state, state.section, found)
        if state.waiting.strip():
            self._content.give(state, state.waiting, found)
        state.waiting = ""
        self._content.finish(state, found)

    def fits(self, state: ScanState) -> bool:
        """Whether this scanner can have made the state."""
        if state.section is not None:
            return type(state.section) in self._scanners
        return state.phase in self._markers or (state.phase == "label" and bool(self._label))

    def _text(self, state: ScanState, text: str, at: int, found: Found) -> int:
        if state.phase == "label":
            return self._after_label(state, text, at)
        markers = self._markers[state.phase]
        hit = markers.find(text, at) if markers else None
        demanded = None
        if self._demanded and state.phase == "content" and state.content == "":
            demanded = self._demanded.find(text, at)
        hit = demanded or hit
        if state.phase == "begin" and (hit is None or hit.start > at):
            state.phase = "content"
            return at
        if hit is None:
            self._give(state, text[at:], found)
            return len(text)
        self._give(state, text[at : hit.start], found)
        if not hit.whole:
            state.held = text[hit.start :]
            return len(text)
        marker = text[hit.start : hit.end]
        if self._demanded and demanded:
            state.phase, state.section = "call", self._demanded.scanners[marker].begin(marker)
            return hit.end
        state.phase, state.waiting = self._enters[marker], ""
        if state.phase == "call" and self._calls:
            state.section = self._calls.begin(marker)
            if not self._tentative:
                self._content.call(state)
        return hit.end

    def _after_label(self, state: ScanState, text: str, at: int) -> int:
        """Pass over the label, if it is there."""
        given = text[at : at + len(self._label)]
        if given != self._label and self._label.startswith(given):
            state.held = given
            return len(text)
        state.phase = "reasoning"
        return at + len(given) if given == self._label else at

    def _section(self, state: ScanState, section: Section, text: str, at: int, found: Found, declared: Declared) -> int:
        found.opened, found.begun = state.calls, state.content == "begun"
        at = self._scanners[type(section)].feed(section, text, at, found, declared)
        self._after_section(state, section, found)
        if state.section is not None and at < len(text):
            state.held = text[at:]
            return len(text)
        return at

    def _after_section(self, state: ScanState, section: Section, found: Found) -> None:
        if found.opened > state.calls:
            self._content.call(state)
            state.calls = found.opened
        if section.done:
            state.section, state.phase = None, "content"
            self._give(state, section.refused, found)

    def _give(self, state: ScanState, text: str, found: Found) -> None:
        if state.phase == "reasoning":
            found.reasoning.append(_trimmed(state, text) if self._trims else text)
        elif state.phase == "between":
            self._header(state, text, found)
        elif text and state.phase != "label":
            self._content.give(state, text, found)

    def _header(self, state: ScanState, text: str, found: Found) -> None:
        """Text between two blocks: dropped by the marker that follows it soon, content if none does."""
        state.waiting += text
        if len(state.waiting) > MAX_BLANK:
            self._content.give(state, state.waiting, found)
            state.phase, state.waiting = "content", ""


def _tables(reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> dict[Phase, dict[str, Phase]]:
    """The markers of each phase, and the phase that each of them enters."""
    calls: dict[str, Phase] = dict.fromkeys(tools.starts, "call") if tools else {}
    bare: dict[str, Phase] = dict.fromkeys(tools.bare, "call") if tools else {}
    bare |= dict.fromkeys(tools.strays, "content") if tools else {}
    if reasoning is None:
        return {"begin": {}, "reasoning": {}, "between": calls | bare, "content": calls | bare}
    starts: dict[str, Phase] = dict.fromkeys(reasoning.starts, "label" if reasoning.label else "reasoning")
    ends: dict[str, Phase] = dict.fromkeys(reasoning.ends, "content")
    around: dict[str, Phase] = dict.fromkeys(reasoning.opens, "content")
    closes: dict[str, Phase] = dict.fromkeys(reasoning.closes, "between")
    anywhere = {} if reasoning.prose else starts | ends
    outside = anywhere | around | closes | calls | bare
    return {
        "begin": starts,
        "reasoning": anywhere | ends | closes | (calls if reasoning.call_ends else {}),
        "between": outside,
        "content": outside,
    }


def _trimmed(state: ScanState, text: str) -> str:
    """The reasoning without white space that may turn out to be its end."""
    text = state.waiting + text
    end = max(len(text.rstrip()), len(text) - MAX_BLANK)
    state.waiting = text[end:]
    return text[:end]


def _scanners(calls: CallScanner[Any] | None, demanded: Demanded | None) -> Mapping[type, CallScanner[Any]]:
    """The scanners by the kind of their sections."""
    readers: dict[str, CallScanner[Any]] = {"": calls} if calls else {}
    if demanded:
        readers |= demanded.scanners
    return {type(scanner.begin(marker)): scanner for marker, scanner in readers.items()}
