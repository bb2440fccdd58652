"""What becomes of content: cut at a stop string, and apart from the calls around it.

White space before a call belongs to the markup, so it waits until other text follows; text behind a call is dropped
where the format has none there.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.markers import Markers

MAX_BLANK: Final = 256
"""Leading white space that a tool call behind it would swallow. More than that is content."""
MAX_STOP: Final = 1 << 16

Stage = Literal["", "begun", "called", "over"]


class ContentState(Struct, omit_defaults=True):
    """How far the content of one choice has come."""

    content: Stage = ""
    """Whether content has begun, whether a call came last, or whether content is over because of one."""
    blank: Annotated[str, Meta(max_length=MAX_BLANK)] = ""
    """White space before any other content, or between a call and what follows it."""
    stop_held: Annotated[str, Meta(max_length=MAX_STOP)] = ""
    """Content that may become a stop string."""
    stopped: Annotated[str, Meta(max_length=MAX_STOP)] | None = None
    """The stop string that ended the content."""


class Content:
    """Settings of one request's content. Holds no state of a stream.

    `before_calls`: calls may come, so white space in front waits for what follows it. `text_after`: text behind a
    call is content too. `trim`: line breaks in front are dropped. `stop`: strings that end the content;
    `include_stop` keeps the one that did.
    """

    def __init__(
        self,
        *,
        before_calls: bool,
        text_after: bool,
        trim: bool = False,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self._before_calls = before_calls
        self._text_after = text_after
        self._trim = trim
        self._include_stop = include_stop
        self._stop = Markers(stop) if stop else None
        self.flows: Stage | None = None if stop else "begun" if before_calls or trim else ""
        """The stage in which all text is content as it comes; None where it never is."""

    def give(self, state: ContentState, text: str, found: Found) -> None:
        """More text of the answer."""
        if state.content in ("", "called") and (self._before_calls or self._trim):
            text = self._begun(state, text)
        if text and state.content != "over":
            self._cut(state, text, found)

    def call(self, state: ContentState) -> None:
        """A call begins here."""
        state.blank = ""
        state.content = "called" if self._text_after else "over"

    def finish(self, state: ContentState, found: Found) -> None:
        """The output is over: give out what waited."""
        blank, state.blank = state.blank, ""
        self._cut(state, "" if state.content == "called" else blank, found)
        found.content.append(state.stop_held)
        state.stop_held = ""

    def _begun(self, state: ContentState, text: str) -> str:
        """The first text that is content for sure, if it has come."""
        if self._trim and not state.blank:
            text = text.lstrip("\n")
        text, state.blank = state.blank + text, ""
        if self._before_calls and len(text) <= MAX_BLANK and not text.strip():
            text, state.blank = "", text
        if text:
            state.content = "begun"
        return text

    def _cut(self, state: ContentState, text: str, found: Found) -> None:
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
