"""The generate request and its responses: bounds, modes, dialects, and what survives a queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from pydantic import TypeAdapter, ValidationError

from headrace.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionRequest,
    GenerateLogProbs,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    GenerateTextChoice,
    GenerateTextResponse,
    GenerateTextStreamResponse,
    GenerateTokensChoice,
    GenerateTokensResponse,
    GenerateTokensStreamChoice,
    GenerateTokensStreamResponse,
    SamplingParams,
    bad_request,
    in_integers,
    jobs,
)

IMAGE = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}
TWO = {
    "mm_hashes": {"image": ["h", "i"]},
    "mm_placeholders": {"image": [{"offset": 0, "length": 2}, {"offset": 1, "length": 1}]},
}

REFUSED = [
    ({"token_ids": None}, "token_ids", "token_ids is required."),
    ({"token_ids": []}, "token_ids", "token_ids must not be empty."),
    ({"token_ids": [5, -1]}, "token_ids.1", "token_ids must not contain negative values"),
    ({"token_ids": ["a"]}, "token_ids.0", "token_ids.0 must be an integer."),
    (
        {"sampling_params": {"top_p": 0}},
        "sampling_params.top_p",
        "top_p must be in (0, 1], got 0.0.",
    ),
    (
        {"sampling_params": {"n": 2, "temperature": 0}},
        "sampling_params.n",
        "n must be 1 when using greedy sampling, got 2.",
    ),
    (
        {"content_parts": [{"type": "image_url"}], "features": IMAGE},
        "content_parts",
        "content_parts and features are mutually exclusive",
    ),
    (
        {"features": IMAGE | {"mm_metadata": {"image": ["m"]}}},
        "ec_transfer_params",
        "metadata-only multimodal items require ec_transfer_params",
    ),
    (
        {"features": IMAGE | {"mm_metadata": {"image": ["m"]}, "kwargs_data": {"image": [None]}}},
        "ec_transfer_params",
        "metadata-only multimodal items require ec_transfer_params",
    ),
    (
        {"features": {"mm_hashes": {"a": ["h"]}, "mm_placeholders": {"a": [{"offset": 1, "length": 1}]}}},
        "features",
        "mm_placeholders must remain within the token_ids sequence",
    ),
    (
        {"features": IMAGE | {"mm_placeholders": {}}},
        "features.mm_placeholders",
        "mm_hashes and mm_placeholders must use the same modalities",
    ),
    (
        {"features": IMAGE | {"kwargs_data": {}}},
        "features.kwargs_data",
        "kwargs_data must use the same modalities as mm_hashes",
    ),
    (
        {"features": IMAGE | {"mm_metadata": {}}},
        "features.mm_metadata",
        "mm_metadata must use the same modalities as mm_hashes",
    ),
    (
        {"features": IMAGE | {"mm_placeholders": {"image": []}}},
        "features.mm_placeholders",
        "image mm_hashes and mm_placeholders must have the same length",
    ),
    (
        {"features": IMAGE | {"kwargs_data": {"image": []}}},
        "features.kwargs_data",
        "image kwargs_data and mm_hashes must have the same length",
    ),
    (
        {"features": IMAGE | {"mm_metadata": {"image": []}}},
        "features.mm_metadata",
        "image mm_metadata and mm_hashes must have the same length",
    ),
    (
        {"features": TWO, "token_ids": [1, 2]},
        "features.mm_placeholders",
        "mm_placeholders must be globally non-overlapping and sorted",
    ),
    (
        {"features": IMAGE | {"mm_placeholders": {"image": [{"offset": -1, "length": 1}]}}},
        "features.mm_placeholders.image.0.offset",
        "features.mm_placeholders.image.0.offset must be at least 0.",
    ),
    (
        {"features": IMAGE | {"mm_placeholders": {"image": [{"offset": 0, "length": 0}]}}},
        "features.mm_placeholders.image.0.length",
        "features.mm_placeholders.image.0.length must be greater than 0.",
    ),
    (
        {"output_mode": "text", "sampling_params": {"detokenize": False}},
        "output_mode",
        "output_mode='text' requires sampling_params.detokenize to be true",
    ),
    ({"output_mode": "sound"}, "output_mode", "output_mode must be 'tokens' or 'text'."),
    ({"cache_salt": ""}, "cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided."),
    ({"cache_salt": 5}, "cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided."),
    ({"cache_salt": "a" * 1025}, "cache_salt", "cache_salt must have at most 1024 characters."),
    ({"priority": 2**63}, "priority", "priority must be at most 9223372036854775807."),
    ({"priority": -(2**63) - 1}, "priority", "priority must be at least -9223372036854775808."),
    (
        {"reasoning_parser_kwargs": {"model": "m"}},
        "reasoning_parser_kwargs.model",
        "reasoning_parser_kwargs.model is not a known field.",
    ),
]


def _request(**sent: object) -> GenerateRequest:
    return GenerateRequest.model_validate_json(json.dumps({"token_ids": [1], "sampling_params": {}} | sent))


@pytest.mark.parametrize(("sent", "param", "message"), REFUSED, ids=lambda case: str(case)[:60])
def test_a_generate_request_out_of_bounds_is_refused_by_field(
    sent: dict[str, object], param: str, message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        _request(**sent)
    error = bad_request(caught.value)
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize("missing", ["token_ids", "sampling_params"])
def test_what_a_generate_request_needs_is_named(missing: str) -> None:
    sent = {"token_ids": [1], "sampling_params": {}}
    del sent[missing]
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate_json(json.dumps(sent))
    assert bad_request(caught.value).message == f"{missing} is required."


@pytest.mark.parametrize(
    "sent",
    [
        {"features": IMAGE | {"mm_metadata": {"image": ["m"]}}, "ec_transfer_params": {"a": 1}},
        {"features": IMAGE | {"mm_metadata": {"image": ["m"]}, "kwargs_data": {"image": ["k"]}}},
        {"features": IMAGE | {"mm_metadata": {"image": [None]}}},
        {"features": IMAGE, "content_parts": []},
        {"output_mode": "text"},
        {"sampling_params": {"detokenize": False}},
        {"cache_salt": "a" * 1024},
        {"priority": -(2**63)},
        {"token_ids": [0]},
    ],
)
def test_the_edge_of_a_bound_is_inside(sent: dict[str, object]) -> None:
    request = _request(**sent)
    assert request.model_dump(mode="json", exclude_unset=True).items() >= sent.items()


def test_each_request_without_an_id_gets_its_own() -> None:
    first, second = _request(), _request()
    assert len(first.request_id) == 32
    assert first.request_id != second.request_id


NAMES = sorted(SamplingParams.model_fields)
SAMPLES: dict[str, object] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 16,
    "n": 1,
    "stop": ["x"],
    "seed": None,
    "logit_bias": {"5": 1.0},
    "structured_outputs": {"json": {"type": "object"}},
    "of_next_year": {"a": None},
}


def _in_an_envelope(request: GenerateRequest) -> bytes:
    job = jobs.GenerateJob(client="c", request_id="r", model="m", request=Raw(request.to_wire()))
    arrived = jobs.decode(jobs.encode(job))
    assert isinstance(arrived, jobs.GenerateJob)
    return bytes(arrived.request)


TRIPS = {
    "envelope": _in_an_envelope,
    "to_wire": GenerateRequest.to_wire,
    "full dump": GenerateRequest.model_dump_json,
    "dump of what was set": lambda request: request.model_dump_json(exclude_unset=True),
    "python dump": lambda request: json.dumps(request.model_dump(mode="json")),
}


@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS.keys())
@given(names=st.sets(st.sampled_from(sorted(SAMPLES))))
def test_which_sampling_params_were_sent_survives_any_trip(
    trip: Callable[[GenerateRequest], str | bytes], names: set[str]
) -> None:
    request = _request(sampling_params={name: SAMPLES[name] for name in names})
    again = GenerateRequest.model_validate_json(trip(request))
    provided = {name for name in {*NAMES, *SAMPLES} if again.is_sampling_param_provided(name)}
    assert provided == names
    assert again.sampling_params == request.sampling_params


@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS.keys())
@given(names=st.sets(st.sampled_from(NAMES)))
def test_a_null_counts_as_sent_after_any_trip_only_where_null_is_a_value(
    trip: Callable[[GenerateRequest], str | bytes], names: set[str]
) -> None:
    request = _request(sampling_params=dict.fromkeys(names))
    again = GenerateRequest.model_validate_json(trip(request))
    nullable = {name for name, field in SamplingParams.model_fields.items() if field.default is None}
    for each in (request, again):
        assert {name for name in NAMES if each.is_sampling_param_provided(name)} == names & nullable
        assert each.sampling_params == SamplingParams()


@pytest.mark.parametrize(
    ("sent", "provided"),
    [
        ({}, set()),
        ({"max_tokens": None, "temperature": None, "seed": None, "stop": None}, set()),
        ({"temperature": 0.5, "seed": 7, "stop": []}, {"temperature", "seed", "stop"}),
        ({"max_tokens": 3, "max_completion_tokens": None, "logprobs": True}, {"max_tokens", "logprobs"}),
    ],
)
def test_what_a_chat_sent_is_what_counts_as_sent_after_both_queues(sent: dict[str, object], provided: set[str]) -> None:
    body = Raw(json.dumps({"messages": [{"role": "user", "content": "a"}]} | sent).encode())
    job = jobs.RenderJob(client="c", request_id="r", model="m", endpoint="/v1/chat/completions", body=body)
    arrived = jobs.decode(jobs.encode(job))
    assert isinstance(arrived, jobs.RenderJob)
    chat = ChatCompletionRequest.model_validate_json(bytes(arrived.body))
    rendered = GenerateRequest.model_validate({"token_ids": [1], "sampling_params": chat.to_sampling_params(None)})
    again = GenerateRequest.model_validate_json(_in_an_envelope(rendered))
    assert {name for name in NAMES if again.is_sampling_param_provided(name)} == provided


def test_a_wire_trip_keeps_the_whole_request() -> None:
    request = _request(model="m", stream=True, priority=-3, features=IMAGE, of_next_year=[1])
    assert GenerateRequest.model_validate_json(request.to_wire()) == request


def test_the_wire_holds_what_the_client_sent_and_the_id() -> None:
    request = _request(sampling_params={"top_k": 4, "stop": None})
    assert json.loads(request.to_wire()) == {
        "request_id": request.request_id,
        "token_ids": [1],
        "sampling_params": {"top_k": 4},
    }


def test_of_a_ready_made_sampling_params_all_counts_as_given_also_after_a_trip() -> None:
    request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(temperature=0.5))
    again = GenerateRequest.model_validate_json(request.to_wire())
    for each in (request, again):
        assert all(each.is_sampling_param_provided(name) for name in NAMES)
        assert each.sampling_params.max_tokens is None


def test_an_absent_limit_never_becomes_one() -> None:
    request = GenerateRequest.model_validate_json(_request().to_wire())
    assert request.sampling_params.max_tokens is None
    assert not request.is_sampling_param_provided("max_tokens")
    assert "max_tokens" not in json.loads(request.model_dump_json())["sampling_params"]


TOKENS = {"request_id": "a", "choices": [{"index": 0, "token_ids": [1]}]}
TEXT = {"request_id": "a", "output_mode": "text", "choices": [{"index": 0, "text": "x"}]}


@pytest.mark.parametrize(
    ("sent", "whole", "chunk"),
    [
        (TOKENS, GenerateTokensResponse, GenerateTokensStreamResponse),
        (TOKENS | {"output_mode": "tokens"}, GenerateTokensResponse, GenerateTokensStreamResponse),
        (TEXT, GenerateTextResponse, GenerateTextStreamResponse),
    ],
)
def test_a_response_is_told_apart_by_its_mode_and_without_one_means_tokens(
    sent: dict[str, object], whole: type, chunk: type
) -> None:
    body = json.dumps(sent)
    assert type(TypeAdapter(GenerateResponse).validate_json(body)) is whole
    assert type(TypeAdapter(GenerateStreamResponse).validate_json(body)) is chunk
    made = whole.model_validate(sent)
    assert TypeAdapter(GenerateResponse).validate_python(made) is made


@pytest.mark.parametrize(
    ("sent", "param", "message"),
    [
        (TOKENS | {"output_mode": "sound"}, "output_mode", "output_mode must be 'tokens' or 'text'."),
        (TOKENS | {"output_mode": None}, "output_mode", "output_mode must be 'tokens' or 'text'."),
        (TOKENS | {"output_mode": ["text"]}, "output_mode", "output_mode must be 'tokens' or 'text'."),
        (
            TEXT | {"choices": [{"index": 0}]},
            "choices.0.text",
            "choices.0.text is required.",
        ),
        (
            TOKENS | {"choices": [{"index": 0, "token_ids": [1, -1]}]},
            "choices.0.token_ids.1",
            "token_ids must not contain negative values",
        ),
        (
            TOKENS | {"prompt_token_ids": [-1]},
            "prompt_token_ids.0",
            "prompt_token_ids.0 must be at least 0.",
        ),
    ],
)
def test_a_response_that_is_none_is_refused_by_field(sent: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(GenerateResponse).validate_json(json.dumps(sent))
    error = bad_request(caught.value)
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize("kind", [GenerateResponse, GenerateStreamResponse])
@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"output_mode": "sound", "choices": []}, "1.output_mode"),
        ({"output_mode": "tokens"}, "1.choices"),
        ({"output_mode": "text", "choices": [{"index": 0}]}, "1.choices.0.text"),
        ([], "1"),
    ],
)
def test_the_mode_of_a_response_is_no_part_of_a_fields_path(kind: Any, sent: object, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(list[kind]).validate_json(json.dumps([TOKENS, sent]))
    assert bad_request(caught.value).param == param


def test_the_text_of_a_choice_is_named_where_it_is_missing() -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateTextChoice.model_validate_json('{"index": 0}')
    assert bad_request(caught.value).message == "text is required."


def test_a_whole_choice_stops_by_default_and_a_streamed_one_goes_on() -> None:
    assert GenerateTokensChoice(index=0).finish_reason == "stop"
    assert GenerateTokensStreamChoice(index=0).finish_reason is None


INTEGERS = {
    "content": [{"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": [{"token_id": 9, "logprob": -1.5}]}]
}
STRINGS = {
    "content": [
        {
            "token": "token_id:7",
            "logprob": -0.5,
            "top_logprobs": [{"token": "token_id:9", "logprob": -1.5, "bytes": None}],
        }
    ]
}


@pytest.mark.parametrize("choice", [GenerateTokensChoice, GenerateTokensStreamChoice])
@pytest.mark.parametrize(
    ("sent", "dialect"),
    [
        (INTEGERS, GenerateLogProbs),
        (STRINGS, ChatCompletionLogProbs),
        ({"content": []}, GenerateLogProbs),
        ({"content": None}, GenerateLogProbs),
    ],
)
def test_both_logprob_dialects_are_read_and_written_as_they_came(
    choice: type[GenerateTokensChoice | GenerateTokensStreamChoice], sent: dict[str, object], dialect: type
) -> None:
    read = choice.model_validate_json(json.dumps({"index": 0, "logprobs": sent}))
    assert type(read.logprobs) is dialect
    assert read.model_dump(exclude_unset=True)["logprobs"] == sent
    assert choice.model_validate(read.model_copy(deep=True).model_dump()) == read


def test_string_logprobs_turn_into_integers() -> None:
    expected = {"content": [{"token_id": 7, "logprob": -0.5, "top_logprobs": [{"token_id": 9, "logprob": -1.5}]}]}
    turned = in_integers(ChatCompletionLogProbs.model_validate(STRINGS))
    assert turned.model_dump(exclude_none=True) == expected
    assert in_integers(turned) is turned
    assert in_integers(ChatCompletionLogProbs()) == GenerateLogProbs()


@pytest.mark.parametrize("token", ["Paris", "token_id:", "token_id:-1", "token_id:٣", "token_id: 7", "7"])
def test_a_spelled_token_has_no_id(token: str) -> None:
    logprobs = ChatCompletionLogProbs.model_validate({"content": [{"token": token}]})
    with pytest.raises(ValueError, match="must name tokens as token_id:N"):
        in_integers(logprobs)


def test_unknown_fields_of_a_response_survive() -> None:
    sent = TOKENS | {
        "of_next_year": 1,
        "choices": [{"index": 0, "x": [1], "logprobs": INTEGERS | {"y": 2}}],
        "usage": {"prompt_tokens": 1, "z": {}},
    }
    response = TypeAdapter(GenerateStreamResponse).validate_json(json.dumps(sent))
    assert response.model_dump(exclude_unset=True) == sent


def test_a_chunk_says_first_chunk_things_only_when_it_has_them() -> None:
    chunk = GenerateTokensStreamResponse(request_id="a", choices=[])
    assert list(chunk.model_dump()) == ["request_id", "usage", "output_mode", "choices"]
    first = GenerateTokensStreamResponse(request_id="a", choices=[], prompt_token_ids=[1])
    assert first.model_dump()["prompt_token_ids"] == [1]
