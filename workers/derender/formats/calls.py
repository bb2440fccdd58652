"""The port of the call scanners: what the message scanner needs of a format's way to write calls.

A section is everything from a format's start marker to the end of the calls behind it: one call or several. A
scanner holds no state of a stream; its place in a section is a small plain value, one of `Section`. It reads each
character once, but for a tail that more text decides, and passes a call on while it is being written.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from headrace.workers.derender.formats.bodies import GemmaBody, HarmonyBody, JsonBody, NamedBody, PythonBody, XmlBody
from headrace.workers.derender.formats.declared import Declared
from headrace.workers.derender.formats.demanded import ArgumentsSection, DemandedSection
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.gemma_call import GemmaCalls, GemmaSection
from headrace.workers.derender.formats.json_call import JsonCalls
from headrace.workers.derender.formats.json_section import JsonSection
from headrace.workers.derender.formats.named_call import NamedCalls, NamedSection
from headrace.workers.derender.formats.python_call import PythonCalls, PythonSection
from headrace.workers.derender.formats.tools import ToolFormat
from headrace.workers.derender.formats.xml_call import XmlCalls, XmlSection

Section = JsonSection | NamedSection | XmlSection | PythonSection | GemmaSection | DemandedSection | ArgumentsSection
"""Where in a section a scanner is; each scanner has its own kind, told apart by its tag.

Every kind has `done` (the section is over; content goes on behind it) and `refused` (with `done`: it was none, and
this text, start marker included, is content).
"""


S = TypeVar("S")


class CallScanner(Protocol[S]):
    """One format's way to write calls; its sections are all of one kind."""

    def begin(self, marker: str) -> S:
        """The place right behind a start marker."""

    def feed(self, section: S, text: str, at: int, found: Found, declared: Declared) -> int:
        """Read on from `at` and say up to where: behind the section's end, or before a tail to be seen again."""

    def finish(self, section: S, tail: str, found: Found, declared: Declared) -> None:
        """No more text comes behind `tail`, which `feed` left unread: say what can still be said."""


def call_scanner(tools: ToolFormat) -> CallScanner[Any]:
    """The scanner that reads this format."""
    match tools.body:
        case JsonBody():
            return JsonCalls(tools.body, tools.starts, tools.bare, tentative=tools.tentative)
        case NamedBody():
            return NamedCalls(tools.body)
        case XmlBody():
            return XmlCalls(tools.body, tools.starts)
        case PythonBody():
            return PythonCalls(tools.body)
        case GemmaBody():
            return GemmaCalls(tools.body)
        case HarmonyBody():
            raise TypeError("Harmony is read as a whole, not by sections of calls")
