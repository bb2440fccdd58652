"""The port of the scanners that read a whole message, and which of them reads a pair of formats."""

from __future__ import annotations

from typing import Protocol

from headrace.workers.derender.formats.bodies import HarmonyBody
from headrace.workers.derender.formats.declared import NONE, Declared
from headrace.workers.derender.formats.found import Found
from headrace.workers.derender.formats.harmony import HarmonyScanner
from headrace.workers.derender.formats.message import MessageScanner, ScanState
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from headrace.workers.derender.formats.tools import ToolFormat


class Scanner(Protocol):
    """What to look for in the outputs of one request. Holds no state of a stream."""

    def fits(self, state: ScanState) -> bool:
        """Whether this scanner can have made the state."""

    def feed(self, state: ScanState, text: str, found: Found, declared: Declared = NONE) -> None:
        """Read the next piece of the output."""

    def finish(self, state: ScanState, found: Found, declared: Declared = NONE) -> None:
        """The output is over: give out what was held back, unless it belongs to a call that was cut."""


def in_harmony(reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> bool:
    """Whether the output is made of Harmony's messages: one of the formats says so."""
    return (reasoning is not None and reasoning.harmony) or (tools is not None and isinstance(tools.body, HarmonyBody))


def scanner(
    reasoning: ReasoningFormat | None = None,
    tools: ToolFormat | None = None,
    *,
    demanded: str | None = None,
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
) -> Scanner:
    """The scanner of the outputs that these formats are looked for in; see MessageScanner for the settings.

    Harmony has a call written in its own way even where one is demanded.
    """
    if in_harmony(reasoning, tools):
        return HarmonyScanner(reasoning, tools, stop=stop, include_stop=include_stop)
    return MessageScanner(reasoning, tools, demanded=demanded, stop=stop, include_stop=include_stop)
