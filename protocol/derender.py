"""Tokens to text: the derender requests, the responses and the state that is carried between chunks."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from headrace.protocol.base import JsonObject, WireModel, absent, refusal
from headrace.protocol.chat import ChatCompletionRequest, ChatCompletionStreamResponse
from headrace.protocol.completion import CompletionRequest, CompletionStreamResponse
from headrace.protocol.generate import GenerateTokensResponse, GenerateTokensStreamResponse

MAX_PREV_TOKENS: Final = 1024


class DerenderStreamState(WireModel):
    """One choice's progress between two chunks, carried by whoever calls; plain JSON.

    Decoding needs `prev_tokens`, `prefix_offset` and `read_offset`: bounded, whatever the output's length.
    A parser that replays keeps the whole output in `output_token_ids` and `output_chunk_lens`; ours keeps its
    place in `scan` instead.
    """

    prev_tokens: list[str] = Field(default_factory=list)
    """Token strings that the next decoding step still reads, at most 1024."""
    prefix_offset: int = Field(default=0, ge=0)
    """Where in `prev_tokens` decoding starts."""
    read_offset: int = Field(default=0, ge=0)
    """Where in `prev_tokens` the text that was already given out ends."""
    role_sent: bool = False
    """Whether a delta has carried the role."""
    logprob_context_token_ids: list[int] = Field(default_factory=list, max_length=4)
    """The last sampled ids, to complete a character whose bytes lie in several tokens."""
    logprob_text_offset: int = Field(default=0, ge=0)
    """Characters given out so far: where the next `text_offset` starts."""
    output_token_ids: list[int] = Field(default_factory=list)
    """Every output token so far; only where a replaying parser made the state."""
    output_chunk_lens: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    """Tokens per chunk of `output_token_ids`, so that a replay meets the same boundaries."""
    tools_streamed: bool = False
    """Whether a tool call has been given out: the finish reason then says so."""
    last_tool_call_ids: list[str] = Field(default_factory=list)
    """Ids of the tool calls by index, settled when each call first appears."""
    scan: JsonObject | None = Field(default=None, exclude_if=absent)
    """The scanner's place in reasoning and tool calls."""

    @field_validator("prev_tokens")
    @classmethod
    def _bound_prev_tokens(cls, tokens: list[str]) -> list[str]:
        if len(tokens) > MAX_PREV_TOKENS:
            raise refusal(f"prev_tokens length ({len(tokens)}) exceeds maximum ({MAX_PREV_TOKENS})")
        return tokens

    @model_validator(mode="after")
    def _validate_output_chunk_lens(self) -> DerenderStreamState:
        total, length = sum(self.output_chunk_lens), len(self.output_token_ids)
        if total != length:
            raise refusal(
                "output_chunk_lens must sum to len(output_token_ids) "
                f"(got sum={total}, len(output_token_ids)={length})",
                field="output_chunk_lens",
            )
        return self


class DerenderChatRequest(WireModel):
    """One-shot request for /v1/chat/completions/derender."""

    stream: Literal[False] = False
    model: str | None = None
    """The name to answer with; by default the server's."""
    generate_response: GenerateTokensResponse
    """Only token responses: text was already cut at stop strings."""
    prompt_tokens: int | None = None
    """Prompt length for `usage`; absent counts as 0."""
    prompt_token_ids: list[NonNegativeInt] | None = None
    """The prompt or its tail, so that the first token keeps its leading space."""
    chat_request: ChatCompletionRequest | None = None
    """The request that was rendered; needed where a parser is configured."""


class DerenderChatStreamRequest(WireModel):
    """One chunk for /v1/chat/completions/derender, with the state of the chunk before."""

    stream: Literal[True]
    model: str | None = None
    generate_chunk: GenerateTokensStreamResponse
    stream_state: DerenderStreamState | None = None
    """None on the first chunk."""
    prompt_tokens: int | None = None
    prompt_token_ids: list[NonNegativeInt] | None = None
    """The whole prompt where a parser is configured: it may have opened the reasoning."""
    chat_request: ChatCompletionRequest | None = None


class DerenderChatStreamResponse(WireModel):
    """The derendered chunk and the state for the next one."""

    chunk: ChatCompletionStreamResponse
    stream_state: DerenderStreamState


class DerenderCompletionRequest(WireModel):
    """One-shot request for /v1/completions/derender: one response per prompt, lists parallel to them."""

    stream: Literal[False] = False
    model: str | None = None
    generate_responses: list[GenerateTokensResponse]
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[list[NonNegativeInt] | None] | None = None
    completion_request: CompletionRequest | None = None

    @model_validator(mode="after")
    def _validate_prompt_tokens_length(self) -> DerenderCompletionRequest:
        wanted = len(self.generate_responses)
        for name, given in (
            ("prompt_tokens", self.prompt_tokens),
            ("prompt_token_ids", self.prompt_token_ids),
        ):
            if given is not None and len(given) != wanted:
                raise refusal(
                    f"{name} length ({len(given)}) must equal generate_responses length ({wanted})", field=name
                )
        return self


class DerenderCompletionStreamRequest(WireModel):
    """One chunk for /v1/completions/derender, with the state of the chunk before."""

    stream: Literal[True]
    model: str | None = None
    generate_chunk: GenerateTokensStreamResponse
    stream_state: DerenderStreamState | None = None
    """None on the first chunk."""
    prompt_tokens: int | None = None
    prompt_token_ids: list[NonNegativeInt] | None = None
    completion_request: CompletionRequest | None = None


class DerenderCompletionStreamResponse(WireModel):
    """The derendered chunk and the state for the next one."""

    chunk: CompletionStreamResponse
    stream_state: DerenderStreamState
