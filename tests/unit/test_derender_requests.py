"""The derender endpoints' requests: what they answer, and what they refuse in the spec's error shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer

from headrace.protocol import (
    BadRequest,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderChatStreamResponse,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
)
from headrace.workers.derender import Derenderer
from tests.unit.derender_tokenizer import END, byte_level

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return byte_level(folder)


@pytest.fixture(scope="module")
def plain(folder: Path, tokenizer: Tokenizer) -> Derenderer:
    return Derenderer.load(folder)


@pytest.fixture(scope="module")
def parsing(folder: Path, tokenizer: Tokenizer) -> Derenderer:
    return Derenderer.load(folder, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=100)


def tokens(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"request_id": "r", "choices": list(choices), **more}


def chat_step(derenderer: Derenderer, chunk: dict[str, Any], **more: Any) -> DerenderChatStreamResponse:
    body = {"stream": True, "generate_chunk": chunk, "chat_request": CHAT, "prompt_token_ids": PROMPT, **more}
    return derenderer.chat_stream(DerenderChatStreamRequest.model_validate(body))


def test_a_parser_that_does_not_exist_is_named_with_those_that_do(folder: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="tool_parser 'nope' does not exist; known are hermes"):
        Derenderer.load(folder, tool_parser="nope")
    with pytest.raises(ValueError, match="reasoning_parser 'nope' does not exist; known are deepseek_r1, qwen3"):
        Derenderer.load(folder, reasoning_parser="nope")


def test_a_parser_needs_the_request_and_in_a_stream_the_prompt(parsing: Derenderer) -> None:
    response = {"generate_response": tokens({"index": 0, "token_ids": [5]})}
    with pytest.raises(BadRequest, match="chat_request is required"):
        parsing.chat(DerenderChatRequest.model_validate(response))
    with pytest.raises(BadRequest, match="chat_request is required"):
        chat_step(parsing, tokens(), chat_request=None)
    with pytest.raises(BadRequest, match="prompt_token_ids is required"):
        chat_step(parsing, tokens(), prompt_token_ids=None)
    assert parsing.chat(DerenderChatRequest.model_validate({**response, "chat_request": CHAT})).choices


def test_a_chunk_holds_one_choice_at_most(plain: Derenderer) -> None:
    two = tokens({"index": 0}, {"index": 1})
    with pytest.raises(BadRequest, match=r"derender_chat_stream expects at most one choice per chunk \(got 2\)\."):
        chat_step(plain, two)
    request = DerenderCompletionStreamRequest.model_validate({"stream": True, "generate_chunk": two})
    with pytest.raises(BadRequest, match="derender_completion_stream expects at most one choice per chunk"):
        plain.completion_stream(request)


def test_an_output_longer_than_the_model_is_refused_streamed_or_not(parsing: Derenderer) -> None:
    output = tokens({"index": 0, "token_ids": [5] * 98})
    message = (
        r"prompt_token_ids length \(3\) plus output_token_ids length \(0\) plus delta \(98\) exceeds max_model_len"
    )
    with pytest.raises(BadRequest, match=message):
        chat_step(parsing, output)
    whole = {"generate_response": output, "chat_request": CHAT, "prompt_token_ids": PROMPT}
    with pytest.raises(BadRequest, match=message):
        parsing.chat(DerenderChatRequest.model_validate(whole))
    completion = {"generate_responses": [output], "prompt_token_ids": [PROMPT]}
    with pytest.raises(BadRequest, match=message):
        parsing.completion(DerenderCompletionRequest.model_validate(completion))
    replayed = {"output_token_ids": [5] * 98, "output_chunk_lens": [98]}
    with pytest.raises(BadRequest, match="exceeds max_model_len"):
        chat_step(parsing, tokens({"index": 0, "token_ids": [5]}), stream_state=replayed)


def test_text_is_not_derendered_again(plain: Derenderer) -> None:
    text = {**tokens({"index": 0, "text": "x"}), "output_mode": "text"}
    with pytest.raises(ValidationError):
        DerenderChatRequest.model_validate({"generate_response": text})
    with pytest.raises(ValidationError):
        chat_step(plain, text)


@pytest.mark.parametrize(
    ("state", "param", "message"),
    [
        ({"read_offset": 1}, "read_offset", r"read_offset \(1\) must be from 0 to 0"),
        ({"prev_tokens": ["a"], "prefix_offset": 1}, "prefix_offset", r"from 0 to read_offset \(0\)"),
        ({"prev_tokens": ["a" * 5000]}, "prev_tokens", "holds a token of 5000 characters, more than 4096"),
        ({"logprob_text_offset": 1 << 50}, "logprob_text_offset", "must be from 0 to"),
        ({"scan": {"phase": "call"}}, "scan", "its phase and its section disagree"),
        ({"scan": {"section": {"body": "json"}}}, "scan", "its phase and its section disagree"),
        ({"scan": {"v": 2}}, "scan", "Invalid enum value 2"),
        ({"scan": {"phase": "singing"}}, "scan", "Invalid enum value 'singing'"),
        ({"scan": {"held": "x" * 300}}, "scan", "length <= 256"),
        ({"scan": {"tokens": -1}}, "scan", ">= 0"),
        ({"scan": {"phase": "call", "section": {"body": "json", "value": {"depth": -1}}}}, "scan", ">= 0"),
        ({"scan": {"tokens": 1 << 60}}, "scan", "<= "),
    ],
)
def test_a_state_out_of_bounds_is_refused_by_field(
    parsing: Derenderer, state: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        chat_step(parsing, tokens({"index": 0, "token_ids": [5]}), stream_state=state)
    assert caught.value.param == f"stream_state.{param}"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "state",
    [
        {"prev_tokens": ["a"] * 1025},
        {"prefix_offset": -1},
        {"logprob_context_token_ids": [1] * 5},
        {"output_token_ids": [1, 2], "output_chunk_lens": [1]},
        {"output_chunk_lens": [0]},
        {"scan": 7},
    ],
)
def test_a_state_of_the_wrong_shape_is_refused_at_the_door(parsing: Derenderer, state: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat_step(parsing, tokens(), stream_state=state)


def test_a_state_within_a_call_needs_a_request_with_tools(parsing: Derenderer) -> None:
    state = {"scan": {"phase": "call", "section": {"body": "json"}}}
    chat_step(parsing, tokens(), stream_state=state)
    with pytest.raises(BadRequest, match="the request allows none"):
        chat_step(parsing, tokens(), stream_state=state, chat_request={**CHAT, "tool_choice": "none"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**70) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
AT = st.sampled_from(["open", "key", "value", "closed", "lost"])
VALUE = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["", "string", "nested", "scalar"]) | JSON,
        "depth": st.integers(-1, 3),
        "quoted": st.booleans(),
        "escaped": st.booleans(),
    },
)
SECTION = st.fixed_dictionaries(
    {"body": st.just("json")},
    optional={
        "at": AT | JSON,
        "reading": st.sampled_from(["", "key", "name", "arguments", "other"]) | JSON,
        "value": VALUE | JSON,
        "raw": st.sampled_from(["", '"na', "name", "arguments"]) | JSON,
        "kept": st.text(max_size=5),
        "announced": st.booleans(),
        "argued": st.booleans(),
        "done": st.booleans(),
    },
)
SCAN = st.fixed_dictionaries(
    {},
    optional={
        "v": st.just(1) | JSON,
        "tokens": st.integers(-1, 200),
        "phase": st.sampled_from(["reasoning", "content", "call"]),
        "held": st.sampled_from(["<", "</tool_", "x"]) | JSON,
        "content": st.sampled_from(["", "begun", "over"]),
        "blank": st.text(max_size=5),
        "stop_held": st.text(max_size=5),
        "stopped": st.none() | st.text(max_size=3),
        "calls": st.integers(-1, 5),
        "section": st.none() | SECTION,
        "other": JSON,
    },
)
STATE = st.fixed_dictionaries(
    {},
    optional={
        "prev_tokens": st.lists(st.text(max_size=6), max_size=6),
        "prefix_offset": st.integers(-1, 8),
        "read_offset": st.integers(-1, 8),
        "role_sent": st.booleans(),
        "logprob_context_token_ids": st.lists(st.integers(), max_size=5),
        "logprob_text_offset": st.integers(),
        "scan": SCAN | st.dictionaries(st.text(max_size=5), JSON, max_size=3),
        "last_tool_call_ids": st.lists(st.text(max_size=4), max_size=3),
    },
)


@given(
    state=STATE,
    text=st.sampled_from(['{"name": "f", "arguments": {"a"', '"}</tool_call> x', "</think>", " ", END, "é<"]),
    finish_reason=st.sampled_from([None, "stop"]),
)
def test_any_state_is_answered_or_refused_and_what_is_answered_can_be_continued(
    parsing: Derenderer, tokenizer: Tokenizer, state: dict[str, Any], text: str, finish_reason: str | None
) -> None:
    chunk = tokens({"index": 0, "token_ids": tokenizer.encode(text).ids, "finish_reason": finish_reason})
    request = {"stop": ["x", "é"], **CHAT}
    try:
        first = chat_step(parsing, chunk, stream_state=json.loads(json.dumps(state)), chat_request=request)
    except (BadRequest, ValidationError):
        return
    carried = json.loads(first.stream_state.model_dump_json())
    carried.get("scan", {}).pop("tokens", None)  # else the model's length may be used up
    second = chat_step(parsing, tokens({"index": 0, "token_ids": []}), stream_state=carried, chat_request=request)
    assert second.chunk.choices[0].delta.role is None


@given(ids=st.lists(st.integers(0, 2**40), max_size=30), logprobs=st.booleans())
def test_any_token_ids_are_answered(plain: Derenderer, ids: list[int], logprobs: bool) -> None:
    entries = [{"token_id": i, "logprob": -1.0, "top_logprobs": [{"token_id": i + 1, "logprob": -2.0}]} for i in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": entries} if logprobs else None}
    done = chat_step(plain, tokens(choice)).chunk.choices[0]
    assert (done.logprobs is not None and len(done.logprobs.content or ()) == len(ids)) is logprobs


def test_both_dialects_of_log_probabilities_say_the_same(plain: Derenderer) -> None:
    integers = {"content": [{"token_id": 5, "logprob": -0.5, "top_logprobs": [{"token_id": 6, "logprob": -0.7}]}]}
    strings = {
        "content": [
            {"token": "token_id:5", "logprob": -0.5, "top_logprobs": [{"token": "token_id:6", "logprob": -0.7}]}
        ]
    }
    one, other = (
        chat_step(plain, tokens({"index": 0, "token_ids": [5], "logprobs": logprobs}))
        for logprobs in (integers, strings)
    )
    assert one == other
    assert one.chunk.choices[0].logprobs is not None


def test_a_log_probability_that_names_no_token_is_refused(plain: Derenderer) -> None:
    words = {"content": [{"token": "word", "logprob": -0.5}]}
    with pytest.raises(BadRequest, match="token_id:N"):
        chat_step(plain, tokens({"index": 0, "token_ids": [5], "logprobs": words}))


def test_a_state_of_a_leading_usage_chunk_is_still_a_fresh_one(parsing: Derenderer, tokenizer: Tokenizer) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    first = chat_step(parsing, tokens(usage=usage), prompt_tokens=5)
    assert (first.chunk.choices, first.chunk.usage and first.chunk.usage.total_tokens) == ([], 5)
    chunk = tokens({"index": 0, "token_ids": tokenizer.encode("why").ids})
    fresh = {"role_sent": False}  # what a replaying implementation answers to such a chunk
    for state in (first.stream_state, fresh, None):
        choice = chat_step(parsing, chunk, stream_state=state).chunk.choices[0]
        assert (choice.delta.role, choice.delta.reasoning) == ("assistant", "why")


def test_a_state_without_a_scan_goes_on_where_only_stop_strings_are_looked_for(
    plain: Derenderer, tokenizer: Tokenizer
) -> None:
    one = chat_step(plain, tokens({"index": 0, "token_ids": tokenizer.encode("one ").ids}))
    assert one.stream_state.scan is None
    body = {**CHAT, "stop": ["tw"]}
    two = tokens({"index": 0, "token_ids": tokenizer.encode("and two").ids, "finish_reason": "stop"})
    done = chat_step(plain, two, stream_state=one.stream_state, chat_request=body).chunk.choices[0]
    assert (done.delta.content, done.stop_reason) == ("and ", "tw")


def test_completions_of_several_prompts_are_numbered_through_and_added_up(
    plain: Derenderer, tokenizer: Tokenizer
) -> None:
    responses = [
        {
            **tokens(*({"index": i, "token_ids": tokenizer.encode(f"{name}{i}").ids} for i in range(2))),
            "request_id": name,
            "prompt_logprobs": [None, {"5": {"logprob": -1.0}}],
        }
        for name in ("a", "b")
    ]
    body = {"generate_responses": responses, "prompt_tokens": [3, 4], "model": "m"}
    done = plain.completion(DerenderCompletionRequest.model_validate(body))
    assert [(choice.index, choice.text) for choice in done.choices] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert (done.id, done.usage.prompt_tokens, done.usage.completion_tokens) == ("a", 7, 8)
    assert all(choice.prompt_logprobs for choice in done.choices)


@pytest.mark.parametrize("lengths", [{"prompt_tokens": [1]}, {"prompt_token_ids": [[1], [2], [3]]}])
def test_lists_that_are_not_parallel_are_refused(lengths: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="must equal generate_responses length"):
        DerenderCompletionRequest.model_validate({"generate_responses": [tokens(), tokens()], **lengths})


def test_a_completion_needs_a_response(plain: Derenderer) -> None:
    with pytest.raises(BadRequest, match="generate_responses must have at least 1 item"):
        plain.completion(DerenderCompletionRequest.model_validate({"generate_responses": []}))


def test_created_and_model_come_from_outside_and_nothing_is_random(parsing: Derenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('</think><tool_call>{"name": "f"}</tool_call>').ids
    whole = {
        "generate_response": tokens({"index": 0, "token_ids": ids}, created=5, model="served"),
        "chat_request": CHAT,
    }
    request = DerenderChatRequest.model_validate(whole)
    assert (parsing.chat(request).created, parsing.chat(request).model) == (5, "served")
    assert parsing.chat(request, created=9).created == 9
    assert parsing.chat(request) == parsing.chat(request)
    chunk = tokens({"index": 0, "token_ids": ids})
    assert chat_step(parsing, chunk) == chat_step(parsing, chunk)
    assert (chat_step(parsing, chunk).chunk.created, chat_step(parsing, chunk).chunk.model) == (0, "m")
    assert chat_step(parsing, chunk, model="asked").chunk.model == "asked"


def test_a_carried_state_is_plain_json_of_a_few_hundred_bytes(parsing: Derenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('</think><tool_call>{"name": "f", "arguments": {"a": "x').ids
    state = chat_step(parsing, tokens({"index": 0, "token_ids": ids})).stream_state
    assert len(msgspec.json.encode(json.loads(state.model_dump_json()))) < 700


def test_derendering_loads_no_model_library() -> None:
    code = "import sys, headrace.workers.derender; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
