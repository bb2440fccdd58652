"""The derender requests and the carried state: every bound and its message."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from headrace.protocol import (
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderStreamState,
    bad_request,
)
from headrace.protocol.base import WireModel

WHOLE = {"request_id": "a", "choices": [{"index": 0, "token_ids": [1]}]}
TEXT = WHOLE | {"output_mode": "text"}

STATE_REFUSED = [
    ({"prev_tokens": ["a"] * 1025}, "prev_tokens", "prev_tokens length (1025) exceeds maximum (1024)"),
    ({"prefix_offset": -1}, "prefix_offset", "prefix_offset must be at least 0."),
    ({"read_offset": -1}, "read_offset", "read_offset must be at least 0."),
    (
        {"logprob_context_token_ids": [1] * 5},
        "logprob_context_token_ids",
        "logprob_context_token_ids must have at most 4 items, got 5.",
    ),
    ({"logprob_text_offset": -1}, "logprob_text_offset", "logprob_text_offset must be at least 0."),
    (
        {"output_chunk_lens": [0]},
        "output_chunk_lens.0",
        "output_chunk_lens.0 must be greater than 0.",
    ),
    (
        {"output_token_ids": [1], "output_chunk_lens": [2]},
        "output_chunk_lens",
        "output_chunk_lens must sum to len(output_token_ids) (got sum=2, len(output_token_ids)=1)",
    ),
    ({"scan": [1]}, "scan", "scan must be an object."),
]

REFUSED: list[tuple[type[WireModel], dict[str, object], str, str]] = [
    (DerenderChatRequest, {}, "generate_response", "generate_response is required."),
    (DerenderChatRequest, {"generate_response": WHOLE, "stream": True}, "stream", "stream must be False."),
    (
        DerenderChatRequest,
        {"generate_response": TEXT},
        "generate_response.output_mode",
        "generate_response.output_mode must be 'tokens'.",
    ),
    (
        DerenderChatRequest,
        {"generate_response": WHOLE, "prompt_token_ids": [1, -1]},
        "prompt_token_ids.1",
        "prompt_token_ids.1 must be at least 0.",
    ),
    (
        DerenderChatRequest,
        {"generate_response": WHOLE, "chat_request": {"messages": []}},
        "chat_request.messages",
        "chat_request.messages must not be empty.",
    ),
    (DerenderChatStreamRequest, {"generate_chunk": WHOLE}, "stream", "stream is required."),
    (
        DerenderChatStreamRequest,
        {"generate_chunk": WHOLE, "stream": False},
        "stream",
        "stream must be True.",
    ),
    (DerenderChatStreamRequest, {"stream": True}, "generate_chunk", "generate_chunk is required."),
    (
        DerenderChatStreamRequest,
        {"stream": True, "generate_chunk": TEXT},
        "generate_chunk.output_mode",
        "generate_chunk.output_mode must be 'tokens'.",
    ),
    (
        DerenderChatStreamRequest,
        {"stream": True, "generate_chunk": WHOLE, "stream_state": {"output_token_ids": [1]}},
        "stream_state.output_chunk_lens",
        "output_chunk_lens must sum to len(output_token_ids) (got sum=0, len(output_token_ids)=1)",
    ),
    (
        DerenderCompletionRequest,
        {"generate_responses": [WHOLE], "prompt_tokens": []},
        "prompt_tokens",
        "prompt_tokens length (0) must equal generate_responses length (1)",
    ),
    (
        DerenderCompletionRequest,
        {"generate_responses": [WHOLE], "prompt_token_ids": [[1], None]},
        "prompt_token_ids",
        "prompt_token_ids length (2) must equal generate_responses length (1)",
    ),
    (
        DerenderCompletionRequest,
        {"generate_responses": [WHOLE], "prompt_token_ids": [[-1]]},
        "prompt_token_ids.0.0",
        "prompt_token_ids.0.0 must be at least 0.",
    ),
    (DerenderCompletionStreamRequest, {"generate_chunk": WHOLE}, "stream", "stream is required."),
    (
        DerenderCompletionStreamRequest,
        {"stream": True, "generate_chunk": WHOLE, "prompt_token_ids": [-1]},
        "prompt_token_ids.0",
        "prompt_token_ids.0 must be at least 0.",
    ),
]


def _refusal(model: type[WireModel], body: dict[str, object]) -> tuple[str | None, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    error = bad_request(caught.value)
    return error.param, error.message


@pytest.mark.parametrize(("sent", "param", "message"), STATE_REFUSED, ids=lambda case: str(case)[:60])
def test_a_state_that_no_chunk_left_behind_is_refused(sent: dict[str, object], param: str, message: str) -> None:
    assert _refusal(DerenderStreamState, sent) == (param, message)


@pytest.mark.parametrize(("model", "sent", "param", "message"), REFUSED, ids=lambda case: str(case)[:60])
def test_a_derender_request_that_makes_no_sense_is_refused_by_field(
    model: type[WireModel], sent: dict[str, object], param: str, message: str
) -> None:
    assert _refusal(model, sent) == (param, message)


@pytest.mark.parametrize(
    "sent",
    [
        {"prev_tokens": ["a"] * 1024},
        {"logprob_context_token_ids": [1, 2, 3, 4]},
        {"output_token_ids": [1, 2, 3], "output_chunk_lens": [1, 2]},
    ],
)
def test_the_edge_of_a_bound_is_inside(sent: dict[str, object]) -> None:
    assert DerenderStreamState.model_validate(sent).model_dump(exclude_unset=True) == sent


def test_a_fresh_state_dumps_every_field_of_the_protocol_and_no_scan() -> None:
    assert json.loads(DerenderStreamState().model_dump_json()) == {
        "prev_tokens": [],
        "prefix_offset": 0,
        "read_offset": 0,
        "role_sent": False,
        "logprob_context_token_ids": [],
        "logprob_text_offset": 0,
        "output_token_ids": [],
        "output_chunk_lens": [],
        "tools_streamed": False,
        "last_tool_call_ids": [],
    }


def test_a_scan_travels_with_the_state() -> None:
    state = DerenderStreamState(scan={"at": "content", "held": ["<"]})
    again = DerenderStreamState.model_validate_json(state.model_dump_json())
    assert again == state
    assert again.scan == {"at": "content", "held": ["<"]}


def test_unknown_fields_of_a_state_survive() -> None:
    sent = {"read_offset": 1, "of_next_year": {"a": 1}}
    assert DerenderStreamState.model_validate(sent).model_dump(exclude_unset=True) == sent
