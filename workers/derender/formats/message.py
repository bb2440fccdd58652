"""The scanner for a whole message: reasoning, content and tool calls between their markers.

It reads each character once and keeps its place in `ScanState`, a small plain value: constant but for text that
has to be held back because what follows decides what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta

from headrace.workers.derender.formats.calls import Section, call_scanner
from headrace.workers.derender.formats.content import Content, ContentState
from headrace.workers.derender.formats.declared import NONE, Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from headrace.workers.derender.formats.tools import ToolFormat

VERSION: Final = 1

Phase = Literal["reasoning", "content", "call"]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class ScanState(ContentState, omit_defaults=True):
    """One choice's place in its message. A default is left out of its JSON."""

    v: Literal[1] = VERSION
    tokens: Count = 0
    """Output tokens read so far."""
    phase: Phase = "content"
    held: Annotated[str, Meta(max_length=256)] = ""
    """The start of what may become a marker."""
    calls: Count = 0
    """Calls opened, in whole or in part."""
    section: Section | None = None
    """The place within a section of calls, in that phase."""


class MessageScanner:
    """What to look for in the outputs of one request. Holds no state of a stream."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self.tools = tools
        self._calls = call_scanner(tools) if tools else None
        self._tentative = tools is not None and tools.tentative
        self._content = Content(
            before_calls=tools is not None,
            text_after=tools is None or tools.text_after,
            stop=stop,
            include_stop=include_stop,
        )
        self._enter: dict[str, Phase] = {}
        if reasoning:
            self._enter |= {reasoning.start: "reasoning", reasoning.end: "content"}
        if tools:
            self._enter |= dict.fromkeys(tools.starts, "call")
        in_reasoning = set(self._enter)
        if reasoning and tools and not reasoning.call_ends:
            in_reasoning -= set(tools.starts)
        self._markers: Mapping[str, Markers | None] = {
            "reasoning": Markers(in_reasoning) if in_reasoning else None,
            "content": Markers(self._enter) if self._enter else None,
        }

    def feed(self, state: ScanState, text: str, found: Found, declared: Declared = NONE) -> None:
        """Read the next piece of the output."""
        text, state.held, at = state.held + text, "", 0
        while at < len(text) and state.stopped is None:
            if state.section is None:
                at = self._text(state, text, at, found)
            else:
                at = self._section(state, state.section, text, at, found, declared)

    def finish(self, state: ScanState, found: Found, declared: Declared = NONE) -> None:
        """The output is over: give out what was held back, unless it belongs to a call that was cut."""
        held, state.held = state.held, ""
        if state.section is None or self._calls is None:
            self._give(state, held, found)
        else:
            found.opened = state.calls
            self._calls.finish(state.section, held, found, declared)
            self._after_section(state, state.section, found)
        self._content.finish(state, found)

    def _text(self, state: ScanState, text: str, at: int, found: Found) -> int:
        markers = self._markers[state.phase]
        hit = markers.find(text, at) if markers else None
        if hit is None:
            self._give(state, text[at:], found)
            return len(text)
        self._give(state, text[at : hit.start], found)
        if not hit.whole:
            state.held = text[hit.start :]
            return len(text)
        marker = text[hit.start : hit.end]
        state.phase = self._enter[marker]
        if state.phase == "call" and self._calls:
            state.section = self._calls.begin(marker)
            if not self._tentative:
                self._content.call(state)
        return hit.end

    def _section(self, state: ScanState, section: Section, text: str, at: int, found: Found, declared: Declared) -> int:
        assert self._calls is not None
        found.opened = state.calls
        at = self._calls.feed(section, text, at, found, declared)
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
            found.reasoning.append(text)
        elif text:
            self._content.give(state, text, found)
