"""A header of Harmony: what stands before a message's text, and how it is read where parts of it are missing.

    <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>

The recipient may also follow the channel, and its type may stand without a marker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from headrace.workers.derender.formats.bodies import HARMONY
from headrace.workers.derender.formats.markers import Markers

START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS = HARMONY
ENDS: Final = tuple(_ENDS)
"""Any of these closes a message."""

MAX_HEADER: Final = 256
"""Characters of a header, which a state holds. What goes on for longer is one whose end is missing."""
MAX_LEAD: Final = MAX_HEADER - len(CONSTRAIN)
"""Characters before a header's first part. After more of them comes none."""

_ROLE: Final = "assistant"
_TO: Final = "to="
_FUNCTIONS: Final = "functions."
_OBJECT: Final = "{"
"""Begins a message's text where the marker before it is missing."""
_FIRST: Final = (CHANNEL, CONSTRAIN, MESSAGE, _TO)
_BEGUN: Final = frozenset(part[:length] for part in (_TO, *HARMONY) for length in range(len(part)))
_AFTER: Final = Markers((MESSAGE, _OBJECT, START, *ENDS))
_ANY: Final = Markers(HARMONY)

_NAME: Final = r"\s*(analysis|commentary|final|\w*)"
_RECIPIENT: Final = re.compile(rf"{_TO}([^\s<{{]*)")
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + _NAME)
_CONSTRAINT: Final = re.compile(re.escape(CONSTRAIN) + _NAME)
_PARTS: Final = re.compile(
    rf"(?:\s*(?:{_RECIPIENT.pattern}|{_CHANNEL.pattern}|{_CONSTRAINT.pattern}))*\s*",
)
_LEAD: Final = re.compile(rf"\s*(?:({re.escape(START)})\s*({_ROLE})?\s*)?")


@dataclass(frozen=True, slots=True)
class Header:
    """One header. `end`: characters up to the message's text. `parts`: what it says; None where no message begins.

    `foreign`: the message is not the assistant's.
    """

    end: int
    parts: str | None = None
    foreign: bool = False

    @property
    def recipient(self) -> str:
        """Whom the message is for, the user aside; empty where it does not say."""
        return _first(_RECIPIENT, self.parts)

    @property
    def channel(self) -> str:
        """The channel; empty where it does not say."""
        return _first(_CHANNEL, self.parts)

    @property
    def constraint(self) -> str:
        """What the text must be; empty where it does not say."""
        return _first(_CONSTRAINT, self.parts)


def read_header(text: str, *, last: bool) -> Header | None:
    """The header at the start of this text, or what stands there in its place. None where more text decides.

    `last`: no more text comes; a header that is cut within its recipient then says nothing.
    """
    window, full = text[:MAX_HEADER], len(text) > MAX_HEADER
    lead = _LEAD.match(window, 0, MAX_LEAD)
    assert lead is not None, "it matches nothing at all, too"
    begin = lead.end()
    if end := next((end for end in ENDS if window.startswith(end, begin)), ""):
        return Header(begin + len(end))
    if window.startswith(START, begin):
        return Header(begin)
    if window.startswith(_FIRST, begin):
        return _from_first_part(window, begin, full=full, last=last)
    foreign, rest = bool(lead[1]) and not lead[2], window[begin:]
    text_alone = Header(begin, foreign=True) if foreign else Header(max(lead.end(2), 0), "")
    if begin == MAX_LEAD or not (rest in _BEGUN or (foreign and _ROLE.startswith(rest))):
        return text_alone
    if not last:
        return None
    return Header(len(window)) if foreign or not rest or rest[0] == START[0] else text_alone


def _from_first_part(window: str, begin: int, *, full: bool, last: bool) -> Header | None:
    """The header from its first part on. Where its end is missing, it ends behind the last part that is one."""
    hit = _AFTER.find(window, begin)
    marker = window[hit.start : hit.end] if hit is not None and hit.whole else ""
    if hit is not None and marker in (MESSAGE, _OBJECT):
        return Header(hit.end if marker == MESSAGE else hit.start, window[begin : hit.start])
    if not (marker or full or last):
        return None
    stop = _ANY.tail(window, begin) if last else len(window)
    parts = match[0] if (match := _PARTS.match(window, begin, stop)) else ""
    if not any(part in parts for part in (CHANNEL, CONSTRAIN, _FUNCTIONS)):
        parts = ""
    end = begin + len(parts)
    if not last or end < stop:
        return Header(end, parts)
    recipient = _RECIPIENT.search(parts)
    cut = recipient is not None and recipient.end() == len(parts) and stop == len(window)
    return Header(len(window), None if cut else parts)


def _first(pattern: re.Pattern[str], parts: str | None) -> str:
    match = pattern.search(parts or "")
    return match[1] if match else ""
