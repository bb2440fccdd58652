"""Where the reference falls short. A test names the report on vLLM's public tracker, or the place that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.protocol import (
    ChatCompletionRequest,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderChatStreamResponse,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderCompletionStreamResponse,
    wire,
)
from headrace.workers.derender import Derenderer, Session
from tests.unit.derender_tokenizer import byte_level

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>'
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
EXPERTS = "k05VTVBZ"
METRICS = {"time_to_first_token_ms": 12.5}


class Model:
    """A derenderer, its tokenizer, and the four doors."""

    def __init__(self, folder: Path, **formats: Any) -> None:
        self.tokenizer: Tokenizer = byte_level(folder)
        self.derenderer = Derenderer.load(folder, **formats)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, *choices: dict[str, Any], asked: dict[str, Any] | None = None, **response: Any) -> dict[str, Any]:
        body = {
            "generate_response": {"request_id": "r", "choices": choices, **response},
            "chat_request": chat(**(asked or {})),
            "prompt_token_ids": [1],
        }
        return self.derenderer.chat(DerenderChatRequest.model_validate(body)).model_dump(mode="json")

    def chat_stream(
        self, chunk: dict[str, Any], state: Any = None, asked: dict[str, Any] | None = None, **more: Any
    ) -> DerenderChatStreamResponse:
        body = {"stream": True, "generate_chunk": {"request_id": "r", **chunk}, "stream_state": state}
        body |= {"chat_request": chat(**(asked or {})), "prompt_token_ids": [1], **more}
        return self.derenderer.chat_stream(DerenderChatStreamRequest.model_validate(body))

    def completion(
        self, *responses: dict[str, Any], asked: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        body = {"generate_responses": responses, "completion_request": completion(**(asked or {})), **more}
        return self.derenderer.completion(DerenderCompletionRequest.model_validate(body)).model_dump(mode="json")

    def completion_stream(
        self, chunk: dict[str, Any], state: Any = None, asked: dict[str, Any] | None = None, **more: Any
    ) -> DerenderCompletionStreamResponse:
        body = {"stream": True, "generate_chunk": {"request_id": "r", **chunk}, "stream_state": state}
        body |= {"completion_request": completion(**(asked or {})), **more}
        return self.derenderer.completion_stream(DerenderCompletionStreamRequest.model_validate(body))

    def streamed(
        self, text: str, asked: dict[str, Any] | None = None, finish_reason: str = "stop", size: int = 1
    ) -> list[dict[str, Any]]:
        """The choices of a chat's chunks, `size` tokens each, with log probabilities."""
        ids, state, told = self.ids(text), None, []
        for at in range(0, len(ids), size):
            last = at + size >= len(ids)
            choice = {**scored(ids[at : at + size]), "finish_reason": finish_reason if last else None}
            done = self.chat_stream({"choices": [choice]}, state, {"stream": True, **(asked or {})})
            state = json.loads(done.stream_state.model_dump_json())
            told.append(done.chunk.choices[0].model_dump(mode="json"))
        return told


def chat(**asked: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **asked}


def completion(**asked: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **asked}


def scored(ids: list[int]) -> dict[str, Any]:
    """A choice whose tokens have log probabilities, with the next token id as the other candidate."""
    entries = [
        {
            "token_id": token_id,
            "logprob": -0.5,
            "top_logprobs": [{"token_id": token_id, "logprob": -0.5}, {"token_id": token_id + 1, "logprob": -2.0}],
        }
        for token_id in ids
    ]
    return {"index": 0, "token_ids": ids, "logprobs": {"content": entries}}


def tokens_of(choices: list[dict[str, Any]]) -> list[str]:
    return [entry["token"] for choice in choices for entry in choice["logprobs"]["content"]]


def content_of(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"]["content"] or "" for choice in choices)


def call_ids(choices: list[dict[str, Any]]) -> list[str]:
    return [call["id"] for choice in choices for call in choice["delta"].get("tool_calls", []) if call["id"]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("parsing"), tool_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("kimi"), tool_parser="kimi_k2")


# ------------------------------------------------------------------------------------------ log probabilities


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_with_formats_keeps_its_log_probabilities(parsing: Model, size: int) -> None:
    """#55029: dropped as soon as a parser is on."""
    text = f"why</think>so{CALL}"
    asked = {"logprobs": True, "top_logprobs": 2, "tools": TOOLS}
    told = parsing.streamed(text, asked, size=size)
    whole = parsing.chat({**scored(parsing.ids(text)), "finish_reason": "stop"}, asked=asked)["choices"][0]
    assert [entry for choice in told for entry in choice["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert "".join(tokens_of(told)) == text


@pytest.mark.parametrize("size", [1, 4, 100])
def test_log_probabilities_give_nothing_away_of_hidden_reasoning(parsing: Model, size: int) -> None:
    """#55029: where reasoning is hidden, its tokens must not come as log probabilities, nor as candidates or ids."""
    asked = {"logprobs": True, "top_logprobs": 2, "include_reasoning": False, "return_token_ids": True}
    told = parsing.streamed("<think>a secret 鬱</think>plain", asked, size=size)
    assert "".join(tokens_of(told)) == "plain"
    assert all(choice["delta"]["reasoning"] is None and choice["token_ids"] is None for choice in told)
    shown = json.dumps([choice["logprobs"] for choice in told])
    secret = [json.dumps(parsing.tokenizer.decode([i])) for i in parsing.ids(" secret")]
    assert not any(token in shown for token in secret)


def test_a_marker_that_opens_hidden_reasoning_is_hidden_with_it(parsing: Model) -> None:
    """#55029: reasoning may come after content, too."""
    asked = {"logprobs": True, "include_reasoning": False}
    assert tokens_of(parsing.streamed("</think>a<think>a secret</think>b", asked)) == ["a", "b"]


def test_log_probabilities_hold_no_text_of_the_prompt(plain: Model) -> None:
    """#55029: a token that completes a character is told with bytes of sampled tokens alone."""
    first, *rest = plain.ids("鬱")
    for asked in ({}, {"return_tokens_as_token_ids": True}):
        done = plain.chat_stream({"choices": [scored(rest)]}, asked=asked, prompt_token_ids=[first]).chunk.choices[0]
        assert done.logprobs is not None
        assert all(entry.bytes == [] for entry in done.logprobs.content or ())


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(plain: Model) -> None:
    """The coupled server's `return_tokens_as_token_ids`; offsets and bytes stay those of the text."""
    ids = plain.ids("one 鬱")
    asked = {"return_tokens_as_token_ids": True}
    entries = plain.chat(scored(ids), asked={"logprobs": True, **asked})["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in ids]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "one 鬱"
    assert entries[0]["top_logprobs"][1]["token"] == f"token_id:{ids[0] + 1}"
    response = {"request_id": "r", "choices": [scored(ids)]}
    by_id, by_text = (
        plain.completion(response, asked={"logprobs": 1, **named})["choices"][0]["logprobs"] for named in (asked, {})
    )
    assert by_id["tokens"] == [f"token_id:{i}" for i in ids]
    assert by_id["text_offset"] == by_text["text_offset"]


PROMPT_LOGPROBS = [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}]


def test_log_probabilities_of_the_prompt_are_kept(plain: Model) -> None:
    """#57929: dropped by the completions endpoint. In a stream they are a field that we do not know."""
    choice = {"index": 0, "token_ids": [5]}
    (of_chat,) = {json.dumps(plain.chat(choice, prompt_logprobs=PROMPT_LOGPROBS)["prompt_logprobs"])}
    (of_completion,) = plain.completion({"choices": [choice], "prompt_logprobs": PROMPT_LOGPROBS})["choices"]
    assert json.loads(of_chat) == of_completion["prompt_logprobs"] == PROMPT_LOGPROBS
    chunk = {"choices": [choice], "prompt_logprobs": PROMPT_LOGPROBS}
    assert plain.chat_stream(chunk).chunk.model_dump(mode="json")["prompt_logprobs"] == PROMPT_LOGPROBS
    assert plain.completion_stream(chunk).chunk.model_dump(mode="json")["prompt_logprobs"] == PROMPT_LOGPROBS


# ------------------------------------------------------------------------------------------ how an output ends


@pytest.mark.parametrize("asked", [{}, {"min_tokens": 50}])
@pytest.mark.parametrize(("include", "content"), [(False, "one "), (True, "one END")])
def test_content_ends_at_a_stop_string(parsing: Model, include: bool, content: str, asked: dict[str, Any]) -> None:
    """#57052: the stop string, and what came behind it in the same token, leaks into the content."""
    text = "</think>one ENDtwo"
    asked = {"stop": ["END"], "include_stop_str_in_output": include, "logprobs": True, "return_token_ids": True} | asked
    told = parsing.streamed(text, asked, finish_reason="length")
    whole = parsing.chat({**scored(parsing.ids(text)), "finish_reason": "length"}, asked=asked)["choices"][0]
    assert content_of(told) == whole["message"]["content"] == content
    for choice in (told[-1], whole):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    kept = parsing.ids("</think>one END")
    assert [i for choice in told for i in choice["token_ids"]] == whole["token_ids"] == kept
    assert len(tokens_of(told)) == len(whole["logprobs"]["content"]) == len(kept)


def test_a_stop_string_in_reasoning_or_in_an_argument_ends_nothing(parsing: Model) -> None:
    """#53066: an evaluation that stops at a blank line gets no content, because the reasoning had one."""
    told = parsing.streamed(f"so\n\nParis</think>well{CALL}", {"stop": ["\n\n", "Paris"], "tools": TOOLS})
    assert "".join(choice["delta"]["reasoning"] or "" for choice in told) == "so\n\nParis"
    arguments = [call["function"]["arguments"] for c in told for call in c["delta"].get("tool_calls", [])]
    assert json.loads("".join(arguments)) == {"city": "Paris"}
    assert (content_of(told), told[-1]["finish_reason"]) == ("well", "tool_calls")


def test_a_call_that_was_cut_by_length_says_length(parsing: Model) -> None:
    """#53269, #47963: rewritten to "tool_calls", so nobody sees that the arguments are not whole."""
    text, asked = f"</think>{CALL}"[:-20], {"tools": TOOLS}
    assert parsing.streamed(text, asked, "length")[-1]["finish_reason"] == "length"
    whole = parsing.chat({"index": 0, "token_ids": parsing.ids(text), "finish_reason": "length"}, asked=asked)
    assert (whole["choices"][0]["finish_reason"], len(whole["choices"][0]["message"]["tool_calls"])) == ("length", 1)


def test_a_whole_response_with_calls_says_tool_calls(parsing: Model) -> None:
    """#47931: "stop" in the one-shot answer, though it has tool calls."""
    choice = {"index": 0, "token_ids": parsing.ids(f"</think>{CALL}"), "finish_reason": "stop"}
    assert parsing.chat(choice, asked={"tools": TOOLS})["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("token_ids", [[], None])
def test_an_abort_without_tokens_is_passed_on(plain: Model, parsing: Model, token_ids: list[int] | None) -> None:
    """#47933: the last chunk of an aborted stream is skipped, since it has no tokens."""
    chunk = {"choices": [{"index": 0, "token_ids": token_ids, "finish_reason": "abort"}]}
    for model in (plain, parsing):
        assert model.chat_stream(chunk).chunk.choices[0].finish_reason == "abort"
    assert plain.completion_stream(chunk).chunk.choices[0].finish_reason == "abort"


def test_a_last_chunk_without_tokens_gives_out_what_was_held_back(parsing: Model) -> None:
    """#57922: buffered text comes with the finish reason, or never."""
    text = "</think>a <tool"
    state = parsing.chat_stream({"choices": [{"index": 0, "token_ids": parsing.ids(text)}]}).stream_state
    end = {"choices": [{"index": 0, "finish_reason": "stop"}]}
    assert parsing.chat_stream(end, state, {"tools": TOOLS}).chunk.choices[0].delta.content is None
    first = parsing.chat_stream({"choices": [{"index": 0, "token_ids": parsing.ids(text)}]}, None, {"tools": TOOLS})
    assert first.chunk.choices[0].delta.content == "a "
    last = parsing.chat_stream(end, first.stream_state, {"tools": TOOLS}).chunk.choices[0]
    assert (last.delta.content, last.finish_reason) == ("<tool", "stop")


@pytest.mark.parametrize("token_ids", [[], None])
@pytest.mark.parametrize("finish_reason", ["abort", "stop", "length"])
def test_an_empty_output_is_answered(
    plain: Model, parsing: Model, token_ids: list[int] | None, finish_reason: str
) -> None:
    """The reference's source refuses a choice "with empty or null token_ids": it was aborted, or stopped at once."""
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": finish_reason}
    for model, nothing in ((plain, ""), (parsing, None)):
        (done,) = model.chat(choice)["choices"]
        assert (done["message"]["content"], done["finish_reason"]) == (nothing, finish_reason)
    (done,) = plain.completion({"choices": [choice]})["choices"]
    assert (done["text"], done["finish_reason"]) == ("", finish_reason)


# ------------------------------------------------------------------------------------------ tool calls


def test_ids_of_calls_are_the_same_when_a_chunk_is_sent_again(parsing: Model) -> None:
    """#47161, #50550: random ones, so that a retry or a replay tells the same call under another id."""
    asked = {"tools": TOOLS}
    first = parsing.streamed(f"</think>{CALL}{CALL}", asked)
    again = parsing.streamed(f"</think>{CALL}{CALL}", asked, size=7)
    choice = {"index": 0, "token_ids": parsing.ids(f"</think>{CALL}{CALL}"), "finish_reason": "stop"}
    (whole,) = parsing.chat(choice, asked=asked)["choices"]
    ids = [call["id"] for call in whole["message"]["tool_calls"]]
    assert call_ids(first) == call_ids(again) == ids
    assert len(set(ids)) == 2


def test_the_id_that_the_model_itself_gave_is_the_calls_id(kimi: Model) -> None:
    """#42729, #46344, #50782: replaced by a random one, which the model's own template then cannot render."""
    asked = {"tools": TOOLS}
    choice = {"index": 0, "token_ids": kimi.ids(KIMI_CALL), "finish_reason": "stop"}
    (whole,) = kimi.chat(choice, asked=asked)["choices"]
    assert [call["id"] for call in whole["message"]["tool_calls"]] == ["functions.f:7"]
    assert call_ids(kimi.streamed(KIMI_CALL, asked)) == ["functions.f:7"]


# ------------------------------------------------------------------------------------------ what goes along


def test_each_choice_has_a_state_of_its_own(parsing: Model) -> None:
    """The reference's guide to derendering: more than one choice in a chunk is refused, so each has its state."""
    texts = {0: f"one</think>a{CALL}", 1: "two</think>b 鬱", 2: "three"}
    states: dict[int, Any] = {}
    content = dict.fromkeys(texts, "")
    for at in range(60):
        for index, text in texts.items():
            ids = parsing.ids(text)[at : at + 1]
            chunk = {"choices": [{"index": index, "token_ids": ids}]}
            done = parsing.chat_stream(chunk, states.get(index), {"tools": TOOLS, "n": 3, "temperature": 1.0})
            states[index] = done.stream_state
            (choice,) = done.chunk.choices
            assert choice.index == index
            content[index] += choice.delta.content or ""
    assert content == {0: "a", 1: "b 鬱", 2: ""}
    whole = parsing.chat(*({"index": i, "token_ids": parsing.ids(text)} for i, text in texts.items()))
    assert [(choice["index"], choice["message"]["reasoning"]) for choice in whole["choices"]] == [
        (0, "one"),
        (1, "two"),
        (2, "three"),
    ]


def test_usage_goes_along_with_every_chunk_that_has_it(plain: Model) -> None:
    """The same guide: a chunk that has nothing but usage goes through too; its details are lost there, not here."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
    cached = usage | {"prompt_tokens_details": {"cached_tokens": 4}}
    for send in (plain.chat_stream, plain.completion_stream):
        for choices in ([], [{"index": 0, "token_ids": [5, 6]}]):
            done = send({"choices": choices, "usage": cached}).chunk
            assert len(done.choices) == len(choices)
            assert done.usage is not None
            assert done.usage.model_dump(exclude_none=True) == cached
        corrected = send({"choices": [], "usage": usage}, prompt_tokens=20).chunk.usage
        assert corrected is not None
        assert (corrected.prompt_tokens, corrected.total_tokens) == (20, 22)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_transfer_parameters_are_kept_where_the_responses_agree(plain: Model, name: str) -> None:
    """llm-d-inference-sim#678, after the reference: dropped as soon as there are several prompts."""
    choice, params = {"index": 0, "token_ids": [5]}, {"remote": ["host", 1]}
    response = {"choices": [choice], name: params}
    assert plain.chat(choice, **{name: params})[name] == params
    assert plain.completion(response)[name] == params
    assert plain.completion(response, response)[name] == params
    assert plain.completion(response, {"choices": [choice], name: {"remote": []}})[name] is None


def test_metrics_experts_and_fields_of_next_year_survive(plain: Model) -> None:
    """The reference's source: its streams drop the experts, and all that it has no name for."""
    choice = {"index": 0, "token_ids": [5], "routed_experts": EXPERTS, "of_next_year": [1]}
    body = {"choices": [choice], "metrics": METRICS, "later": {"a": None}}
    whole = (plain.chat(choice, metrics=METRICS, later={"a": None}), plain.completion(body))
    chunks = (plain.chat_stream(body), plain.completion_stream(body))
    for done in (*whole, *(chunk.chunk.model_dump(mode="json") for chunk in chunks)):
        (told,) = done["choices"]
        assert (told["routed_experts"], told["of_next_year"]) == (EXPERTS, [1])
        assert done["later"] == {"a": None}
        assert done["metrics"]["time_to_first_token_ms"] == 12.5


def test_a_field_of_next_year_does_not_overwrite_what_was_derendered(plain: Model) -> None:
    choice = {"index": 0, "token_ids": plain.ids("hi"), "message": "no", "delta": "no", "text": "no"}
    body = {"choices": [choice], "id": "no", "object": "no", "model": "m", "created": 3}
    assert plain.chat(choice)["choices"][0]["message"]["content"] == "hi"
    assert plain.completion(body)["choices"][0]["text"] == "hi"
    assert plain.chat_stream(body).chunk.choices[0].delta.content == "hi"
    assert plain.completion_stream(body).chunk.choices[0].text == "hi"
    assert plain.completion(body)["object"] == "text_completion"


def test_unknown_fields_of_a_choice_are_left_out_with_its_hidden_reasoning(parsing: Model) -> None:
    choice = {"index": 0, "token_ids": parsing.ids("a secret</think>b"), "sampled_text": "a secret"}
    assert "secret" not in json.dumps(parsing.chat(choice, asked={"include_reasoning": False}))
    hidden = parsing.chat_stream({"choices": [choice]}, asked={"include_reasoning": False})
    assert "secret" not in hidden.chunk.model_dump_json()
    assert "sampled_text" in parsing.chat(choice)["choices"][0]


def test_a_live_session_keeps_experts_metrics_and_usage_too(parsing: Model) -> None:
    """The same for a worker, whose chunks never meet pydantic."""
    request = ChatCompletionRequest.model_validate(chat(return_token_ids=True))
    session = Session(
        parsing.derenderer, request, run="r", id="i", created=1, model="m", prompt_token_ids=parsing.ids("hi")
    )
    choice = wire.TokenChoice(index=0, token_ids=[5], routed_experts=EXPERTS, finish_reason="stop")
    metrics, usage = wire.Metrics(**METRICS), wire.Usage(1, 2, 1)
    told = session.step(
        wire.TokenChunk(request_id="x", choices=[choice], metrics=metrics, usage=usage, prompt_token_ids=[1])
    )
    assert isinstance(told, wire.ChatChunk)
    assert (told.metrics, told.usage, told.prompt_token_ids) == (metrics, usage, [1])
    assert told.choices[0].routed_experts == EXPERTS
    whole = session.final([choice], usage=usage, metrics=metrics).model_dump(mode="json")
    assert whole["choices"][0]["routed_experts"] == EXPERTS
    assert whole["metrics"]["time_to_first_token_ms"] == 12.5
    assert whole["prompt_token_ids"] == parsing.ids("hi")


# ------------------------------------------------------------------------------------------ echo and ids


def test_token_ids_are_returned_where_asked_for_and_the_prompts_with_them(plain: Model) -> None:
    """#45045: text that is encoded again gives other ids; who trains on an output needs its own."""
    choice, prompt, asked = {"index": 0, "token_ids": [5, 6]}, [1, 2], {"return_token_ids": True}
    whole = plain.chat(choice, asked=asked, prompt_token_ids=prompt)
    assert (whole["choices"][0]["token_ids"], whole["prompt_token_ids"]) == ([5, 6], prompt)
    body = {"choices": [choice], "prompt_token_ids": prompt}
    done = plain.completion(body, asked=asked)["choices"][0]
    assert (done["token_ids"], done["prompt_token_ids"]) == ([5, 6], prompt)
    chunk = plain.chat_stream(body, asked=asked).chunk
    assert (chunk.choices[0].token_ids, chunk.prompt_token_ids) == ([5, 6], prompt)
    text = plain.completion_stream(body, asked=asked).chunk.choices[0]
    assert (text.token_ids, text.prompt_token_ids) == ([5, 6], prompt)
    assert plain.completion(body)["choices"][0]["prompt_token_ids"] is None


def test_a_completion_echoes_its_prompt_once(plain: Model) -> None:
    """The coupled server's `echo`, of which the reference derender knows nothing."""
    asked = {"echo": True, "prompt": "say "}
    ids = plain.ids("one two")
    assert plain.completion({"choices": [{"index": 0, "token_ids": ids}]}, asked=asked)["choices"][0]["text"] == (
        "say one two"
    )
    state, text = None, ""
    for token_id in ids:
        done = plain.completion_stream({"choices": [scored([token_id])]}, state, asked)
        choice, state = done.chunk.choices[0], done.stream_state
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset == [len(text) or len("say ")]
        text += choice.text
    assert text == "say one two"


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_an_echo_brings_the_log_probabilities_of_the_prompt(plain: Model, max_tokens: int) -> None:
    """How evaluations score a text: `echo` with `logprobs`, and no output or one token of it."""
    prompt, ids = plain.ids("say 鬱 "), plain.ids("one")
    logprobs = [None, *({str(i): {"logprob": -1.5}, str(i + 1): {"logprob": -3.0}} for i in prompt[1:])]
    response = {"choices": [scored(ids)], "prompt_logprobs": logprobs, "prompt_token_ids": prompt}
    asked = {"echo": True, "prompt": "say 鬱 ", "logprobs": 1, "max_tokens": max_tokens}
    (done,) = plain.completion(response, asked=asked)["choices"]
    assert done["text"] == ("say 鬱 one" if max_tokens else "say 鬱 ")
    told = done["logprobs"]
    assert "".join(told["tokens"]) == done["text"]
    assert told["token_logprobs"] == [None, *[-1.5] * (len(prompt) - 1), *([-0.5] * len(ids) if max_tokens else [])]
    assert told["top_logprobs"][0] is None
    assert all(
        done["text"][at:].startswith(token) for at, token in zip(told["text_offset"], told["tokens"], strict=True)
    )
    assert done["prompt_logprobs"] is not None


def test_each_of_several_prompts_is_echoed_with_its_own_outputs(plain: Model) -> None:
    asked = {"echo": True, "prompt": ["a ", "b "]}
    responses = [{"choices": [{"index": 0, "token_ids": plain.ids("x")}] * 2} for _ in range(2)]
    done = plain.completion(*responses, asked=asked)["choices"]
    assert [choice["text"] for choice in done] == ["a x", "a x", "b x", "b x"]
    by_ids = {"echo": True, "prompt": [plain.ids("a "), plain.ids("b ")]}
    assert [choice["text"] for choice in plain.completion(*responses, asked=by_ids)["choices"]][2:] == ["b x", "b x"]


@pytest.mark.parametrize("content", ["Once ", [{"type": "text", "text": "Once "}]])
def test_a_chat_echoes_the_message_that_it_continues(parsing: Model, content: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    asked = {"echo": True, "messages": messages, "continue_final_message": True}
    assert content_of(parsing.streamed("why</think>upon", asked)) == "Once upon"
    choice = {"index": 0, "token_ids": parsing.ids("why</think>upon")}
    assert parsing.chat(choice, asked=asked)["choices"][0]["message"]["content"] == "Once upon"
    fresh = parsing.chat(choice, asked={"echo": True})
    assert fresh["choices"][0]["message"]["content"] == "upon"
