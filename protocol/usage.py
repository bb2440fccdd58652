"""What a request used and how long it took, and when a stream says so."""

from __future__ import annotations

from headrace.protocol.base import JsonObject, WireModel


class StreamOptions(WireModel):
    """`include_usage` adds one last chunk with no choices; `continuous_usage_stats` fills every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class PromptTokenUsageInfo(WireModel):
    """Prompt tokens by origin."""

    cached_tokens: int | None = None


class CompletionTokenUsageInfo(WireModel):
    """Output tokens by purpose."""

    reasoning_tokens: int | None = None


class UsageInfo(WireModel):
    """Token counts of one request, all choices together."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenUsageInfo | None = None
    completion_tokens_details: CompletionTokenUsageInfo | None = None


class PerRequestMetrics(WireModel):
    """Timings of one request with one choice, in milliseconds; null where they were not taken."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: JsonObject | None = None
