"""Sessions: tokens of one request to the chunks that its client sees, live, restored, and all at once."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.protocol import BadRequest, ChatCompletionRequest, CompletionRequest, wire
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.call_ids import tool_call_id
from tests.unit.derender_tokenizer import END, byte_level, ids_of

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'


class Model:
    """A derenderer and its tokenizer."""

    def __init__(self, folder: Path, **formats: Any) -> None:
        self.tokenizer: Tokenizer = byte_level(folder)
        self.derenderer = Derenderer.load(folder, **formats)
        (self.end,) = ids_of(self.tokenizer, [END])

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, checkpoint: bytes | None = None, run: str = "run", **request: Any) -> Session:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **request}
        return self._session(ChatCompletionRequest.model_validate(body), checkpoint, run)

    def completion(self, checkpoint: bytes | None = None, **request: Any) -> Session:
        return self._session(
            CompletionRequest.model_validate({"model": "m", "prompt": "hi", **request}), checkpoint, "run"
        )

    def _session(
        self, request: ChatCompletionRequest | CompletionRequest, checkpoint: bytes | None, run: str
    ) -> Session:
        return Session(
            self.derenderer,
            request,
            run=run,
            id="id",
            created=7,
            model="m",
            prompt_token_ids=self.ids("a question"),
            checkpoint=checkpoint,
        )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("parsing"), tool_parser="hermes", reasoning_parser="qwen3", max_model_len=4096)


def chunk(ids: list[int], finish_reason: str | None = None, *, index: int = 0, **more: Any) -> wire.TokenChunk:
    choice = wire.TokenChoice(index=index, token_ids=ids, finish_reason=finish_reason, **more)
    return wire.TokenChunk(request_id="engine", choices=[choice])


def step(session: Session, ids: list[int], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """The one choice that the chunk gives, as JSON."""
    done = json.loads(msgspec.json.encode(session.step(chunk(ids, finish_reason, **more))))
    assert (done["id"], done["created"], done["model"]) == ("id", 7, "m")
    (choice,) = done["choices"]
    assert isinstance(choice, dict)
    return choice


def told(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat choice's deltas added up to what its final response says."""
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    reasoning = "".join(choice["delta"].get("reasoning", "") for choice in choices)
    calls: dict[int, dict[str, str]] = {}
    for piece in (piece for choice in choices for piece in choice["delta"].get("tool_calls", [])):
        call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
        call["id"] += piece.get("id", "")
        call["name"] += piece["function"].get("name", "")
        call["arguments"] += piece["function"].get("arguments", "")
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": [calls[index] for index in sorted(calls)],
        "finish_reason": choices[-1].get("finish_reason"),
        "stop_reason": choices[-1].get("stop_reason"),
    }


def whole(session: Session, ids: list[int], finish_reason: str, **more: Any) -> dict[str, Any]:
    """A chat's final response, in the terms of `told`."""
    choice = wire.TokenChoice(index=0, token_ids=ids, finish_reason=finish_reason, **more)
    (done,) = session.final([choice]).model_dump(mode="json")["choices"]
    calls = done["message"].get("tool_calls", [])
    return {
        "content": done["message"]["content"] or "",
        "reasoning": done["message"]["reasoning"] or "",
        "calls": [{"id": call["id"], **call["function"]} for call in calls],
        "finish_reason": done["finish_reason"],
        "stop_reason": done["stop_reason"],
    }


WORDS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "why ", "so ", "\n\n", CALL, "<tool_call>", "{", '"', "stop", "你👩‍👧", "é", END, "<"]
    ),
    max_size=8,
)
REQUESTS = st.sampled_from(
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": TOOLS, "stop": ["stop", "so why"], "include_reasoning": False},
        {"stop": ["o s", "é"], "include_stop_str_in_output": True},
    ]
)


@given(words=WORDS, request=REQUESTS, cuts=st.lists(st.integers(0, 120), max_size=10), ends=st.booleans())
def test_any_chunks_with_a_restart_after_each_give_the_final_response(
    parsing: Model, words: list[str], request: dict[str, Any], cuts: list[int], ends: bool
) -> None:
    ids = parsing.ids("".join(words))
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    choices, checkpoint = [], None
    for start, stop in pairwise(edges):
        session = parsing.chat(checkpoint, **request)
        last = stop == len(ids) and start == edges[-2]
        choices.append(step(session, ids[start:stop], "stop" if last and not ends else None))
        checkpoint = session.checkpoint()
    session = parsing.chat(checkpoint, **request)
    choices.append(step(session, [], "stop"))
    assert told(choices) == whole(parsing.chat(**request), ids, "stop")
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", *[None] * (len(choices) - 1)]


@given(words=WORDS, cut=st.integers(0, 60))
def test_a_restored_session_gives_the_very_same_chunks(parsing: Model, words: list[str], cut: int) -> None:
    ids = parsing.ids("".join(words))
    first = parsing.chat(tools=TOOLS)
    first.step(chunk(ids[:cut]))
    second = parsing.chat(first.checkpoint(), tools=TOOLS)
    for token_id in ids[cut:]:
        assert first.step(chunk([token_id])) == second.step(chunk([token_id]))
    assert first.checkpoint() == second.checkpoint()


def test_a_chat_says_reasoning_content_and_calls_apart(parsing: Model) -> None:
    ids = [*parsing.ids(f"<think>why</think>so {CALL}"), parsing.end]
    session = parsing.chat(tools=TOOLS)
    done = told([step(session, [i]) for i in ids[:-1]] + [step(session, ids[-1:], "stop")])
    assert (done["reasoning"], done["content"], done["finish_reason"]) == ("why", "so ", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in done["calls"]] == [("f", {"city": "Paris"})]


@pytest.mark.parametrize(
    ("prompt", "reasoning"), [("a question", "x"), ("<think>", "x"), ("<think>y</think>", ""), ("</think><think>", "x")]
)
def test_the_prompts_last_marker_says_whether_the_output_is_reasoning(
    parsing: Model, prompt: str, reasoning: str
) -> None:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    session = Session(
        parsing.derenderer, request, run="r", id="id", created=7, model="m", prompt_token_ids=parsing.ids(prompt)
    )
    done = told([step(session, parsing.ids("x"), "stop")])
    assert (done["reasoning"], done["content"]) == (reasoning, "" if reasoning else "x")


def test_markers_that_are_no_tokens_of_their_own_are_found_in_the_prompts_text(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] == END]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    model = Model.__new__(Model)
    model.tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model.derenderer = Derenderer.load(tmp_path, reasoning_parser="qwen3")
    assert len(model.ids("<think>")) > 1 == len(tokenizer.encode("<think>").ids)
    for prompt, reasoning in (("q", "x"), ("<think>", "x"), ("<think>y</think>", "")):
        request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "q"}]})
        session = Session(
            model.derenderer, request, run="r", id="id", created=7, model="m", prompt_token_ids=model.ids(prompt)
        )
        assert told([step(session, model.ids("x"), "stop")])["reasoning"] == reasoning


def test_thinking_that_the_request_turns_off_leaves_markers_as_text(parsing: Model) -> None:
    session = parsing.chat(chat_template_kwargs={"enable_thinking": False})
    assert told([step(session, parsing.ids("<think>x</think>y"), "stop")])["content"] == "<think>x</think>y"


def test_the_end_tokens_text_is_in_no_delta(parsing: Model) -> None:
    session = parsing.chat()
    done = told([step(session, [*parsing.ids("why"), parsing.end]), step(session, [parsing.end], "stop")])
    assert (done["reasoning"], done["content"]) == ("why", "")


@pytest.mark.parametrize(("include", "text"), [(False, "one"), (True, "onetwo")])
def test_a_stop_tokens_text_is_in_the_content_only_where_asked_for(plain: Model, include: bool, text: str) -> None:
    one, two = plain.ids("one"), plain.ids("two")
    session = plain.chat(stop_token_ids=two, include_stop_str_in_output=include)
    done = told([step(session, one), step(session, two, "stop", stop_reason=two[-1])])
    assert (done["content"], done["stop_reason"]) == (text, two[-1])


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_content_ends_at_a_stop_string_and_says_so(plain: Model, include: bool, text: str) -> None:
    session = plain.chat(stop=["END"], include_stop_str_in_output=include)
    choices = [step(session, [i]) for i in plain.ids("one EN")]
    assert not session.stopped
    choices += [step(session, [i]) for i in plain.ids("D two")]
    assert session.stopped == {0}
    choices.append(step(session, plain.ids("three"), "length"))
    done = told(choices)
    assert (done["content"], done["finish_reason"], done["stop_reason"]) == (text, "stop", "END")


def test_a_stop_string_ends_a_completion_and_offsets_stay_those_of_the_tokens(plain: Model) -> None:
    session = plain.completion(stop="END", logprobs=0)
    choices = []
    for number, token_id in enumerate(plain.ids("one END two")):
        entry = wire.TokenLogprobEntry(token_id=token_id, logprob=-float(number))
        choices.append(step(session, [token_id], logprobs=wire.TokenLogprobs([entry])))
    assert "".join(choice["text"] for choice in choices) == "one "
    told = [c["logprobs"] for c in choices if "tokens" in c["logprobs"]]
    tokens = [(logprobs["text_offset"][0], logprobs["tokens"][0]) for logprobs in told]
    assert all("one END two"[offset:].startswith(token) for offset, token in tokens)
    assert "".join(token for _, token in tokens) == "one END"


@pytest.mark.parametrize("finish_reason", ["length", "abort", "stop"])
def test_only_stop_becomes_tool_calls(parsing: Model, finish_reason: str) -> None:
    session = parsing.chat(tools=TOOLS)
    done = told([step(session, parsing.ids(f"</think>{CALL}")), step(session, [], finish_reason)])
    assert done["finish_reason"] == ("tool_calls" if finish_reason == "stop" else finish_reason)


def test_a_call_that_was_demanded_by_name_keeps_stop(parsing: Model) -> None:
    session = parsing.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}})
    done = told([step(session, parsing.ids(f"</think>{CALL}"), "stop")])
    assert (len(done["calls"]), done["finish_reason"]) == (1, "stop")


def test_a_demanded_call_leaves_an_empty_content_in_the_final_response(parsing: Model) -> None:
    output = wire.TokenChoice(index=0, token_ids=parsing.ids(f"</think>{CALL}"), finish_reason="stop")
    forced = parsing.chat(tools=TOOLS, tool_choice="required").final([output]).model_dump()
    free = parsing.chat(tools=TOOLS).final([output]).model_dump()
    assert (forced["choices"][0]["message"]["content"], free["choices"][0]["message"]["content"]) == ("", None)


def test_ids_of_calls_derive_from_run_choice_and_index_alone(parsing: Model) -> None:
    ids = parsing.ids(f"</think>{CALL}{CALL}")

    def call_ids(run: str, index: int) -> list[str]:
        session = parsing.chat(run=run, tools=TOOLS)
        return [call["id"] for call in told([step(session, ids, "stop", index=index)])["calls"]]

    assert call_ids("a", 0) == call_ids("a", 0) == [tool_call_id("a", 0, 0), tool_call_id("a", 0, 1)]
    assert len({*call_ids("a", 0), *call_ids("a", 1), *call_ids("b", 0)}) == 6


def test_choices_of_one_request_do_not_mix(parsing: Model) -> None:
    session = parsing.chat(tools=TOOLS, n=2, temperature=1.0)
    one, two = parsing.ids("one</think>你"), parsing.ids(f"two</think>{CALL}")
    apart: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for number in range(max(len(one), len(two))):
        for index, ids in enumerate((one, two)):
            apart[index].append(step(session, ids[number : number + 1], index=index))
    first, second = told(apart[0]), told(apart[1])
    assert (first["reasoning"], first["content"]) == ("one", "你")
    assert (second["reasoning"], [call["name"] for call in second["calls"]]) == ("two", ["f"])


def test_usage_comes_through_with_the_prompts_length_where_it_was_given(plain: Model) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "hi"})
    usage = wire.Usage(prompt_tokens=1, completion_tokens=4, total_tokens=5)
    for prompt_tokens, right in ((None, 1), (9, 9)):
        session = Session(
            plain.derenderer, request, run="r", id="id", created=7, model="m", prompt_tokens=prompt_tokens
        )
        done = session.step(wire.TokenChunk(request_id="x", choices=[], usage=usage))
        assert (done.choices, done.usage) == ([], wire.Usage(right, right + 4, 4))


def test_a_final_response_counts_tokens_where_no_usage_was_given(plain: Model) -> None:
    outputs = [wire.TokenChoice(index=i, token_ids=plain.ids("one two"), finish_reason="stop") for i in range(2)]
    usage = plain.chat().final(outputs).usage
    assert usage.prompt_tokens == len(plain.ids("a question"))
    assert usage.completion_tokens == 2 * len(plain.ids("one two"))
    said = wire.Usage(prompt_tokens=3, total_tokens=9, completion_tokens=6)
    assert plain.chat().final(outputs, usage=said).usage.total_tokens == 9


def test_a_prompt_that_comes_with_a_chunk_seeds_every_choice_also_after_a_restart(plain: Model) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "hi", "n": 2})
    first_byte, *rest = plain.ids("鬱")

    def session(checkpoint: bytes | None = None) -> Session:
        return Session(plain.derenderer, request, run="r", id="id", created=7, model="m", checkpoint=checkpoint)

    live = session()
    live.step(wire.TokenChunk(request_id="x", choices=[], prompt_token_ids=[first_byte]))
    restored = session(live.checkpoint())
    for index in range(2):
        assert step(restored, [*rest, *plain.ids("x")], index=index)["text"] == "x"


def test_log_probabilities_come_with_their_text_and_split_characters_with_their_last_token(plain: Model) -> None:
    ids = plain.ids("a鬱")
    assert len(ids) == 4
    session = plain.chat(logprobs=True, top_logprobs=1)
    entries = []
    for token_id in ids:
        top = wire.TokenLogprob(token_id=token_id, logprob=-math.inf)
        entry = wire.TokenLogprobEntry(token_id=token_id, logprob=-1.0, top_logprobs=[top])
        entries += step(session, [token_id], logprobs=wire.TokenLogprobs([entry]))["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "", "", "鬱"]
    assert entries[-1]["bytes"] == list("鬱".encode())
    assert entries[-1]["top_logprobs"] == [{"token": "鬱", "bytes": list("鬱".encode()), "logprob": -9999.0}]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_log_probabilities_of_hidden_reasoning_are_hidden_too(parsing: Model, size: int) -> None:
    ids = parsing.ids("<think>a secret</think>plain")
    session = parsing.chat(include_reasoning=False, logprobs=True, return_token_ids=True)
    tokens, content = "", ""
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        logprobs = wire.TokenLogprobs([wire.TokenLogprobEntry(token_id=i, logprob=-1.0) for i in part])
        choice = step(session, part, logprobs=logprobs)
        tokens += "".join(entry["token"] for entry in choice["logprobs"].get("content", []))
        content += choice["delta"].get("content", "")
        assert "token_ids" not in choice
        assert "reasoning" not in choice["delta"]
    assert tokens == content == "plain"


def test_token_ids_are_returned_where_asked_for(plain: Model) -> None:
    ids = plain.ids("one two")
    assert step(plain.chat(return_token_ids=True), ids)["token_ids"] == ids
    assert step(plain.completion(return_token_ids=True), ids)["token_ids"] == ids
    assert "token_ids" not in step(plain.chat(), ids)


def test_a_chunk_beyond_the_models_length_is_refused_and_changes_nothing(parsing: Model) -> None:
    session = parsing.chat()
    step(session, parsing.ids("one"))
    before = session.checkpoint()
    with pytest.raises(BadRequest, match=r"plus delta \(5000\) exceeds max_model_len \(4096\)"):
        session.step(chunk([0] * 5000))
    assert session.checkpoint() == before
    with pytest.raises(BadRequest, match="exceeds max_model_len"):
        session.final([wire.TokenChoice(index=0, token_ids=[0] * 5000)])


def test_lengths_add_up_over_chunks(parsing: Model) -> None:
    session = parsing.chat()
    for _ in range(40):
        session.step(chunk([5] * 100))
    with pytest.raises(BadRequest, match=r"output_token_ids length \(4000\) plus delta \(100\)"):
        session.step(chunk([5] * 100))


def test_a_chat_with_a_format_needs_its_prompt(parsing: Model) -> None:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(BadRequest, match="prompt_token_ids is required"):
        Session(parsing.derenderer, request, run="r", id="id", created=7, model="m")


@pytest.mark.parametrize("checkpoint", [b"", b"{", b"[]", b'{"choices": {"0": 3}}', b'{"v": 2, "choices": {}}'])
def test_bytes_that_are_no_checkpoint_are_refused(plain: Model, checkpoint: bytes) -> None:
    with pytest.raises(ValueError, match="no checkpoint of a derender session"):
        plain.chat(checkpoint)


def test_the_checkpoint_does_not_grow_with_the_output(parsing: Model) -> None:
    session = parsing.chat(tools=TOOLS)
    session.step(chunk(parsing.ids('</think><tool_call>{"name": "f", "arguments": {"text": "')))
    sizes = set()
    for _ in range(300):
        session.step(chunk(parsing.ids("word ")))
        sizes.add(len(session.checkpoint()))
    assert max(sizes) - min(sizes) <= 4
