"""The tools that a request declares, as far as reading a call needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

from headrace.protocol.tools import ChatCompletionToolsParam

Schema = Mapping[str, object]


class Declared:
    """Names and parameter schemas. Nothing is prepared before it is asked for."""

    def __init__(self, tools: Sequence[ChatCompletionToolsParam] = ()) -> None:
        self._tools = tools

    @cached_property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(self._schemas)

    def parameters(self, function: str) -> Schema:
        """The schema of a function's arguments; empty where the request says nothing about it."""
        return self._schemas.get(function, {})

    def parameter(self, function: str, name: str) -> Schema | None:
        """The schema of one parameter; None where the request says nothing about it."""
        properties = self.parameters(function).get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else None

    @cached_property
    def _schemas(self) -> dict[str, Schema]:
        return {tool.function.name: tool.function.parameters or {} for tool in self._tools}


NONE: Final = Declared()
