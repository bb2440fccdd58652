"""How tokens are chosen: every sampling parameter with its bound, stated once for all requests.

The value types (`Temperature`, `TopP`, ...) carry bound and message; `SamplingParams` and the OpenAI requests
share them. Names, bounds and messages follow vLLM's sampling parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt, ValidationInfo, model_validator

from headrace.protocol.base import INT64_MAX, INT64_MIN, JsonObject, Request, TokenIds, WireModel, refusal

MAX_N: Final = 16384
MAX_LOGPROB_TOKEN_IDS: Final = 128
LOWEST_TEMPERATURE: Final = 1e-2


def _within(holds: Callable[[float], bool], bound: str) -> AfterValidator:
    def check(value: float, info: ValidationInfo) -> float:
        if not holds(value):
            raise refusal(f"{info.field_name} must be {bound}, got {value}.")
        return value

    return AfterValidator(check)


def _representable(temperature: float) -> float:
    """Below 0.01 logits over temperature overflow, so 0.01 is used; 0 stays and means greedy."""
    return max(temperature, LOWEST_TEMPERATURE) if temperature > 0 else temperature


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _no_empty_string(strings: list[str], info: ValidationInfo) -> list[str]:
    if "" in strings:
        raise refusal(f"{info.field_name} cannot contain an empty string.", field=strings.index(""))
    return strings


def _strings_once(strings: list[str]) -> list[str]:
    return list(dict.fromkeys(strings))


def _ids_once(ids: list[int]) -> list[int]:
    return list(dict.fromkeys(ids))


def _rows_to_score(rows: list[list[int]], info: ValidationInfo) -> list[list[int]]:
    if not any(rows):
        raise refusal(f"{info.field_name} must hold at least one token id.")
    for place, row in enumerate(rows):
        if row and min(row) < -1:
            raise refusal(f"{info.field_name} must hold token ids, or -1 to fill a row up", field=place)
    return rows


def _bounded_bias(biases: dict[int, float]) -> dict[int, float]:
    for token_id, bias in biases.items():
        if token_id < 0:
            raise refusal("logit_bias must not contain negative token ids", field=token_id)
        if not math.isfinite(bias):
            raise refusal("logit_bias must contain finite numbers", field=token_id)
    return {token_id: min(100.0, max(-100.0, bias)) for token_id, bias in biases.items()}


def _seed_or_none(value: object) -> object:
    return None if value == -1 else value


def _budget(value: object) -> object:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= -1):
        return None if value == -1 else value
    raise refusal("`thinking_token_budget` must be a non-negative integer or -1 for unlimited.")


_FINITE = _within(math.isfinite, "a finite number")

N = Annotated[int, _within(lambda v: v >= 1, "at least 1"), _within(lambda v: v <= MAX_N, f"at most {MAX_N}")]
Penalty = Annotated[float, _within(lambda v: -2.0 <= v <= 2.0, "in [-2, 2]")]
RepetitionPenalty = Annotated[float, _FINITE, _within(lambda v: v > 0.0, "greater than zero")]
Temperature = Annotated[
    float,
    _FINITE,
    _within(lambda v: v >= 0.0, "non-negative"),
    _within(lambda v: v <= 2.0, "in [0, 2]"),
    AfterValidator(_representable),
]
TopP = Annotated[float, _within(lambda v: 0.0 < v <= 1.0, "in (0, 1]")]
TopK = Annotated[int, _within(lambda v: v >= -1, "0 (disable), or at least 1")]
MinP = Annotated[float, _within(lambda v: 0.0 <= v <= 1.0, "in [0, 1]")]
Seed = Annotated[Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None, BeforeValidator(_seed_or_none)]
MaxTokens = Annotated[int, _within(lambda v: v >= 1, "at least 1")]
MinTokens = Annotated[int, _within(lambda v: v >= 0, "greater than or equal to 0")]
LogprobCount = Annotated[int, _within(lambda v: v >= -1, "non-negative or -1")]
StreamInterval = Annotated[int, _within(lambda v: v >= 1, "at least 1")]
TruncatePromptTokens = Annotated[int, Field(ge=-1, le=INT64_MAX)]
ThinkingTokenBudget = Annotated[int | None, BeforeValidator(_budget)]
StopStrings = Annotated[list[str], AfterValidator(_no_empty_string), BeforeValidator(_as_list)]
StopTokenIds = Annotated[TokenIds, AfterValidator(_ids_once)]
BadWords = Annotated[
    list[str], AfterValidator(_no_empty_string), AfterValidator(_strings_once), BeforeValidator(_as_list)
]
LogitBias = Annotated[dict[int, float], AfterValidator(_bounded_bias)]
SomeTokenIds = Annotated[TokenIds, Field(min_length=1)]
ScoredTokenIds = Annotated[list[list[StrictInt]], AfterValidator(_rows_to_score)]
LogprobTokenIds = Annotated[TokenIds, Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]


class RequestOutputKind(IntEnum):
    """What a streaming engine returns each time: everything so far, the new tokens, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


CONSTRAINTS: Final = ("json_schema", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(WireModel):
    """A constraint on the text: exactly one of json, regex, choice, grammar, json_object, structural_tag."""

    json_schema: str | JsonObject | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    @model_validator(mode="after")
    def _exactly_one_kind(self) -> StructuredOutputsParams:
        kinds = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(kinds) > 1:
            given = ", ".join(sorted(name.removesuffix("_schema") for name in kinds))
            raise refusal(
                f"You can only use one kind of structured outputs constraint but multiple are specified: {given}"
            )
        if not kinds:
            raise refusal("You must use one kind of structured outputs constraint but none are specified")
        return self


class RepetitionDetectionParams(WireModel):
    """Stops an output that repeats one pattern of tokens; sizes in tokens, 0 switches it off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    @model_validator(mode="after")
    def _sizes_in_order(self) -> RepetitionDetectionParams:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise refusal(
                "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size. "
                "Set both to 0 to disable repetitive pattern detection.",
                field="min_pattern_size",
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise refusal(
                "min_count must be >= 2 to detect repetitive patterns in engine output. "
                "If you do not wish to detect repetitive patterns, set max_pattern_size to 0.",
                field="min_count",
            )
        return self


def check_lengths(min_tokens: int, max_tokens: int | None) -> None:
    """The bound between two parameters that no single one can state."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise refusal(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.",
            field="min_tokens",
        )


def check_greedy(temperature: float | None, n: int | None) -> None:
    """Greedy choices would all be the same."""
    if temperature == 0 and n is not None and n > 1:
        raise refusal(f"n must be 1 when using greedy sampling, got {n}.", field="n")


class SamplingParams(Request):
    """The `sampling_params` object of a generate request.

    `model_fields_set` holds the keys that the client sent; a null for a parameter that cannot be null counts
    as not sent. An absent `max_tokens` means up to the model's limit.
    """

    n: N = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    temperature: Temperature = 1.0
    """0 is greedy; between 0 and 0.01 counts as 0.01."""
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1 considers all tokens."""
    min_p: MinP = 0.0
    seed: Seed = None
    """-1 counts as none."""
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens = 0
    logprobs: LogprobCount | None = None
    """Candidates per output token besides the sampled one; -1 is the whole vocabulary."""
    prompt_logprobs: LogprobCount | None = None
    prompt_logprob_token_ids: ScoredTokenIds | None = None
    """A row of ids to score for each prompt position, from `prompt_logprob_start` on; -1 fills a row up."""
    prompt_logprob_start: int | None = Field(default=None, ge=0)
    logprob_token_ids: LogprobTokenIds | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: StreamInterval | None = None
    """Output tokens per streamed chunk, at least."""
    skip_clone: bool = False
    watermarking: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: LogitBias | None = None
    """Added to the logits by token id, cut to [-100, 100]."""
    allowed_token_ids: SomeTokenIds | None = None
    extra_args: JsonObject | None = None
    bad_words: BadWords = Field(default_factory=list)
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: ThinkingTokenBudget = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = Field(default=0, ge=0)
    trace_decode_token_ids: SomeTokenIds | None = None

    @model_validator(mode="after")
    def _together(self) -> SamplingParams:
        check_lengths(self.min_tokens, self.max_tokens)
        check_greedy(self.temperature, self.n)
        if self.stop and not self.detokenize:
            raise refusal(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                field="stop",
            )
        if self.logprob_token_ids and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise refusal(
                "When both logprobs and logprob_token_ids are set, logprobs must equal "
                f"len(logprob_token_ids). Got logprobs={self.logprobs}, "
                f"len(logprob_token_ids)={len(self.logprob_token_ids)}.",
                field="logprobs",
            )
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, so that top_p, top_k, min_p and seed have no say."""
        return self.temperature == 0
