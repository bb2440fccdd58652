"""What a scanner finds in a text, whatever the pieces that it comes in."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from headrace.workers.derender.formats import NONE, Declared, Found, MessageScanner, Scanner, ScanState
from headrace.workers.derender.formats.message import Phase


class Said(NamedTuple):
    """A message: calls are names and arguments, as they were passed on."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def read(
    scanner: Scanner, pieces: Sequence[str], phase: Phase = "content", declared: Declared = NONE, held: str = ""
) -> tuple[Said, ScanState]:
    """What the scanner finds, its state put through JSON after every piece."""
    state = ScanState(phase=phase, held=held)
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    for number, piece in enumerate([*pieces, None]):
        found = Found()
        if piece is None:
            scanner.finish(state, found, declared)
        else:
            scanner.feed(state, piece, found, declared)
        state = msgspec.convert(json.loads(msgspec.json.encode(state)), ScanState)
        reasoning += "".join(found.reasoning)
        content += "".join(found.content)
        for call in found.calls:
            if call.name is not None:
                assert call.index not in calls, f"piece {number}: a name comes once"
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    return Said(reasoning, content, [(name, arguments) for name, arguments in calls.values()]), state


def said(text: str, phase: Phase = "content", declared: Declared = NONE, **formats: Any) -> Said:
    """What a text says at once."""
    return read(MessageScanner(**formats), [text], phase, declared)[0]


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """The text, cut at these places."""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


def linear(work: Callable[[int], object], length: int, tries: int = 5) -> bool:
    """Whether work on four times the length takes about four times as long; were any part squared, sixteen times.

    Whatever else the machine does can only make it look worse, so one good measurement is enough.
    """
    gc.disable()
    try:
        return any(_spent(work, 4 * length) < 8 * max(_spent(work, length), 0.0002) for _ in range(tries))
    finally:
        gc.enable()


def _spent(work: Callable[[int], object], length: int) -> float:
    began = time.thread_time()
    work(length)
    return time.thread_time() - began
