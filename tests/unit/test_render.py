"""Rendering: the ids are the model's own, and bad input is refused by the name of its field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.protocol.errors import BadRequest
from headrace.workers.models import ModelSpec
from headrace.workers.render import renderer
from headrace.workers.render.renderer import Renderer
from tests.shared import tokenizer_folder

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"location": "Paris"}'}}
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "Hello 你好 🎉"}]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "What is the capital of France?"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "Weather in Paris?"}], "tools": [WEATHER]},
    "a call and its result": {
        "messages": [
            {"role": "user", "content": "Weather in Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": '{"temperature": 20}'},
        ],
        "tools": [WEATHER],
    },
    "thinking off": {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "no generation prompt": {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
}


@pytest.fixture(scope="module")
def demo() -> Renderer:
    return Renderer.load(ModelSpec.of("demo"))


def as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def by_transformers(folder: Path, body: dict[str, Any]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(
        messages,
        tools=body.get("tools"),
        add_generation_prompt=body.get("add_generation_prompt", True),
        tokenize=False,
        **body.get("chat_template_kwargs", {}),
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", CHATS)
def test_chat_ids_of_the_demo_model_are_those_of_its_own_template(name: str, demo: Renderer) -> None:
    assert demo.chat(as_json(CHATS[name])).token_ids == by_transformers(ModelSpec.of("demo").path, CHATS[name])


@pytest.mark.parametrize("tokenizer", ["qwen3", "llama3_1", "deepseek_r1"])
@pytest.mark.parametrize("name", ["one turn", "system and turns", "tools", "no generation prompt"])
def test_chat_ids_of_real_tokenizers_are_those_of_their_own_templates(tokenizer: str, name: str) -> None:
    folder = tokenizer_folder(tokenizer)
    own = Renderer.load(ModelSpec(tokenizer, folder))
    assert own.chat(as_json(CHATS[name])).token_ids == by_transformers(folder, CHATS[name])


def test_only_what_the_client_set_becomes_a_sampling_parameter(demo: Renderer) -> None:
    request = demo.chat(as_json(CHATS["one turn"] | {"temperature": 0.5, "logprobs": True, "top_logprobs": 2}))
    sent = json.loads(request.to_wire())["sampling_params"]
    assert sent == {"temperature": 0.5, "logprobs": 2}
    assert not request.is_sampling_param_provided("max_tokens")


def test_a_completion_of_text_and_of_ids_are_the_same_request(demo: Renderer) -> None:
    by_text = demo.completion(as_json({"prompt": "The capital of France is", "max_tokens": 4}))
    by_ids = demo.completion(as_json({"prompt": by_text.token_ids, "max_tokens": 4}))
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.sampling_params.max_tokens == 4


def test_the_last_message_can_be_continued(demo: Renderer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I am"}]
    request = demo.chat(as_json({"messages": messages, "continue_final_message": True}))
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(ModelSpec.of("demo").path / "tokenizer.json")).decode(
        request.token_ids, skip_special_tokens=False
    )
    assert text.endswith("assistant\nHello, I am")


def test_token_offsets_come_on_request_and_fit_the_ids(demo: Renderer) -> None:
    request = demo.completion(as_json({"prompt": "a b c", "return_token_offsets": True}))
    assert request.token_offsets is not None
    assert len(request.token_offsets) == len(request.token_ids)


def test_a_prompt_is_cut_to_the_tokens_asked_for(demo: Renderer) -> None:
    whole = demo.completion(as_json({"prompt": "one two three four five"})).token_ids
    body = {"prompt": "one two three four five", "truncate_prompt_tokens": 3}
    assert demo.completion(as_json(body)).token_ids == whole[-3:]
    assert demo.completion(as_json(body | {"truncation_side": "right"})).token_ids == whole[:3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": "Hi"}], "temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER], "tool_choice": "required"},
            "tool_choice",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "messages",
        ),
    ],
)
def test_a_bad_chat_is_refused_by_the_name_of_its_field(body: dict[str, Any], param: str, demo: Renderer) -> None:
    with pytest.raises(BadRequest) as caught:
        demo.chat(as_json(body))
    assert caught.value.param == param
    assert param in caught.value.message


PARTS = [{"type": "text", "text": "Hello"}, {"type": "input_text", "text": "there"}, "you"]


@pytest.mark.parametrize("tokenizer", ["qwen3", "llama3_1", "deepseek_r1"])
def test_text_parts_are_lines_of_one_text_for_a_template_that_takes_only_text(tokenizer: str) -> None:
    own = Renderer.load(ModelSpec(name="own", path=tokenizer_folder(tokenizer)))
    asked = {"messages": [{"role": "user", "content": PARTS}]}
    as_one = {"messages": [{"role": "user", "content": "Hello\nthere\nyou"}]}
    assert own.chat(as_json(asked)).token_ids == own.chat(as_json(as_one)).token_ids


def test_text_parts_stay_apart_for_a_template_that_reads_them(demo: Renderer) -> None:
    asked = {"messages": [{"role": "user", "content": PARTS}]}
    as_one = {"messages": [{"role": "user", "content": "Hellothereyou"}]}  # how the demo model's template joins them
    assert demo.chat(as_json(asked)).token_ids == demo.chat(as_json(as_one)).token_ids


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "data:,"}}, {"image_url": "data:,"}, {"type": "text"}, 7]
)
@pytest.mark.parametrize("tokenizer", ["demo", "llama3_1"])
def test_a_part_that_is_no_text_is_refused_and_never_left_out(part: object, tokenizer: str, demo: Renderer) -> None:
    own = demo
    if tokenizer != "demo":
        own = Renderer.load(ModelSpec(name="own", path=tokenizer_folder(tokenizer)))
    with pytest.raises(BadRequest) as caught:
        own.chat(as_json({"messages": [{"role": "user", "content": [*PARTS, part]}]}))
    assert (caught.value.param or "").startswith("messages.0.content.3")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"a": "\\ud8"}'])
def test_arguments_of_a_call_that_no_parser_takes_are_refused_by_name(arguments: str, demo: Renderer) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest) as caught:
        demo.chat(as_json({"messages": [{"role": "assistant", "tool_calls": [call]}]}))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": [-1]}, "prompt"),
    ],
)
def test_a_bad_completion_is_refused_by_the_name_of_its_field(body: dict[str, Any], param: str, demo: Renderer) -> None:
    with pytest.raises(BadRequest) as caught:
        demo.completion(as_json(body))
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


@pytest.mark.parametrize("cut", [{}, {"truncate_prompt_tokens": 1}, {"truncate_prompt_tokens": 10**9}])
def test_a_huge_text_is_encoded_no_further_than_it_takes_to_know(
    cut: dict[str, int], demo: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = 0
    encode = demo._tokenizer.encode

    class Counting:
        def encode(self, text: str, *, add_special_tokens: bool) -> Any:
            nonlocal encoded
            encoded += len(text)
            return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(demo, "_tokenizer", Counting())
    for body in ({"prompt": "x " * 2**20}, {"messages": [{"role": "user", "content": "x " * 2**20}]}):
        turn = demo.completion if "prompt" in body else demo.chat
        if cut.get("truncate_prompt_tokens") == 1:
            assert len(turn(as_json(body | cut)).token_ids) == 1
        else:
            with pytest.raises(BadRequest, match="tokens; with 1 output token that is over the model's 2048"):
                turn(as_json(body | cut))
    assert encoded < 2**20


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.sampled_from(["a ", "the", " Japan", "\n\n", "   ", "é", "😀", "<|im_end|>", "0123456789"]), max_size=400
    ),
    kept=st.one_of(st.none(), st.integers(1, 40), st.just(5000)),
    side=st.sampled_from([None, "left", "right"]),
)
def test_a_text_encoded_in_part_gives_the_tokens_of_the_whole(
    words: list[str], kept: int | None, side: str | None, demo: Renderer
) -> None:
    body = {"prompt": "x" + "".join(words), "return_token_offsets": True, "truncate_prompt_tokens": kept}
    asked = as_json(body | {"truncation_side": side})

    def answer(piece: int) -> object:
        with pytest.MonkeyPatch.context() as small:
            small.setattr(renderer, "_PIECE", piece)
            small.setattr(renderer, "_CUT_TOKENS", 8)
            small.setattr(demo, "_max_model_len", 50)
            try:
                request = demo.completion(asked)
            except BadRequest as error:
                return error.param
            return request.token_ids, request.token_offsets

    assert answer(64) == answer(10**6)


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    spec = ModelSpec.of("demo")
    (tmp_path / "tokenizer.json").write_bytes((spec.path / "tokenizer.json").read_bytes())
    own = Renderer.load(replace(spec, path=tmp_path))
    with pytest.raises(BadRequest, match="no chat template"):
        own.chat(as_json(CHATS["one turn"]))


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    spec = ModelSpec.of("demo")
    (tmp_path / "tokenizer.json").write_bytes((spec.path / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    own = Renderer.load(replace(spec, path=tmp_path))
    with pytest.raises(BadRequest, match="refused"):
        own.chat(as_json(CHATS["one turn"]))
