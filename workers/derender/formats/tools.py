"""Tool-call formats: how a model writes the calls that it makes.

A row names the markers at which calls begin, and the body behind them, which is of one of a few kinds. Each kind is
read by one scanner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A call is one JSON object up to `end`; its members are named by the `_keys`."""

    end: str
    name_keys: frozenset[str] = frozenset({"name"})
    argument_keys: frozenset[str] = frozenset({"arguments", "parameters"})


Body = JsonBody
CallIds = Literal["openai", "kimi", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    `starts`: any of these begins a section of calls. `text_after`: whether text behind the first call is content;
    where it is not, it is dropped. `tentative`: a start marker is a mere character that other text has too, so it is
    content again if no call follows. `forced_json`: when a call is demanded ("required" or by name), the model is
    made to write it as plain JSON instead. `ids`: the model family's own style of call ids.
    """

    name: str
    starts: tuple[str, ...]
    body: Body
    text_after: bool = False
    tentative: bool = False
    forced_json: bool = False
    ids: CallIds = "openai"
    aliases: tuple[str, ...] = ()


_FORMATS: Final = (ToolFormat("hermes", ("<tool_call>",), JsonBody("</tool_call>"), aliases=("qwen3_json",)),)

TOOLS: Final = {name: row for row in _FORMATS for name in (row.name, *row.aliases)}
