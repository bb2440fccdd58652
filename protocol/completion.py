"""Text completions: the request, the response and the stream chunk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from headrace.protocol.base import JsonObject, TokenIds, WireModel, absent, new_request_id, refusal, unix_now
from headrace.protocol.logprobs import CompletionLogProbs, PromptLogprobs
from headrace.protocol.openai import OpenAIRequest
from headrace.protocol.sampling import LogprobCount
from headrace.protocol.usage import PerRequestMetrics, UsageInfo


def _prompt_shape(value: object) -> str | None:
    if isinstance(value, str):
        return "(text)"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    shapes = {str: "(texts)", int: "(ids)", list: "(lists of ids)"}
    return shapes.get(type(first))


Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("(text)")]
    | Annotated[list[str], Field(min_length=1), Tag("(texts)")]
    | Annotated[TokenIds, Tag("(ids)")]
    | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Tag("(lists of ids)")],
    Discriminator(
        _prompt_shape,
        custom_error_type="shape",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


class CompletionRequest(OpenAIRequest):
    """A request for /v1/completions; each prompt of a list is a request of its own."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: LogprobCount | None = None
    max_tokens: int | None = None
    """Absent means up to the model's limit; 0 only with `echo`."""
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        lowest = 0 if self.echo else 1
        if self.max_tokens is not None and self.max_tokens < lowest:
            raise refusal(f"max_tokens must be at least {lowest}, got {self.max_tokens}.", field="max_tokens")
        if self.suffix:
            raise refusal("`suffix` is not supported.", field="suffix")
        if self.best_of is not None and self.best_of != self.n:
            raise refusal(f"`best_of` must equal `n`={self.n}, got {self.best_of}.", field="best_of")
        return self

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> CompletionRequest:
        if self.logprob_token_ids and self.logprobs is None:
            raise refusal("when using `logprob_token_ids`, `logprobs` must be set.", field="logprob_token_ids")
        if self.logprob_token_ids and self.echo and self.max_tokens == 0:
            raise refusal(
                "`logprob_token_ids` is not supported when `echo=True` and `max_tokens=0` "
                "because no output tokens are generated.",
                field="logprob_token_ids",
            )
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many, as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt

    def to_sampling_params(self, default_max_tokens: int | None) -> JsonObject:
        """As for every request; `echo` asks for the prompt's log probabilities too."""
        params = super().to_sampling_params(default_max_tokens)
        if self.echo and self.logprobs is not None:
            params.setdefault("prompt_logprobs", self.logprobs)
        return params

    def _max_tokens(self) -> int | None:
        """An engine generates at least one token; of an echo without output it is thrown away."""
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    def _logprobs(self) -> int | None:
        return None if self.logprob_token_ids else self.logprobs


class CompletionResponseChoice(WireModel):
    """One finished choice. `stop_reason` is the stop string or token id that ended it, null for others."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None


class CompletionResponse(WireModel):
    """The answer of /v1/completions and of its derender endpoint."""

    id: str = Field(default_factory=lambda: f"cmpl-{new_request_id()}")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=unix_now)
    model: str
    choices: list[CompletionResponseChoice]
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    metrics: PerRequestMetrics | None = None


class CompletionResponseStreamChoice(WireModel):
    """One choice of a chunk; `text` is what it adds."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = Field(default=None, exclude_if=absent)


class CompletionStreamResponse(WireModel):
    """One chunk of a completion stream; the usage chunk has no choices."""

    id: str = Field(default_factory=lambda: f"cmpl-{new_request_id()}")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(default_factory=unix_now)
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    system_fingerprint: str | None = None
    metrics: PerRequestMetrics | None = None
