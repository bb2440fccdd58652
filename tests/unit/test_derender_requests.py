"""The derender endpoints' requests: what they answer, and what they refuse in the spec's error shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from headrace.protocol import (
    BadRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
)
from headrace.workers.derender import Derenderer
from tests.unit.derender_tokenizer import byte_level
from tests.unit.small_chat import CHAT, PROMPT, chat_step, tokens


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


def test_a_parser_that_does_not_exist_is_named_with_those_that_do(folder: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"tool_parser 'nope' does not exist; known are .*\bhermes, "):
        Derenderer.load(folder, tool_parser="nope")
    with pytest.raises(ValueError, match=r"reasoning_parser 'nope' does not exist; known are .*\bqwen3\b"):
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


@pytest.mark.parametrize("content", [0, 1, 3])
def test_log_probabilities_that_are_not_one_for_each_token_are_refused(plain: Derenderer, content: int) -> None:
    logprobs = {"content": [{"token_id": 5, "logprob": -0.5}] * content}
    choice = {"index": 0, "token_ids": [5, 6], "logprobs": logprobs}
    with pytest.raises(BadRequest, match=rf"logprobs.content length \({content}\) must equal token_ids length \(2\)"):
        chat_step(plain, tokens(choice))
    with pytest.raises(BadRequest, match="must equal token_ids length"):
        plain.completion(DerenderCompletionRequest.model_validate({"generate_responses": [tokens(choice)]}))
    assert chat_step(plain, tokens({**choice, "logprobs": {"content": None}})).chunk.choices[0].logprobs is not None


def test_log_probabilities_of_a_prompt_that_do_not_fit_it_are_not_echoed(plain: Derenderer) -> None:
    response = tokens({"index": 0, "token_ids": [5]}, prompt_logprobs=[None], prompt_token_ids=[1, 2])
    asked = {"model": "m", "prompt": "hi", "echo": True, "logprobs": 1}
    body = {"generate_responses": [response], "completion_request": asked}
    with pytest.raises(
        BadRequest, match=r"prompt_logprobs length \(1\) must equal prompt_token_ids length \(2\)"
    ) as caught:
        plain.completion(DerenderCompletionRequest.model_validate(body))
    assert caught.value.param == "prompt_logprobs"


def test_a_response_has_no_more_choices_than_a_server_would_give(plain: Derenderer) -> None:
    many = tokens(*[{"index": 0}] * 16_385)
    with pytest.raises(BadRequest, match=r"choices count \(16385\) in response 'r' exceeds server maximum \(16384\)"):
        plain.chat(DerenderChatRequest.model_validate({"generate_response": many}))
    responses = [tokens()] * 16_385
    with pytest.raises(BadRequest, match=r"generate_responses count \(16385\) exceeds server maximum"):
        plain.completion(DerenderCompletionRequest.model_validate({"generate_responses": responses}))


@pytest.mark.parametrize("tools", ["hermes", "openai"])
def test_a_completion_is_plain_text_whatever_formats_the_model_has(
    folder: Path, tokenizer: Tokenizer, tools: str
) -> None:
    derenderer = Derenderer.load(folder, tools, "qwen3")
    text = "<think>why</think><|channel|>final<|message|>so<tool_call>{}"
    choice = {"index": 0, "token_ids": tokenizer.encode(text).ids}
    for asked in (None, {"model": "m", "prompt": "hi", "stop": ["never"]}):
        body = {
            "stream": True,
            "generate_chunk": tokens(choice),
            "prompt_token_ids": PROMPT,
            "completion_request": asked,
        }
        done = derenderer.completion_stream(DerenderCompletionStreamRequest.model_validate(body))
        assert done.chunk.choices[0].text == text


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
    with pytest.raises(BadRequest, match="generate_responses must not be empty"):
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


def test_derendering_loads_no_model_library() -> None:
    code = "import sys, headrace.workers.derender; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
