"""The scanner for a whole message: reasoning, content and tool calls, cut at stop strings.

It reads each character once and keeps its place in `ScanState`, a small plain value: constant but for text that
has to be held back because what follows decides what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.json_call import CallState, JsonCall
from headrace.workers.derender.formats.markers import Markers
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from headrace.workers.derender.formats.tools import ToolFormat

VERSION: Final = 1
MAX_BLANK: Final = 256
"""Leading white space that a tool call behind it would swallow. More than that is content."""
MAX_STOP: Final = 1 << 16

Phase = Literal["reasoning", "content", "call"]
Content = Literal["", "begun", "over"]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class ScanState(Struct, omit_defaults=True):
    """One choice's place in its message. A default is left out of its JSON."""

    v: Literal[1] = VERSION
    tokens: Count = 0
    """Output tokens read so far."""
    phase: Phase = "content"
    held: Annotated[str, Meta(max_length=256)] = ""
    """The start of what may become a marker."""
    content: Content = ""
    """Whether content has begun, or is over because a call came."""
    blank: Annotated[str, Meta(max_length=MAX_BLANK)] = ""
    """White space before any other content."""
    stop_held: Annotated[str, Meta(max_length=MAX_STOP)] = ""
    """Content that may become a stop string."""
    stopped: Annotated[str, Meta(max_length=MAX_STOP)] | None = None
    """The stop string that ended the content."""
    calls: Count = 0
    """Calls given out."""
    call: CallState | None = None

    @property
    def called(self) -> bool:
        """Whether a call has been given out, in whole or in part."""
        return self.calls > 0 or (self.call is not None and self.call.announced)


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
        self._call = JsonCall(tools) if tools else None
        self._include_stop = include_stop
        self._stop = Markers(stop) if stop else None
        self._enter: dict[str, Phase] = {}
        if reasoning:
            self._enter |= {reasoning.start: "reasoning", reasoning.end: "content"}
        if tools:
            self._enter[tools.start] = "call"
        in_reasoning = set(self._enter)
        if reasoning and tools and not reasoning.call_ends:
            in_reasoning.discard(tools.start)
        self._markers: Mapping[str, Markers | None] = {
            "reasoning": Markers(in_reasoning) if in_reasoning else None,
            "content": Markers(self._enter) if self._enter else None,
        }

    def feed(self, state: ScanState, text: str, found: Found) -> None:
        """Read the next piece of the output."""
        text, state.held, at = state.held + text, "", 0
        while at < len(text) and state.stopped is None:
            read = self._call_piece if state.phase == "call" else self._text
            at = read(state, text, at, found)

    def finish(self, state: ScanState, found: Found) -> None:
        """The output is over: give out what was held back, unless it belongs to a call that was cut."""
        held, state.held = state.held, ""
        if state.call is None:
            self._give(state, held, found)
        elif self._call is not None:
            self._call.finish(state.call, state.calls, found)
        blank, state.blank = state.blank, ""
        self._content(state, blank, found)
        found.content.append(state.stop_held)
        state.stop_held = ""

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
        self._begin(state, self._enter[text[hit.start : hit.end]])
        return hit.end

    def _begin(self, state: ScanState, phase: Phase) -> None:
        state.phase = phase
        if phase == "call" and self.tools:
            state.call = CallState()
            state.blank = ""
            if not self.tools.text_after:
                state.content = "over"

    def _call_piece(self, state: ScanState, text: str, at: int, found: Found) -> int:
        assert self._call is not None
        assert state.call is not None
        at = self._call.feed(state.call, state.calls, text, at, found)
        if state.call.done:
            state.calls += state.call.announced
            state.call = None
            state.phase = "content"
        elif at < len(text):
            state.held = text[at:]
            return len(text)
        return at

    def _give(self, state: ScanState, text: str, found: Found) -> None:
        if state.phase == "reasoning":
            found.reasoning.append(text)
        elif state.content == "" and self.tools is not None:
            text, state.blank = state.blank + text, ""
            if len(text) <= MAX_BLANK and not text.strip():
                state.blank = text
            else:
                state.content = "begun"
                self._content(state, text, found)
        elif state.content != "over":
            self._content(state, text, found)

    def _content(self, state: ScanState, text: str, found: Found) -> None:
        if state.stopped is not None:
            return
        if self._stop is None:
            found.content.append(text)
            return
        text, state.stop_held = state.stop_held + text, ""
        hit = self._stop.find(text)
        if hit is None:
            found.content.append(text)
            return
        found.content.append(text[: hit.start])
        if not hit.whole:
            state.stop_held = text[hit.start :]
            return
        state.stopped = text[hit.start : hit.end]
        if self._include_stop:
            found.content.append(state.stopped)
