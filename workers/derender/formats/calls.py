"""The port of the call scanners: what the message scanner needs of a format's way to write calls.

A section is everything from a format's start marker to the end of the calls behind it: one call or several. A
scanner holds no state of a stream; its place in a section is a small plain value, one of `Section`. It reads each
character once, but for a tail that more text decides, and passes a call on while it is being written.
"""

from __future__ import annotations

from typing import Protocol

from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.json_call import JsonCalls, JsonSection
from headrace.workers.derender.formats.tools import JsonBody, ToolFormat

Section = JsonSection
"""Where in a section a scanner is; each scanner has its own kind, told apart by its tag.

Every kind has `done` (the section is over; content goes on behind it) and `refused` (with `done`: it was none, and
this text, start marker included, is content).
"""


class CallScanner(Protocol):
    """One format's way to write calls."""

    def begin(self, marker: str) -> Section:
        """The place right behind a start marker."""

    def feed(self, section: Section, text: str, at: int, found: Found, declared: Declared) -> int:
        """Read on from `at` and say up to where: behind the section's end, or before a tail to be seen again."""

    def finish(self, section: Section, tail: str, found: Found, declared: Declared) -> None:
        """No more text comes behind `tail`, which `feed` left unread: say what can still be said."""


def call_scanner(tools: ToolFormat) -> CallScanner:
    """The scanner that reads this format."""
    match tools.body:
        case JsonBody():
            return JsonCalls(tools.body)
