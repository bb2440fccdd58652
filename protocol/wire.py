"""The hot path: the same JSON as the pydantic models, as frozen Structs.

A field at its default is left out. Fields that a Struct does not know are dropped, so bytes that only pass through
us are passed on as bytes. Types are checked on decoding, bounds are not: what a client sent has met the pydantic
models first. Token logprobs are in integers (`in_integers` turns the other dialect into them). The values hold no
cycles, so the collector may skip them.

`msgspec.convert(model, Struct, from_attributes=True)` and `Model.model_validate(struct, from_attributes=True)` turn
one into the other without JSON.
"""

from __future__ import annotations

from msgspec import Struct, field


class Value(Struct, frozen=True, gc=False, omit_defaults=True):
    """A JSON object that does not change."""


class PromptTokensDetails(Value, frozen=True):
    """Twin of PromptTokenUsageInfo."""

    cached_tokens: int | None = None


class CompletionTokensDetails(Value, frozen=True):
    """Twin of CompletionTokenUsageInfo."""

    reasoning_tokens: int | None = None


class Usage(Value, frozen=True):
    """Twin of UsageInfo."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Metrics(Value, frozen=True):
    """Twin of PerRequestMetrics."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: dict[str, object] | None = None


class Placeholder(Value, frozen=True):
    """Twin of PlaceholderRangeInfo."""

    offset: int
    length: int


class WeightVersion(Value, frozen=True):
    """Twin of WeightVersionSpan."""

    version: str
    start: int
    end: int


class TokenLogprob(Value, frozen=True):
    """Twin of GenerateLogProb."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprobEntry(Value, frozen=True):
    """Twin of GenerateLogProbsContent."""

    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)


class TokenLogprobs(Value, frozen=True):
    """Twin of GenerateLogProbs."""

    content: list[TokenLogprobEntry] | None = None


class TokenChoice(Value, frozen=True):
    """Twin of GenerateTokensStreamChoice."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersion] | None = None
    logprobs: TokenLogprobs | None = None


class TokenChunk(Value, frozen=True, tag_field="output_mode", tag="tokens"):
    """Twin of GenerateTokensStreamResponse: what one step adds to one choice."""

    request_id: str
    choices: list[TokenChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[Placeholder]] | None = None
    metrics: Metrics | None = None


class ChatLogprob(Value, frozen=True):
    """Twin of ChatCompletionLogProb."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatLogprobEntry(Value, frozen=True):
    """Twin of ChatCompletionLogProbsContent."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None
    top_logprobs: list[ChatLogprob] = field(default_factory=list)


class ChatLogprobs(Value, frozen=True):
    """Twin of ChatCompletionLogProbs."""

    content: list[ChatLogprobEntry] | None = None


class TextChoice(Value, frozen=True):
    """Twin of GenerateTextStreamChoice."""

    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersion] | None = None
    logprobs: ChatLogprobs | None = None


class TextChunk(Value, frozen=True, tag_field="output_mode", tag="text"):
    """Twin of GenerateTextStreamResponse."""

    request_id: str
    choices: list[TextChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[Placeholder]] | None = None
    metrics: Metrics | None = None


class FunctionDelta(Value, frozen=True):
    """Twin of DeltaFunctionCall."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Value, frozen=True):
    """Twin of DeltaToolCall."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(Value, frozen=True):
    """Twin of DeltaMessage."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class ChatChoice(Value, frozen=True):
    """Twin of ChatCompletionResponseStreamChoice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class ChatChunk(Value, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    """Twin of ChatCompletionStreamResponse."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    metrics: Metrics | None = None


class CompletionLogprobs(Value, frozen=True):
    """Twin of CompletionLogProbs."""

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)


class CompletionChoice(Value, frozen=True):
    """Twin of CompletionResponseStreamChoice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class CompletionChunk(Value, frozen=True, tag_field="object", tag="text_completion"):
    """Twin of CompletionStreamResponse."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    metrics: Metrics | None = None


class StreamState(Value, frozen=True):
    """Twin of DerenderStreamState."""

    prev_tokens: list[str] = field(default_factory=list)
    prefix_offset: int = 0
    read_offset: int = 0
    role_sent: bool = False
    logprob_context_token_ids: list[int] = field(default_factory=list)
    logprob_text_offset: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    output_chunk_lens: list[int] = field(default_factory=list)
    tools_streamed: bool = False
    last_tool_call_ids: list[str] = field(default_factory=list)
    scan: dict[str, object] | None = None
