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

Stage = Literal["", "begun", "over"]


class ContentState(Struct, omit_defaults=True):
    """How far the content of one choice has come."""

    content: Stage = ""
    """Whether content has begun, or is over because a call came."""
    blank: Annotated[str, Meta(max_length=MAX_BLANK)] = ""
    """White space before any other content."""
    stop_held: Annotated[str, Meta(max_length=MAX_STOP)] = ""
    """Content that may become a stop string."""
    stopped: Annotated[str, Meta(max_length=MAX_STOP)] | None = None
    """The stop string that ended the content."""


class Content:
    """Settings of one request's content. Holds no state of a stream.

    `before_calls`: calls may come, so white space in front waits for what follows it. `text_after`: text behind a
    call is content too. `stop`: strings that end the content; `include_stop` keeps the one that did.
    """

    def __init__(
        self, *, before_calls: bool, text_after: bool, stop: tuple[str, ...] = (), include_stop: bool = False
    ) -> None:
        self._before_calls = before_calls
        self._text_after = text_after
        self._include_stop = include_stop
        self._stop = Markers(stop) if stop else None

    def give(self, state: ContentState, text: str, found: Found) -> None:
        """More text of the answer."""
        if state.content == "" and self._before_calls:
            text, state.blank = state.blank + text, ""
            if len(text) <= MAX_BLANK and not text.strip():
                state.blank = text
            else:
                state.content = "begun"
                self._cut(state, text, found)
        elif state.content != "over":
            self._cut(state, text, found)

    def call(self, state: ContentState) -> None:
        """A call begins here."""
        state.blank = ""
        if not self._text_after:
            state.content = "over"

    def finish(self, state: ContentState, found: Found) -> None:
        """The output is over: give out what waited."""
        blank, state.blank = state.blank, ""
        self._cut(state, blank, found)
        found.content.append(state.stop_held)
        state.stop_held = ""

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
