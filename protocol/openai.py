"""What the OpenAI chat and completion requests have in common, and how they become sampling parameters."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Annotated, Final, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from headrace.protocol.base import (
    CacheSalt,
    JsonObject,
    Priority,
    Request,
    WireModel,
    new_request_id,
    refusal,
)
from headrace.protocol.sampling import (
    CONSTRAINTS,
    BadWords,
    LogitBias,
    LogprobCount,
    LogprobTokenIds,
    MinP,
    MinTokens,
    N,
    Penalty,
    RepetitionDetectionParams,
    RepetitionPenalty,
    Seed,
    SomeTokenIds,
    StopStrings,
    StopTokenIds,
    StreamInterval,
    StructuredOutputsParams,
    Temperature,
    ThinkingTokenBudget,
    TopK,
    TopP,
    TruncatePromptTokens,
    check_greedy,
    check_lengths,
)
from headrace.protocol.usage import StreamOptions


class JsonSchemaResponseFormat(WireModel):
    """A named JSON schema; on the wire the schema itself is called `schema`."""

    name: str
    description: str | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(WireModel):
    """`response_format` of the kinds text, json_object and json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaResponseFormat | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal(
                "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                field="json_schema",
            )
        return self


class StructuralTagResponseFormat(WireModel):
    """`response_format` of the kind structural_tag: a `format`, or the older `structures` with `triggers`."""

    type: Literal["structural_tag"]
    format: JsonValue = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> StructuralTagResponseFormat:
        if self.format is None and (self.structures is None or self.triggers is None):
            raise refusal("A structural_tag needs 'format', or both 'structures' and 'triggers'.", field="format")
        return self


_FORMATS: Final = {
    "text": "(format)",
    "json_object": "(format)",
    "json_schema": "(format)",
    "structural_tag": "(tag)",
}


def _format_shape(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _FORMATS.get(kind) if isinstance(kind, str) else None


AnyResponseFormat = Annotated[
    Annotated[ResponseFormat, Tag("(format)")] | Annotated[StructuralTagResponseFormat, Tag("(tag)")],
    Discriminator(
        _format_shape,
        custom_error_type="shape",
        custom_error_message="must be of type text, json_object, json_schema or structural_tag",
    ),
]

# Fields of a request that are sampling parameters under the same name.
SAMPLING_FIELDS: Final = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "stream_interval",
    "watermarking",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
    "routed_experts_prompt_start",
)


class OpenAIRequest(Request):
    """The fields that chat and completion requests share. `model_fields_set` is what the client sent."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    n: N | None = 1
    presence_penalty: Penalty | None = None
    response_format: AnyResponseFormat | None = None
    seed: Seed = None
    stop: StopStrings = Field(default_factory=list)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    user: str | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    watermarking: bool | None = None
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: MinTokens = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: LogprobCount | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    allowed_token_ids: SomeTokenIds | None = None
    bad_words: BadWords = Field(default_factory=list)
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: ThinkingTokenBudget = None
    repetition_detection: RepetitionDetectionParams | None = None
    stream_interval: StreamInterval | None = None

    priority: Priority = 0
    """Lower is earlier."""
    request_id: str = Field(default_factory=new_request_id)
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: int = Field(default=0, ge=0)
    return_token_offsets: bool | None = False
    return_mm_kwargs: bool = True
    cache_salt: CacheSalt = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None

    @model_validator(mode="after")
    def _supported(self) -> OpenAIRequest:
        if self.use_beam_search:
            raise refusal("`use_beam_search` is not supported.", field="use_beam_search")
        if self.stream_options is not None and not self.stream:
            raise refusal("Stream options can only be defined when `stream=True`.", field="stream_options")
        if self.stream and self.prompt_logprobs:
            raise refusal("`prompt_logprobs` are not available when `stream=True`.", field="prompt_logprobs")
        check_greedy(self.temperature, self.n)
        check_lengths(self.min_tokens, self._max_tokens())
        self._structured_outputs()
        return self

    def to_sampling_params(self, default_max_tokens: int | None) -> JsonObject:
        """The `sampling_params` object of the generate request: only what the client set.

        `default_max_tokens` is used where the client gave no limit; None leaves `max_tokens` out, which means
        up to the model's limit.
        """
        sent = self.model_fields_set
        names: set[str] = {name for name in SAMPLING_FIELDS if name in sent and getattr(self, name) is not None}
        params: JsonObject = self.model_dump(mode="json", include=names, exclude_unset=True)
        max_tokens = self._max_tokens()
        if max_tokens is None:
            max_tokens = default_max_tokens
        rest: JsonObject = {
            "max_tokens": max_tokens,
            "logprobs": self._logprobs(),
            "structured_outputs": self._structured_outputs(),
            "extra_args": self.vllm_xargs,
        }
        return params | {name: value for name, value in rest.items() if value is not None}

    @abstractmethod
    def _max_tokens(self) -> int | None:
        """The limit that the client set."""

    @abstractmethod
    def _logprobs(self) -> int | None:
        """How many candidates per token the client asked for."""

    def _structured_outputs(self) -> JsonObject | None:
        """`structured_outputs` with `response_format` merged into it."""
        given = self.structured_outputs
        merged = given.model_dump(mode="json", exclude_unset=True) if given is not None else {}
        merged |= _constraint(self.response_format)
        if given is not None and sum(merged.get(name) is not None for name in _KINDS) > 1:
            raise refusal(
                "You can only use one kind of structured outputs constraint "
                "but multiple are specified: response_format and structured_outputs",
                field="response_format",
            )
        return merged or None


_KINDS: Final = tuple("json" if name == "json_schema" else name for name in CONSTRAINTS)


def _constraint(wanted: ResponseFormat | StructuralTagResponseFormat | None) -> JsonObject:
    if isinstance(wanted, StructuralTagResponseFormat):
        return {"structural_tag": json.dumps(wanted.model_dump(mode="json", exclude_none=True))}
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_schema" and wanted.json_schema is not None:
        schema = wanted.json_schema.json_schema
        return {"json_object": True} if schema is None else {"json": schema}
    return {"json_object": True}
