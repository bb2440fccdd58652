"""Chat completions: the request, the response and the stream chunk."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Required

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator, with_config
from typing_extensions import TypedDict

from headrace.protocol.base import JsonObject, WireModel, absent, empty, new_request_id, refusal, unix_now
from headrace.protocol.logprobs import ChatCompletionLogProbs, PromptLogprobs
from headrace.protocol.openai import OpenAIRequest
from headrace.protocol.sampling import LogprobCount, MaxTokens
from headrace.protocol.tools import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from headrace.protocol.usage import PerRequestMetrics, UsageInfo

_MUST_HAVE_CONTENT: Final = ("system", "developer", "user", "tool")
_KEEP_UNKNOWN = ConfigDict(extra="allow")


@with_config(_KEEP_UNKNOWN)
class ChatCompletionContentPartParam(TypedDict, total=False):
    """One part of a message: text, or an image, audio or video under the key that its type names."""

    type: str
    text: str


@with_config(_KEEP_UNKNOWN)
class FunctionCallParam(TypedDict, total=False):
    """The function inside an earlier tool call; `arguments` is JSON text."""

    name: Required[str]
    arguments: str


@with_config(_KEEP_UNKNOWN)
class ToolCallParam(TypedDict, total=False):
    """An earlier tool call, as the client sends it back."""

    id: str
    type: str
    function: Required[FunctionCallParam]


def _part_shape(value: object) -> str | None:
    return "(text)" if isinstance(value, str) else "(part)" if isinstance(value, dict) else None


def _content_shape(value: object) -> str | None:
    return "(text)" if isinstance(value, str) else "(parts)" if isinstance(value, list) else None


def _choice_shape(value: object) -> str:
    return "(mode)" if isinstance(value, str) else "(named)"


def _says_something(part: ChatCompletionContentPartParam) -> ChatCompletionContentPartParam:
    if "text" not in part and (not part or part.get("type") == "text"):
        raise refusal("a text part must have its text", field="text")
    return part


def _has_content(message: ChatCompletionMessageParam) -> ChatCompletionMessageParam:
    if message.get("content") is None and message["role"] in _MUST_HAVE_CONTENT:
        raise refusal(f"a {message['role']} message must have content", field="content")
    return message


ContentPart = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[ChatCompletionContentPartParam, AfterValidator(_says_something), Tag("(part)")],
    Discriminator(_part_shape, custom_error_type="shape", custom_error_message="must be a string or a content part"),
]
MessageContent = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[ContentPart], Tag("(parts)")],
    Discriminator(
        _content_shape,
        custom_error_type="shape",
        custom_error_message="must be a string or a list of content parts",
    ),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(mode)")]
    | Annotated[ChatCompletionNamedToolChoiceParam, Tag("(named)")],
    Discriminator(_choice_shape),
]


@with_config(_KEEP_UNKNOWN)
class ChatCompletionMessageParam(TypedDict, total=False):
    """One message of the conversation, kept as the object that the client sent."""

    role: Required[Annotated[str, Field(min_length=1)]]
    content: MessageContent | None
    name: str | None
    tool_calls: list[ToolCallParam] | None
    tool_call_id: str | None
    reasoning: str | None
    reasoning_content: str | None


class ChatCompletionRequest(OpenAIRequest):
    """A request for /v1/chat/completions."""

    messages: list[Annotated[ChatCompletionMessageParam, AfterValidator(_has_content)]] = Field(min_length=1)
    logprobs: bool | None = False
    top_logprobs: LogprobCount | None = 0
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    """Wins over the older `max_tokens`."""
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: ToolChoice | None = "none"
    """Where tools are given and no choice is sent, "auto"."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True

    echo: bool = False
    add_generation_prompt: bool = True
    """Where `continue_final_message` is set and this is not sent, false."""
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[JsonObject] | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    media_io_kwargs: dict[str, JsonObject] | None = None
    mm_processor_kwargs: JsonObject | None = None
    return_prompt_text: bool | None = None

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise refusal("when using `top_logprobs`, `logprobs` must be set to true.", field="top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise refusal("when using `logprob_token_ids`, `logprobs` must be set to true.", field="logprob_token_ids")
        return self

    @model_validator(mode="after")
    def _tool_choice_has_its_tool(self) -> ChatCompletionRequest:
        if self.tools == []:
            raise refusal(
                "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
                field="tools",
            )
        if self.tools and "tool_choice" not in self.model_fields_set:
            self._set_unsent("tool_choice", "auto")
        if self.tool_choice is None or self.tool_choice == "none":
            return self
        if self.tools is None:
            raise refusal("When using `tool_choice`, `tools` must be set.", field="tool_choice")
        if isinstance(self.tool_choice, ChatCompletionNamedToolChoiceParam):
            wanted = self.tool_choice.function.name
            if all(tool.function.name != wanted for tool in self.tools):
                raise refusal(
                    "The tool specified in `tool_choice` does not match any of the specified `tools`",
                    field="tool_choice",
                )
        return self

    @model_validator(mode="after")
    def _prompt_ends_one_way(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise refusal(
                    "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                    field="add_generation_prompt",
                )
            self._set_unsent("add_generation_prompt", False)
        return self

    def _set_unsent(self, name: str, value: str | bool) -> None:
        """A default that depends on other fields; it does not count as sent by the client."""
        setattr(self, name, value)
        self.model_fields_set.discard(name)

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs and not self.logprob_token_ids else None


class ChatMessage(WireModel):
    """The assistant's message of one choice."""

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: JsonObject | None = None
    audio: JsonObject | None = None
    function_call: FunctionCall | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, exclude_if=empty)
    reasoning: str | None = None


class ChatCompletionResponseChoice(WireModel):
    """One finished choice. `stop_reason` is the stop string or token id that ended it, null for others."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class ChatCompletionResponse(WireModel):
    """The answer of /v1/chat/completions and of its derender endpoint."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{new_request_id()}")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=unix_now)
    model: str
    choices: list[ChatCompletionResponseChoice]
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    metrics: PerRequestMetrics | None = None


class DeltaMessage(WireModel):
    """What one chunk adds to the assistant's message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list, exclude_if=empty)


class ChatCompletionResponseStreamChoice(WireModel):
    """One choice of a chunk."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = Field(default=None, exclude_if=absent)


class ChatCompletionStreamResponse(WireModel):
    """One chunk of a chat stream; the usage chunk has no choices."""

    id: str = Field(default_factory=lambda: f"chatcmpl-{new_request_id()}")
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int = Field(default_factory=unix_now)
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: PerRequestMetrics | None = None
