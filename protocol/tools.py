"""Tools that a chat may call, and the calls that a model makes."""

from __future__ import annotations

import secrets
from typing import Literal

from pydantic import Field, model_validator

from headrace.protocol.base import JsonObject, WireModel, absent


def new_tool_call_id() -> str:
    """A random tool-call id in the chat form. Derendering derives its ids instead, so that a replay agrees."""
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


class FunctionDefinition(WireModel):
    """A function that the model may call; `parameters` is its JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(default=None, exclude_if=absent)
    defer_loading: bool | None = Field(default=None, exclude_if=absent)


class ChatCompletionToolsParam(WireModel):
    """One entry of a request's `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition
    defer_loading: bool | None = Field(default=None, exclude_if=absent)

    @model_validator(mode="after")
    def _function_inherits_defer_loading(self) -> ChatCompletionToolsParam:
        if self.defer_loading is not None and self.function.defer_loading is None:
            self.function.defer_loading = self.defer_loading
        return self


class ChatCompletionNamedFunction(WireModel):
    """The name inside a named tool choice."""

    name: str = Field(min_length=1)


class ChatCompletionNamedToolChoiceParam(WireModel):
    """`tool_choice` that forces one function."""

    function: ChatCompletionNamedFunction
    type: Literal["function"] = "function"


class FunctionCall(WireModel):
    """A finished call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolCall(WireModel):
    """One finished tool call of a message."""

    id: str = Field(default_factory=new_tool_call_id)
    type: Literal["function"] = "function"
    function: FunctionCall


class DeltaFunctionCall(WireModel):
    """The name comes once; `arguments` are pieces to be joined."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(WireModel):
    """A piece of the tool call number `index`; `id` and `type` come with its first piece."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int
    function: DeltaFunctionCall | None = None
