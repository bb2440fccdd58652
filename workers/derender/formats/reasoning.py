"""Reasoning formats: how a model sets its thinking apart from its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands between `start` and `end`.

    `open_at_start`: an output is reasoning from its first token, unless the prompt has closed it.
    `off_when`: the chat template argument, and its value, that turns thinking off; markers are then text.
    `call_ends`: a tool call ends the reasoning, where others take the call's markup for part of the thought.
    """

    name: str
    start: str
    end: str
    open_at_start: bool = True
    off_when: tuple[str, object] | None = None
    call_ends: bool = False


_FORMATS: Final = (
    ReasoningFormat("qwen3", "<think>", "</think>", off_when=("enable_thinking", False), call_ends=True),
    ReasoningFormat("deepseek_r1", "<think>", "</think>"),
)

REASONING: Final = {row.name: row for row in _FORMATS}
