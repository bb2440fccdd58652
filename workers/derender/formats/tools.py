"""Tool-call formats: how a model writes the calls that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is one JSON object between `start` and `end`; its members are named by the `_keys`.

    `text_after`: whether text after the first call is content. Where it is not, it is dropped.
    """

    name: str
    start: str
    end: str
    name_keys: frozenset[str] = frozenset({"name"})
    argument_keys: frozenset[str] = frozenset({"arguments", "parameters"})
    text_after: bool = False


_FORMATS: Final = (ToolFormat("hermes", "<tool_call>", "</tool_call>"),)

TOOLS: Final = {row.name: row for row in _FORMATS}
