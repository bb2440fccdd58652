"""Tokens in, tokens out: the generate request and its responses."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    FieldSerializationInfo,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PrivateAttr,
    Tag,
    field_serializer,
    model_validator,
)

from headrace.protocol.base import (
    CacheSalt,
    JsonObject,
    Priority,
    Request,
    TokenIds,
    WireModel,
    absent,
    new_request_id,
    refusal,
)
from headrace.protocol.logprobs import ChatCompletionLogProbs, PromptLogprobs, TokenLogProbs
from headrace.protocol.sampling import SamplingParams
from headrace.protocol.usage import PerRequestMetrics, StreamOptions, UsageInfo

OutputMode = Literal["tokens", "text"]


class PlaceholderRangeInfo(WireModel):
    """Where one multimodal item lies in the prompt, in tokens."""

    offset: int = Field(ge=0)
    length: int = Field(gt=0)


class MultiModalFeatures(WireModel):
    """What rendering learnt about the multimodal items; lists are parallel within each modality.

    `kwargs_data` and `mm_metadata` hold base64 items; a null entry is to be found in the engine's cache.
    """

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceholderRangeInfo]]
    kwargs_data: dict[str, list[str | None]] | None = None
    mm_metadata: dict[str, list[str | None]] | None = None

    @model_validator(mode="after")
    def _validate_parallel_fields(self) -> MultiModalFeatures:
        modalities = set(self.mm_hashes)
        if set(self.mm_placeholders) != modalities:
            raise refusal("mm_hashes and mm_placeholders must use the same modalities", field="mm_placeholders")
        items = {"kwargs_data": self.kwargs_data, "mm_metadata": self.mm_metadata}
        for name, data in items.items():
            if data is not None and set(data) != modalities:
                raise refusal(f"{name} must use the same modalities as mm_hashes", field=name)
        for modality, hashes in self.mm_hashes.items():
            if len(self.mm_placeholders[modality]) != len(hashes):
                raise refusal(
                    f"{modality} mm_hashes and mm_placeholders must have the same length",
                    field="mm_placeholders",
                )
            for name, data in items.items():
                if data is not None and len(data[modality]) != len(hashes):
                    raise refusal(f"{modality} {name} and mm_hashes must have the same length", field=name)
        spans = sorted((r.offset, r.offset + r.length) for rs in self.mm_placeholders.values() for r in rs)
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise refusal("mm_placeholders must be globally non-overlapping and sorted", field="mm_placeholders")
        return self


class ReasoningParserKwargs(WireModel):
    """What the engine's reasoning parser may be told; nothing else is taken from a client."""

    model_config = ConfigDict(extra="forbid")

    chat_template_kwargs: JsonObject = Field(default_factory=dict)


class GenerateRequest(Request):
    """A request for /inference/v1/generate: token ids and how to continue them."""

    request_id: str = Field(default_factory=new_request_id)
    token_ids: TokenIds = Field(min_length=1)
    token_offsets: list[tuple[int, int]] | None = None
    """Character range (start, end) of each token in the rendered text."""
    features: MultiModalFeatures | None = None
    content_parts: list[JsonObject] | None = None
    """Multimodal input that the engine resolves itself; not together with `features`."""
    sampling_params: SamplingParams
    model: str | None = None
    reasoning_ended: bool | None = None
    """Whether the prompt ends after its reasoning; null lets the engine look."""
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    return_token_ids: bool | None = None
    """Ask for the final prompt ids and placeholders, in a stream with the first chunk."""
    output_mode: OutputMode = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt = None
    priority: Priority = 0
    """Lower is earlier."""
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None

    # None: built from a ready SamplingParams, all of whose values then count as given.
    _sampling_params_provided_keys: set[str] | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _remember_what_was_sent(
        cls, data: object, handler: ModelWrapValidatorHandler[GenerateRequest]
    ) -> GenerateRequest:
        request = handler(data)
        if isinstance(data, dict) and isinstance(data.get("sampling_params"), dict):
            request._sampling_params_provided_keys = set(request.sampling_params.model_fields_set)
        return request

    @model_validator(mode="after")
    def _validate_multimodal(self) -> GenerateRequest:
        if self.features is None:
            return self
        if self.content_parts:
            raise refusal("content_parts and features are mutually exclusive", field="content_parts")
        if not self.ec_transfer_params and _has_metadata_only_items(self.features):
            raise refusal("metadata-only multimodal items require ec_transfer_params", field="ec_transfer_params")
        end = len(self.token_ids)
        for ranges in self.features.mm_placeholders.values():
            if any(r.offset + r.length > end for r in ranges):
                raise refusal("mm_placeholders must remain within the token_ids sequence", field="features")
        return self

    @model_validator(mode="after")
    def _check_output_mode_detokenizes(self) -> GenerateRequest:
        if self.output_mode != "tokens" and not self.sampling_params.detokenize:
            raise refusal(
                f"output_mode={self.output_mode!r} requires sampling_params.detokenize to be true",
                field="output_mode",
            )
        return self

    @field_serializer("sampling_params")
    def _only_provided(self, params: SamplingParams, info: FieldSerializationInfo) -> JsonObject:
        keys = self._sampling_params_provided_keys
        return params.model_dump(
            mode=info.mode,
            include=keys,
            exclude_unset=info.exclude_unset and keys is not None,
            exclude_none=info.exclude_none,
        )

    def is_sampling_param_provided(self, name: str) -> bool:
        """Whether the client itself set `sampling_params.<name>`, also after a trip through JSON.

        A request built from a ready `SamplingParams` has them all.
        """
        provided = self._sampling_params_provided_keys
        return provided is None or name in provided

    def to_wire(self) -> bytes:
        """JSON of what the client sent and the request id: parsing it gives an equal request."""
        self.model_fields_set.add("request_id")
        return self.model_dump_json(exclude_unset=True).encode()


def _has_metadata_only_items(features: MultiModalFeatures) -> bool:
    for modality, items in (features.mm_metadata or {}).items():
        tensors = (features.kwargs_data or {}).get(modality, [None] * len(items))
        if any(item is not None and tensor is None for item, tensor in zip(items, tensors, strict=True)):
            return True
    return False


class WeightVersionSpan(WireModel):
    """Output tokens `start` to `end` (not included) came from weights of this version."""

    version: str
    start: int
    end: int


class GenerateChoiceBase(WireModel):
    """What a choice has in every output mode.

    `routed_experts` is a base64 .npy of shape (tokens - 1, layers, experts per token); `stop_reason` is the
    stop string or token id that ended the choice, null for others.
    """

    index: int
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: TokenIds | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class GenerateTokensChoice(GenerateChoiceBase):
    """A finished choice as token ids."""

    logprobs: TokenLogProbs | None = None


class GenerateTextChoice(GenerateChoiceBase):
    """A finished choice as text; a matched stop string is cut from `text`, never from `token_ids`."""

    text: str
    logprobs: ChatCompletionLogProbs | None = None


class GenerateStreamChoiceBase(WireModel):
    """What a choice of a chunk has in every output mode; `token_ids` are the new ones."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class GenerateTokensStreamChoice(GenerateStreamChoiceBase):
    """New token ids of one choice."""

    logprobs: TokenLogProbs | None = None


class GenerateTextStreamChoice(GenerateStreamChoiceBase):
    """New text of one choice."""

    text: str
    logprobs: ChatCompletionLogProbs | None = None


MmPlaceholders = dict[str, list[PlaceholderRangeInfo]]


class GenerateResponseBase(WireModel):
    """What a whole response has in every output mode."""

    request_id: str = Field(default_factory=new_request_id)
    model: str | None = None
    created: int | None = None
    usage: UsageInfo | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[NonNegativeInt] | None = None
    mm_placeholders: MmPlaceholders | None = None
    metrics: PerRequestMetrics | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None


class GenerateTokensResponse(GenerateResponseBase):
    """The whole output as token ids."""

    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateTokensChoice]


class GenerateTextResponse(GenerateResponseBase):
    """The whole output as text."""

    output_mode: Literal["text"] = "text"
    choices: list[GenerateTextChoice]


class GenerateStreamResponseBase(WireModel):
    """What a chunk has in every output mode; prompt ids and placeholders come with the first chunk."""

    request_id: str = Field(default_factory=new_request_id)
    usage: UsageInfo | None = None
    prompt_token_ids: list[NonNegativeInt] | None = Field(default=None, exclude_if=absent)
    mm_placeholders: MmPlaceholders | None = Field(default=None, exclude_if=absent)
    metrics: PerRequestMetrics | None = Field(default=None, exclude_if=absent)


class GenerateTokensStreamResponse(GenerateStreamResponseBase):
    """One chunk of token ids; the usage chunk has no choices."""

    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateTokensStreamChoice]


class GenerateTextStreamResponse(GenerateStreamResponseBase):
    """One chunk of text; the usage chunk has no choices."""

    output_mode: Literal["text"] = "text"
    choices: list[GenerateTextStreamChoice]


def output_mode_or_tokens(value: object) -> object:
    """The mode that tells responses apart. Servers older than the field do not send it: they mean tokens."""
    if isinstance(value, dict):
        return value.get("output_mode", "tokens")
    return getattr(value, "output_mode", "tokens")


def _mode_shape(value: object) -> str:
    return f"({output_mode_or_tokens(value)})"


_BY_MODE: Final = Discriminator(
    _mode_shape,
    custom_error_type="refused",
    custom_error_message="{message}",
    custom_error_context={"message": "output_mode must be 'tokens' or 'text'.", "field": "output_mode"},
)

GenerateResponse = Annotated[
    Annotated[GenerateTokensResponse, Tag("(tokens)")] | Annotated[GenerateTextResponse, Tag("(text)")], _BY_MODE
]
GenerateStreamResponse = Annotated[
    Annotated[GenerateTokensStreamResponse, Tag("(tokens)")] | Annotated[GenerateTextStreamResponse, Tag("(text)")],
    _BY_MODE,
]
