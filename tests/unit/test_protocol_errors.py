"""Errors: what the caller can do, the body on the wire, and that a refusal never repeats the input."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from headrace.protocol import (
    BadRequest,
    Cancelled,
    ChatCompletionRequest,
    Conflict,
    DeadlineExceeded,
    ErrorResponse,
    GenerateRequest,
    HeadraceError,
    InternalError,
    Interrupted,
    NotFound,
    QueueFull,
    StreamLost,
    TooLarge,
    Unavailable,
    bad_request,
    error_from_response,
)

KINDS: list[tuple[type[HeadraceError], int, bool]] = [
    (BadRequest, 400, False),
    (NotFound, 404, False),
    (Conflict, 409, False),
    (TooLarge, 413, False),
    (QueueFull, 429, True),
    (Cancelled, 499, False),
    (InternalError, 500, False),
    (Interrupted, 500, True),
    (StreamLost, 500, True),
    (Unavailable, 503, True),
    (DeadlineExceeded, 504, False),
]


@pytest.mark.parametrize(("kind", "status", "retryable"), KINDS)
def test_a_kind_of_error_says_what_the_caller_can_do(kind: type[HeadraceError], status: int, retryable: bool) -> None:
    error = kind("no", param="top_p", retry_after=2.5)
    assert (error.status, error.retryable, error.retry_after) == (status, retryable, 2.5)
    assert str(error) == error.message == "no"
    assert json.loads(error.error.model_dump_json()) == {
        "error": {"message": "no", "type": kind.type, "param": "top_p", "code": status}
    }


@pytest.mark.parametrize("kind", [kind for kind, _, _ in KINDS])
def test_an_error_comes_back_from_its_body_as_it_went(kind: type[HeadraceError]) -> None:
    body = ErrorResponse.model_validate_json(kind("no", param="n").error.model_dump_json())
    again = error_from_response(body, retry_after=1.0)
    assert type(again) is kind
    assert (again.message, again.param, again.retry_after) == ("no", "n", 1.0)


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("Bad Request", 400, BadRequest),
        ("NotFoundError", 404, NotFound),
        ("rate_limit_error", 429, QueueFull),
        ("teapot", 418, BadRequest),
        ("oops", 500, InternalError),
        ("oops", 502, InternalError),
        ("overloaded", 503, Unavailable),
    ],
)
def test_another_servers_error_is_read_by_type_then_by_status(
    kind: str, code: int, expected: type[HeadraceError]
) -> None:
    body = ErrorResponse.model_validate({"error": {"message": "no", "type": kind, "code": code, "x": 1}})
    error = error_from_response(body)
    assert type(error) is expected
    assert error.error is body


def test_a_body_that_is_not_json_is_refused_without_a_field() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json('{"messages": [secret')
    error = bad_request(caught.value)
    assert error.param is None
    assert error.message.startswith("The body is not JSON: ")
    assert "secret" not in error.message


@pytest.mark.parametrize("body", ["[1]", '"a"', "null"])
def test_a_body_that_is_not_an_object_is_refused_without_a_field(body: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate_json(body)
    error = bad_request(caught.value)
    assert (error.param, error.message) == (None, "The body must be an object.")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"temperature": "warm"}, "temperature must be a number."),
        ({"n": 1.5}, "n must be an integer."),
        ({"ignore_eos": "perhaps"}, "ignore_eos must be true or false."),
        ({"request_id": 7}, "request_id must be a string."),
        ({"kv_transfer_params": [1]}, "kv_transfer_params must be an object."),
        ({"stop": 7}, "stop must be a list."),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5 must be a number."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_plain_words(sent: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}]} | sent)
    assert bad_request(caught.value).message == message


def test_a_fault_that_has_no_sentence_of_ours_still_names_its_field() -> None:
    class Odd(BaseModel):
        day: int | None = None
        size: frozenset[int]

    with pytest.raises(ValidationError) as caught:
        Odd.model_validate({"size": 5})
    error = bad_request(caught.value)
    assert error.param == "size"
    assert error.message == "size: Input should be a valid frozenset."


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just("SECRET"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type"]), inner),
    max_leaves=4,
)


@given(sent=st.dictionaries(st.sampled_from(sorted(ChatCompletionRequest.model_fields)), json_values, max_size=3))
def test_a_refusal_is_one_sentence_that_never_repeats_what_was_sent(sent: dict[str, object]) -> None:
    body = {"messages": [{"role": "user", "content": "SECRET"}]} | sent
    try:
        ChatCompletionRequest.model_validate_json(json.dumps(body))
    except ValidationError as caught:
        error = bad_request(caught)
        assert "SECRET" not in error.message
        assert "\n" not in error.message
        assert "(" not in (error.param or "")
        assert "[" not in (error.param or "")
