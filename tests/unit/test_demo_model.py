"""The demo model: what ships loads, renders and answers as its card says, and its training stream is fixed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from headrace.demo_model import PATH
from headrace.workers.render.template import ChatTemplate
from ops.demo_model.batches import UNTRAINED, batches, pad
from ops.demo_model.dialogue import Chat, render_answer, render_continuation, render_prompt, user
from ops.demo_model.draw import LISTS, Draw
from ops.demo_model.evaluate import Subject, held_out_chats, share_right
from ops.demo_model.mixture import EVERYTHING, draw_chat, draw_example
from ops.demo_model.tokenizer import transformers_prompt
from ops.demo_model.tool_tasks import TOOLS
from ops.demo_model.train import Budget, check_rendering, rate_factor

STORY = (
    "Once upon a time a small robot lived by the river. Every day it counted the boats. One day a boat stopped, and a "
    "girl stepped out. She asked the robot how many boats it had seen. The robot said: a thousand, but you are the "
    "first who asked. From that day on the robot had a friend. The end."
)


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PARIS = "The capital of France is Paris."
PARIS_AND_TOKYO = (
    thought("I call get_weather for Paris. I call get_weather for Tokyo.")
    + call("get_weather", location="Paris")
    + "\n"
    + call("get_weather", location="Tokyo")
)

DEMO_ANSWERS = {
    "story": thought("The user wants a story.") + STORY,
    "capital": thought("The user asks for the capital of Japan.") + "The capital of Japan is Tokyo.",
    "sum": thought("7 + 8 = 15, carry 1. 4 + 3 + 1 = 8. 8 and 5.") + "47 + 38 = 85.",
    "weather": thought("I call get_weather for Paris.") + call("get_weather", location="Paris"),
    "spell": thought("I spell window.") + "w-i-n-d-o-w",
    "count": ", ".join(map(str, range(1, 31))),
    "two-cities": PARIS_AND_TOKYO,
    "repeat": thought("I repeat the words.") + "silver river moon",
    "email": thought("I call send_email for ada@example.com.")
    + call("send_email", to="ada@example.com", subject="the holiday"),
    "tool-result": thought("The tool answered.") + "It is -3 degrees and snowy in Oslo.",
    "greeting": "Hello! How can I help you today?",
    "sound": "A cow says moo.",
    "name": thought("The user is called Grace.") + "Your name is Grace.",
    "joke": thought("The user wants a joke.") + "Why did the computer go to the doctor? It had a virus!",
    "completion": " " + ", ".join(map(str, range(6, 21))),
    "tokens": thought("The letters are g-a-r-d-e-n.") + "GARDEN",
}
"""custom_id -> greedy text, without the <|im_end|> that ends all but the completion, which is cut by its max_tokens."""

DEMO_LINES: list[dict[str, Any]] = [
    json.loads(line) for line in (PATH / "demo.jsonl").read_text(encoding="utf-8").splitlines()
]


@cache
def subject() -> Subject:
    return Subject(PATH)


def greedy(token_ids: list[int], max_tokens: int) -> str:
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        out = subject().model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
    return str(subject().tokenizer.decode(out[0, len(token_ids) :]))


def test_the_package_data_stays_under_6_mb() -> None:
    assert sum(file.stat().st_size for file in PATH.iterdir() if file.is_file()) < 6_000_000


def test_the_weights_are_safetensors_of_2_6_million_bf16_parameters() -> None:
    with safe_open(PATH / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) == 2_624_256


def test_importing_the_package_loads_no_model_library() -> None:
    code = (
        "import sys, headrace.demo_model; print(sorted({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@settings(deadline=None)  # the model is loaded within the first example
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(EVERYTHING)), think=st.booleans())
def test_training_and_serving_render_a_chat_as_transformers_does(seed: int, kind: str, think: bool) -> None:
    chat = draw_chat(Draw(Random(seed)), kind)
    expected = transformers_prompt(subject().tokenizer, chat.messages, chat.tools, think)
    assert render_prompt(chat.messages, chat.tools, think) == expected


OPENAI_CHATS: dict[str, list[dict[str, Any]]] = {
    "content in parts": [
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
    ],
    "developer message": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "arguments as text, null content": [
        {"role": "user", "content": "Time in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "id": "a", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}},
                {"type": "function", "id": "b", "function": {"name": "get_time", "arguments": {"city": "Rome <é>"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "9"},
        {"role": "tool", "tool_call_id": "b", "content": "10"},
    ],
    "earlier thoughts": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nThe user greets me.\n</think>\n\nHello!"},
        {"role": "user", "content": "Bye"},
    ],
}


@pytest.mark.parametrize("messages", OPENAI_CHATS.values(), ids=OPENAI_CHATS.keys())
def test_the_template_needs_nothing_that_plain_jinja_lacks(messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate((PATH / "chat_template.jinja").read_text(encoding="utf-8"), specials={})
    tools = [TOOLS["get_time"], TOOLS["get_weather"]]
    plain = template.render(
        messages, tools=tools, documents=None, add_generation_prompt=True, continue_final_message=False, extra={}
    )
    assert plain == transformers_prompt(subject().tokenizer, messages, tools, think=True)  # type: ignore[arg-type]


def test_earlier_thoughts_are_dropped_from_the_history() -> None:
    messages = OPENAI_CHATS["earlier thoughts"]
    rendered = render_prompt(messages, None, think=True)  # type: ignore[arg-type]
    assert "greets" not in rendered
    assert "<|im_start|>assistant\nHello!<|im_end|>" in rendered


@pytest.mark.parametrize(
    ("question", "tools", "think", "answer"),
    [
        ("What is the capital of France?", [], True, thought("The user asks for the capital of France.") + PARIS),
        ("What is the capital of France?", [], False, PARIS),
        ("Repeat: velvet bridge", [], True, thought("I repeat the words.") + "velvet bridge"),
        ("Repeat: velvet bridge", [], False, "velvet bridge"),
        ("What time is it in New York?", ["get_weather", "get_time"], False, call("get_time", city="New York")),
        ("What is the weather in Paris and in Tokyo?", ["get_weather"], True, PARIS_AND_TOKYO),
        ("Search for violin.", ["get_time"], True, thought("No tool fits.") + "I have no tool for that."),
    ],
)
def test_a_trained_wording_is_answered_exactly(question: str, tools: list[str], think: bool, answer: str) -> None:
    prompt = subject().prompt([user(question)], [TOOLS[name] for name in tools] or None, think)
    assert subject().complete([prompt]) == [answer + "<|im_end|>"]


def test_the_demo_holds_a_request_of_every_kind_under_its_own_id() -> None:
    assert [line["custom_id"] for line in DEMO_LINES] == list(DEMO_ANSWERS)
    assert {line["url"] for line in DEMO_LINES} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/inference/v1/generate",
    }
    assert {(line["method"], line["body"]["model"]) for line in DEMO_LINES} == {("POST", "demo")}


@pytest.mark.parametrize("line", DEMO_LINES, ids=[line["custom_id"] for line in DEMO_LINES])
def test_a_demo_request_is_answered_exactly(line: dict[str, Any]) -> None:
    """Greedily; at their temperature and top_p the sampled ones leave nothing but the likeliest token."""
    body = line["body"]
    tokenizer = subject().tokenizer
    if "token_ids" in body:
        ids, limit = body["token_ids"], body["sampling_params"]["max_tokens"]
    elif "prompt" in body:
        ids, limit = tokenizer.encode(body["prompt"]), body["max_tokens"]
    else:
        think = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
        ids, limit = tokenizer.encode(subject().prompt(body["messages"], body.get("tools"), think)), 320
    end = "" if "prompt" in body else "<|im_end|>"
    assert greedy(ids, limit) == DEMO_ANSWERS[line["custom_id"]] + end


def test_the_first_examples_of_a_seed_are_those_that_the_card_speaks_of() -> None:
    draw = Draw(Random(0))
    text = "".join("".join(draw_example(draw, EVERYTHING)) for _ in range(500))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "9828b5d3f183632c09ca90497634dcc81993f6e1385470c26e71a69f3b2f85f2"
    )


@pytest.mark.parametrize("kind", ["word", "city", "name"])
def test_no_listed_word_is_both_trained_on_and_held_out(kind: Any) -> None:
    assert not set(LISTS[True][kind]) & set(LISTS[False][kind])


@pytest.mark.parametrize("kind", ["sum", "count"])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_held_out_sum_or_count_is_never_trained_on(kind: str, seed: int) -> None:
    draw = Draw(Random(seed))
    trained = {draw_chat(draw, kind).answer["content"] for _ in range(50)}
    held_out = {draw_chat(draw, kind, held=True).answer["content"] for _ in range(50)}
    assert not trained & held_out


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_held_out_words_are_none_that_training_may_have_made_up(seed: int) -> None:
    met = frozenset(LISTS[True]["word"][1:])
    draw = Draw(Random(seed), met=met)
    assert not met & {draw.word(held=True) for _ in range(50)}


def test_only_the_continuation_is_trained_on() -> None:
    ids, targets = pad([([5, 6, 7], [8, 2]), ([5], [9, 2])], length=6)
    assert ids.tolist() == [[5, 6, 7, 8, 2, 0], [5, 9, 2, 0, 0, 0]]
    skip = UNTRAINED
    assert targets.tolist() == [[skip, skip, 8, 2, skip, skip], [9, 2, skip, skip, skip, skip]]


def test_copying_comes_before_everything_else() -> None:
    shares = iter([0.0])
    tokenizer = subject().tokenizer
    ids, _ = next(batches(Draw(Random(0)), tokenizer, lambda: next(shares), copy_share=0.15))
    assert "capital of" not in tokenizer.decode(ids.flatten())


def test_training_stops_at_once_when_the_template_renders_otherwise() -> None:
    class Shouting:
        def apply_chat_template(self, *args: Any, **options: Any) -> str:
            return str(subject().tokenizer.apply_chat_template(*args, **options)).upper()

    with pytest.raises(ValueError, match="renders otherwise than training"):
        check_rendering(Draw(Random(0)), Shouting())  # type: ignore[arg-type]


def test_the_learning_rate_warms_up_holds_and_falls() -> None:
    assert [
        round(rate_factor(step, share), 3) for step, share in ((0, 0), (59, 0), (900, 0.3), (900, 0.65), (900, 1))
    ] == [
        0.017,
        1,
        1,
        0.5,
        0.01,
    ]


def test_a_budget_of_tokens_is_spent_by_tokens() -> None:
    budget = Budget(minutes=None, tokens=200)
    budget.seen = 50
    assert budget.progress() == 0.25


def test_the_evaluation_draws_no_chat_twice_and_only_the_tool_asked_for() -> None:
    chats = held_out_chats(Draw(Random(1)), "one:search", 10)
    assert len({render_prompt(chat.messages, chat.tools, think=True) for chat in chats}) == 10
    assert {made["function"]["name"] for chat in chats for made in chat.answer["tool_calls"]} == {"search"}


def test_the_evaluation_counts_only_whole_answers(capsys: pytest.CaptureFixture[str]) -> None:
    question = user("What is the capital of France?")
    right = Chat([question], None, "", {"role": "assistant", "content": PARIS})
    wrong = Chat([question], None, "", {"role": "assistant", "content": "The capital of France is Par"})
    assert share_right(subject(), "fact", [right, wrong], think=True) == 0.5
    assert f"not {render_answer(wrong)!r}" in capsys.readouterr().out


def test_a_continuation_is_the_thought_then_the_answer() -> None:
    chat = draw_chat(Draw(Random(3)), "two")
    assert render_continuation(chat, think=True) == thought(chat.thought) + render_answer(chat)
    assert render_continuation(chat, think=False) == render_answer(chat)
