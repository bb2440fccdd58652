"""Sampling parameters: every bound has its smallest violation, and says it in one sentence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from headrace.protocol import SamplingParams, bad_request

REFUSED = [
    ({"n": 0}, "n", "n must be at least 1, got 0."),
    ({"n": 16385}, "n", "n must be at most 16384, got 16385."),
    ({"n": 2, "temperature": 0}, "n", "n must be 1 when using greedy sampling, got 2."),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty must be in [-2, 2], got 2.5."),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "frequency_penalty must be in [-2, 2], got -2.5."),
    (
        {"repetition_penalty": 0.0},
        "repetition_penalty",
        "repetition_penalty must be greater than zero, got 0.0.",
    ),
    (
        {"repetition_penalty": float("inf")},
        "repetition_penalty",
        "repetition_penalty must be a finite number, got inf.",
    ),
    ({"temperature": -1.0}, "temperature", "temperature must be non-negative, got -1.0."),
    ({"temperature": 2.5}, "temperature", "temperature must be in [0, 2], got 2.5."),
    ({"temperature": float("nan")}, "temperature", "temperature must be a finite number, got nan."),
    ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.5}, "top_p", "top_p must be in (0, 1], got 1.5."),
    ({"top_k": -2}, "top_k", "top_k must be 0 (disable), or at least 1, got -2."),
    ({"min_p": -0.5}, "min_p", "min_p must be in [0, 1], got -0.5."),
    ({"min_p": 1.5}, "min_p", "min_p must be in [0, 1], got 1.5."),
    ({"seed": 2**63}, "seed", "seed must be at most 9223372036854775807."),
    ({"seed": -(2**63) - 1}, "seed", "seed must be at least -9223372036854775808."),
    ({"stop": [""]}, "stop.0", "stop cannot contain an empty string."),
    (
        {"stop": "x", "detokenize": False},
        "stop",
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
    ),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids.1", "stop_token_ids must not contain negative values"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be greater than or equal to 0, got -1."),
    (
        {"min_tokens": 3, "max_tokens": 2},
        "min_tokens",
        "min_tokens must be less than or equal to max_tokens=2, got 3.",
    ),
    ({"logprobs": -2}, "logprobs", "logprobs must be non-negative or -1, got -2."),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "prompt_logprobs must be non-negative or -1, got -2."),
    (
        {"prompt_logprob_token_ids": []},
        "prompt_logprob_token_ids",
        "prompt_logprob_token_ids must hold at least one token id.",
    ),
    (
        {"prompt_logprob_token_ids": [[], []]},
        "prompt_logprob_token_ids",
        "prompt_logprob_token_ids must hold at least one token id.",
    ),
    (
        {"prompt_logprob_token_ids": [[1], [-2]]},
        "prompt_logprob_token_ids.1",
        "prompt_logprob_token_ids must hold token ids, or -1 to fill a row up",
    ),
    (
        {"prompt_logprob_token_ids": [1]},
        "prompt_logprob_token_ids.0",
        "prompt_logprob_token_ids.0 must be a list.",
    ),
    (
        {"prompt_logprob_token_ids": [[True]]},
        "prompt_logprob_token_ids.0.0",
        "prompt_logprob_token_ids.0.0 must be an integer.",
    ),
    ({"prompt_logprob_start": -1}, "prompt_logprob_start", "prompt_logprob_start must be at least 0."),
    (
        {"logprob_token_ids": []},
        "logprob_token_ids",
        "logprob_token_ids must not be empty.",
    ),
    (
        {"logprob_token_ids": [1] * 129},
        "logprob_token_ids",
        "logprob_token_ids must have at most 128 items, got 129.",
    ),
    (
        {"logprob_token_ids": [1], "logprobs": 2},
        "logprobs",
        "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
        "Got logprobs=2, len(logprob_token_ids)=1.",
    ),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "truncate_prompt_tokens must be at least -1."),
    (
        {"truncate_prompt_tokens": 2**63},
        "truncate_prompt_tokens",
        "truncate_prompt_tokens must be at most 9223372036854775807.",
    ),
    ({"output_kind": 3}, "output_kind", "output_kind must be 0, 1 or 2."),
    ({"stream_interval": 0}, "stream_interval", "stream_interval must be at least 1, got 0."),
    ({"logit_bias": {"-1": 0}}, "logit_bias.-1", "logit_bias must not contain negative token ids"),
    (
        {"logit_bias": {"1": float("nan")}},
        "logit_bias.1",
        "logit_bias must contain finite numbers",
    ),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids must not be empty."),
    (
        {"allowed_token_ids": [-1]},
        "allowed_token_ids.0",
        "allowed_token_ids must not contain negative values",
    ),
    ({"bad_words": ["a", ""]}, "bad_words.1", "bad_words cannot contain an empty string."),
    (
        {"thinking_token_budget": -2},
        "thinking_token_budget",
        "`thinking_token_budget` must be a non-negative integer or -1 for unlimited.",
    ),
    (
        {"routed_experts_prompt_start": -1},
        "routed_experts_prompt_start",
        "routed_experts_prompt_start must be at least 0.",
    ),
    (
        {"trace_decode_token_ids": [-1]},
        "trace_decode_token_ids.0",
        "trace_decode_token_ids must not contain negative values",
    ),
    (
        {"structured_outputs": {}},
        "structured_outputs",
        "You must use one kind of structured outputs constraint but none are specified",
    ),
    (
        {"structured_outputs": {"regex": "a", "json": {}}},
        "structured_outputs",
        "You can only use one kind of structured outputs constraint but multiple are specified: json, regex",
    ),
    (
        {"structured_outputs": {"choice": []}},
        "structured_outputs.choice",
        "structured_outputs.choice must not be empty.",
    ),
    (
        {"repetition_detection": {"min_pattern_size": 1}},
        "repetition_detection.min_pattern_size",
        "max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size. "
        "Set both to 0 to disable repetitive pattern detection.",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 1, "min_count": 1}},
        "repetition_detection.min_count",
        "min_count must be >= 2 to detect repetitive patterns in engine output. "
        "If you do not wish to detect repetitive patterns, set max_pattern_size to 0.",
    ),
]


@pytest.mark.parametrize(("sent", "param", "message"), REFUSED, ids=lambda case: str(case)[:60])
def test_a_parameter_out_of_bounds_is_refused_by_name(sent: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate(sent)
    error = bad_request(caught.value)
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize(
    "sent",
    [
        {"top_k": -1},
        {"n": 16384},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"stream_interval": 1},
        {"max_tokens": 1},
        {"thinking_token_budget": 0},
        {"truncate_prompt_tokens": 2**63 - 1},
        {"logprob_token_ids": [1] * 128},
        {"logprobs": -1},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"min_tokens": 3, "max_tokens": 3},
        {"n": 2},
        {"truncate_prompt_tokens": -1},
        {"detokenize": False},
        {"prompt_logprob_token_ids": [[7, 7, -1], []]},
    ],
)
def test_the_edge_of_a_bound_is_inside(sent: dict[str, object]) -> None:
    assert SamplingParams.model_validate(sent).model_dump(exclude_unset=True) == sent


@pytest.mark.parametrize(
    ("sent", "name", "meant"),
    [
        ({"stop": "end"}, "stop", ["end"]),
        ({"temperature": 0.001}, "temperature", 0.01),
        ({"temperature": 0}, "temperature", 0),
        ({"seed": -1}, "seed", None),
        ({"bad_words": "no"}, "bad_words", ["no"]),
        ({"stop_token_ids": [5, 7, 5]}, "stop_token_ids", [5, 7]),
        ({"bad_words": ["a", "b", "a"]}, "bad_words", ["a", "b"]),
        ({"logit_bias": {"7": 500, "8": -500}}, "logit_bias", {7: 100.0, 8: -100.0}),
        ({"thinking_token_budget": -1}, "thinking_token_budget", None),
        ({"logprobs": True}, "logprobs", 1),
    ],
)
def test_other_spellings_mean_what_the_reference_takes_them_for(
    sent: dict[str, object], name: str, meant: object
) -> None:
    assert getattr(SamplingParams.model_validate(sent), name) == meant


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams.model_validate({"temperature": 0}).is_greedy
    assert not SamplingParams.model_validate({"temperature": 1e-9}).is_greedy


def test_no_limit_is_no_limit() -> None:
    assert SamplingParams().max_tokens is None


def test_a_null_counts_as_not_sent_unless_null_is_a_value() -> None:
    params = SamplingParams.model_validate({"temperature": None, "max_tokens": None, "top_k": 3})
    assert params.temperature == 1.0
    assert params.model_fields_set == {"max_tokens", "top_k"}


def test_unknown_parameters_survive() -> None:
    sent = {"top_k": 3, "of_next_year": {"a": [1, None]}}
    assert SamplingParams.model_validate(sent).model_dump(exclude_unset=True) == sent


def test_a_schema_keeps_its_name_on_the_wire() -> None:
    sent = {"structured_outputs": {"json": {"type": "object"}}}
    params = SamplingParams.model_validate(sent)
    assert params.structured_outputs is not None
    assert params.structured_outputs.json_schema == {"type": "object"}
    assert params.model_dump(mode="json", exclude_unset=True) == sent
