"""The Structs of the hot path and the pydantic models are one JSON, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from headrace.protocol import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    CompletionLogProbs,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
    CompletionTokenUsageInfo,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    DerenderStreamState,
    GenerateLogProb,
    GenerateLogProbs,
    GenerateLogProbsContent,
    GenerateTextStreamChoice,
    GenerateTextStreamResponse,
    GenerateTokensStreamChoice,
    GenerateTokensStreamResponse,
    PerRequestMetrics,
    PlaceholderRangeInfo,
    PromptTokenUsageInfo,
    UsageInfo,
    WeightVersionSpan,
    wire,
)
from headrace.protocol.base import WireModel


@dataclass(frozen=True, slots=True)
class Twins:
    """A model, its Struct, and the JSON of both: a strategy that may set every field of the model."""

    model: type[WireModel]
    struct: type[Struct]
    json: st.SearchStrategy[dict[str, Any]]
    fields: frozenset[str]


def twins(
    model: type[WireModel],
    struct: type[Struct],
    required: Mapping[str, st.SearchStrategy[Any]] = MappingProxyType({}),
    **optional: st.SearchStrategy[Any],
) -> Twins:
    json = st.fixed_dictionaries(dict(required), optional=optional)
    return Twins(model, struct, json, frozenset({*required, *optional}))


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value, a null, or nothing at all: to a reader of the wire the last two are the same."""
    return st.none() | strategy


def few(of: Twins) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(of.json, max_size=2)


numbers = st.integers(min_value=0, max_value=2**40)
logprob = st.floats(min_value=-1e4, max_value=0)
text = st.text(max_size=8)
ids = st.lists(numbers, max_size=4)
octets = some(st.lists(st.integers(0, 255), max_size=4))
stop_reason = some(numbers | text)
free = st.dictionaries(
    text,
    st.recursive(
        st.none() | st.booleans() | numbers | logprob | text,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
head = {"id": text, "created": numbers, "model": text}

prompt_details = twins(PromptTokenUsageInfo, wire.PromptTokensDetails, cached_tokens=some(numbers))
completion_details = twins(CompletionTokenUsageInfo, wire.CompletionTokensDetails, reasoning_tokens=some(numbers))
usage = twins(
    UsageInfo,
    wire.Usage,
    prompt_tokens=numbers,
    total_tokens=numbers,
    completion_tokens=some(numbers),
    prompt_tokens_details=some(prompt_details.json),
    completion_tokens_details=some(completion_details.json),
)
metrics = twins(
    PerRequestMetrics,
    wire.Metrics,
    time_to_first_token_ms=some(logprob),
    generation_time_ms=some(logprob),
    queue_time_ms=some(logprob),
    mean_itl_ms=some(logprob),
    tokens_per_second=some(logprob),
    speculative_decoding=some(free),
)

placeholder = twins(PlaceholderRangeInfo, wire.Placeholder, {"offset": numbers, "length": st.integers(1, 9)})
weights = twins(WeightVersionSpan, wire.WeightVersion, {"version": text, "start": numbers, "end": numbers})
token_logprob = twins(GenerateLogProb, wire.TokenLogprob, {"token_id": numbers, "logprob": logprob}, rank=some(numbers))
token_entry = twins(
    GenerateLogProbsContent,
    wire.TokenLogprobEntry,
    {"token_id": numbers, "logprob": logprob},
    rank=some(numbers),
    top_logprobs=few(token_logprob),
)
token_logprobs = twins(GenerateLogProbs, wire.TokenLogprobs, content=some(few(token_entry)))
token_choice = twins(
    GenerateTokensStreamChoice,
    wire.TokenChoice,
    {"index": numbers},
    finish_reason=some(text),
    stop_reason=stop_reason,
    token_ids=some(ids),
    routed_experts=some(text),
    sampling_mask=some(st.lists(ids, max_size=2)),
    weight_versions=some(few(weights)),
    logprobs=some(token_logprobs.json),
)
token_chunk = twins(
    GenerateTokensStreamResponse,
    wire.TokenChunk,
    {"request_id": text, "choices": few(token_choice)},
    output_mode=st.just("tokens"),
    usage=some(usage.json),
    prompt_token_ids=some(ids),
    mm_placeholders=some(st.dictionaries(text, few(placeholder), max_size=2)),
    metrics=some(metrics.json),
)

chat_logprob = twins(ChatCompletionLogProb, wire.ChatLogprob, {"token": text}, logprob=logprob, bytes=octets)
chat_entry = twins(
    ChatCompletionLogProbsContent,
    wire.ChatLogprobEntry,
    {"token": text},
    logprob=logprob,
    bytes=octets,
    top_logprobs=few(chat_logprob),
)
chat_logprobs = twins(ChatCompletionLogProbs, wire.ChatLogprobs, content=some(few(chat_entry)))
text_choice = twins(
    GenerateTextStreamChoice,
    wire.TextChoice,
    {"index": numbers, "text": text},
    finish_reason=some(text),
    stop_reason=stop_reason,
    token_ids=some(ids),
    routed_experts=some(text),
    sampling_mask=some(st.lists(ids, max_size=2)),
    weight_versions=some(few(weights)),
    logprobs=some(chat_logprobs.json),
)
text_chunk = twins(
    GenerateTextStreamResponse,
    wire.TextChunk,
    {"request_id": text, "choices": few(text_choice)},
    output_mode=st.just("text"),
    usage=some(usage.json),
    prompt_token_ids=some(ids),
    mm_placeholders=some(st.dictionaries(text, few(placeholder), max_size=2)),
    metrics=some(metrics.json),
)
function_delta = twins(DeltaFunctionCall, wire.FunctionDelta, name=some(text), arguments=some(text))
tool_call_delta = twins(
    DeltaToolCall,
    wire.ToolCallDelta,
    {"index": numbers},
    id=some(text),
    type=some(st.just("function")),
    function=some(function_delta.json),
)
delta = twins(
    DeltaMessage,
    wire.Delta,
    role=some(text),
    content=some(text),
    reasoning=some(text),
    tool_calls=few(tool_call_delta),
)
chat_choice = twins(
    ChatCompletionResponseStreamChoice,
    wire.ChatChoice,
    {"index": numbers, "delta": delta.json},
    logprobs=some(chat_logprobs.json),
    finish_reason=some(text),
    stop_reason=stop_reason,
    token_ids=some(ids),
    routed_experts=some(text),
)
chat_chunk = twins(
    ChatCompletionStreamResponse,
    wire.ChatChunk,
    {**head, "choices": few(chat_choice)},
    object=st.just("chat.completion.chunk"),
    usage=some(usage.json),
    system_fingerprint=some(text),
    prompt_token_ids=some(ids),
    prompt_text=some(text),
    metrics=some(metrics.json),
)

completion_logprobs = twins(
    CompletionLogProbs,
    wire.CompletionLogprobs,
    text_offset=ids,
    token_logprobs=st.lists(some(logprob), max_size=2),
    tokens=st.lists(text, max_size=2),
    top_logprobs=st.lists(some(st.dictionaries(text, logprob, max_size=2)), max_size=2),
)
completion_choice = twins(
    CompletionResponseStreamChoice,
    wire.CompletionChoice,
    {"index": numbers, "text": text},
    logprobs=some(completion_logprobs.json),
    finish_reason=some(text),
    stop_reason=stop_reason,
    prompt_token_ids=some(ids),
    token_ids=some(ids),
    routed_experts=some(text),
)
completion_chunk = twins(
    CompletionStreamResponse,
    wire.CompletionChunk,
    {**head, "choices": few(completion_choice)},
    object=st.just("text_completion"),
    usage=some(usage.json),
    system_fingerprint=some(text),
    metrics=some(metrics.json),
)

state = twins(
    DerenderStreamState,
    wire.StreamState,
    prev_tokens=st.lists(text, max_size=3),
    prefix_offset=numbers,
    read_offset=numbers,
    role_sent=st.booleans(),
    logprob_context_token_ids=st.lists(numbers, max_size=4),
    logprob_text_offset=numbers,
    output_token_ids=ids,
    output_chunk_lens=st.just([]),
    tools_streamed=st.booleans(),
    last_tool_call_ids=st.lists(text, max_size=2),
    scan=some(free),
)


@st.composite
def chunks_of_output(draw: st.DrawFn) -> dict[str, Any]:
    """A state whose chunk lengths are those of its output."""
    lens = draw(st.lists(st.integers(1, 5), max_size=3))
    output = draw(st.lists(numbers, min_size=sum(lens), max_size=sum(lens)))
    return draw(state.json) | {"output_chunk_lens": lens, "output_token_ids": output}


TWINS = [
    prompt_details,
    completion_details,
    usage,
    metrics,
    placeholder,
    weights,
    token_logprob,
    token_entry,
    token_logprobs,
    token_choice,
    token_chunk,
    chat_logprob,
    chat_entry,
    chat_logprobs,
    text_choice,
    text_chunk,
    function_delta,
    tool_call_delta,
    delta,
    chat_choice,
    chat_chunk,
    completion_logprobs,
    completion_choice,
    completion_chunk,
    replace(state, json=chunks_of_output()),
]
every_pair = pytest.mark.parametrize("pair", TWINS, ids=lambda pair: pair.struct.__name__)


@every_pair
@given(data=st.data())
def test_a_model_and_its_struct_are_one_json_both_ways(pair: Twins, data: st.DataObject) -> None:
    sent = data.draw(pair.json)
    model = pair.model.model_validate_json(json.dumps(sent))
    struct = msgspec.json.decode(json.dumps(sent), type=pair.struct)

    # model -> JSON -> Struct -> JSON -> model, with every default written and without
    for written in (model.model_dump_json(), model.model_dump_json(exclude_unset=True)):
        assert msgspec.json.decode(written, type=pair.struct) == struct
    assert pair.model.model_validate_json(msgspec.json.encode(struct)) == model
    # Struct -> JSON -> model -> JSON -> Struct
    again = pair.model.model_validate_json(msgspec.json.encode(struct)).model_dump_json()
    assert msgspec.json.decode(again, type=pair.struct) == struct
    # and without JSON in between
    assert msgspec.convert(model, pair.struct, from_attributes=True) == struct
    assert pair.model.model_validate(struct, from_attributes=True) == model


@every_pair
def test_twins_have_the_same_fields_with_the_same_defaults(pair: Twins) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(pair.struct)}
    of_model = pair.model.model_fields
    assert {*fields, pair.struct.__struct_config__.tag_field} - {None} == set(of_model) == pair.fields
    for name, field in fields.items():
        if field.default_factory is not msgspec.NODEFAULT:
            assert of_model[name].get_default(call_default_factory=True) == field.default_factory()
        elif field.default is not msgspec.NODEFAULT:
            assert of_model[name].get_default() == field.default


@every_pair
@given(data=st.data())
def test_fields_that_a_struct_does_not_know_do_no_harm(pair: Twins, data: st.DataObject) -> None:
    sent = data.draw(pair.json)
    known = msgspec.json.decode(json.dumps(sent), type=pair.struct)
    assert msgspec.json.decode(json.dumps(sent | {"of_next_year": [1]}), type=pair.struct) == known


def test_every_struct_has_its_twin() -> None:
    structs = {kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, wire.Value)}
    assert structs - {wire.Value} == {pair.struct for pair in TWINS}


def test_what_is_at_its_default_is_not_written_but_the_kind_always_is() -> None:
    delta = wire.Delta(content="hi")
    chunk = wire.ChatChunk(id="a", created=1, model="m", choices=[wire.ChatChoice(index=0, delta=delta)])
    assert json.loads(msgspec.json.encode(chunk)) == {
        "object": "chat.completion.chunk",
        "id": "a",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "hi"}}],
    }
    assert msgspec.json.encode(wire.StreamState()) == b"{}"


@pytest.mark.parametrize(
    ("struct_type", "body"),
    [
        (wire.TokenChunk, b'{"output_mode":"text","request_id":"a","choices":[]}'),
        (wire.ChatChunk, b'{"object":"text_completion","id":"a","created":1,"model":"m","choices":[]}'),
        (wire.TokenChunk, b'{"request_id":"a","choices":[{"index":0,"logprobs":{"content":[{"token":"a"}]}}]}'),
    ],
)
def test_another_kind_of_chunk_is_not_taken_for_ours(struct_type: type[Struct], body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=struct_type)


@every_pair
def test_a_struct_is_a_value_that_the_collector_may_skip(pair: Twins) -> None:
    config = pair.struct.__struct_config__
    assert (config.frozen, config.gc, config.omit_defaults) == (True, False, True)
