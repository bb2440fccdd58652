"""However the tokens of an output are cut into chunks, and whoever carries the state, it says the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol import ChatCompletionRequest, ChatCompletionStreamResponse, DerenderChatStreamRequest, wire
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.derenderer import StateMode
from tests.unit.derender_formats import DECLARED, TOOL_NAMES, Formats, outputs, written

REQUESTS = st.sampled_from(
    [
        {},
        {"tools": DECLARED},
        {"tools": DECLARED, "tool_choice": "none"},
        {"tools": DECLARED, "tool_choice": "required"},
        {"tools": DECLARED, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": DECLARED, "parallel_tool_calls": False, "return_token_ids": True},
        {"tools": DECLARED, "include_reasoning": False},
        {"tools": DECLARED, "stop": ["word w", "\n\n", "é"], "return_token_ids": True},
        {"tools": DECLARED, "stop": ["}", "f"], "include_stop_str_in_output": True, "include_reasoning": False},
        {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        {"skip_special_tokens": False, "tools": DECLARED},
    ]
)
FINISH = st.sampled_from(["stop", "length", "abort"])


class Said(NamedTuple):
    """What a choice came to."""

    content: str
    reasoning: str
    calls: dict[int, tuple[str, str, str]]
    """Id, name and arguments by index."""
    finish: tuple[str | None, Any]
    logprobs: list[Any]
    token_ids: list[int]


def said(choices: list[dict[str, Any]]) -> Said:
    """The sum of a chat choice's deltas; a call has its id and its name once."""
    content = reasoning = ""
    calls: dict[int, tuple[str, str, str]] = {}
    logprobs: list[Any] = []
    token_ids: list[int] = []
    for choice in choices:
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for piece in delta.get("tool_calls") or ():
            before = calls.get(piece["index"], ("", "", ""))
            function = piece["function"]
            added = (piece.get("id"), function.get("name"), function.get("arguments"))
            calls[piece["index"]] = (before[0] + (added[0] or ""), before[1] + (added[1] or ""), before[2] + added[2])
        logprobs += (choice.get("logprobs") or {}).get("content") or ()
        token_ids += choice.get("token_ids") or ()
    last = choices[-1]
    return Said(content, reasoning, calls, (last.get("finish_reason"), last.get("stop_reason")), logprobs, token_ids)


def of_whole(choice: dict[str, Any]) -> Said:
    message = choice["message"]
    calls = enumerate(message.get("tool_calls", ()))
    return Said(
        message["content"] or "",
        message["reasoning"] or "",
        {index: (call["id"], call["function"]["name"], call["function"]["arguments"]) for index, call in calls},
        (choice["finish_reason"], choice["stop_reason"]),
        (choice["logprobs"] or {}).get("content") or [],
        choice["token_ids"] or [],
    )


def choice_of(ids: list[int], finish_reason: str | None) -> wire.TokenChoice:
    entries = [
        wire.TokenLogprobEntry(token_id=i, logprob=-1.0, top_logprobs=[wire.TokenLogprob(token_id=i + 1, logprob=-2.0)])
        for i in ids
    ]
    return wire.TokenChoice(index=0, token_ids=ids, finish_reason=finish_reason, logprobs=wire.TokenLogprobs(entries))


def session(
    derenderer: Derenderer, request: dict[str, Any], prompt: list[int], checkpoint: bytes | None = None
) -> Session:
    asked = ChatCompletionRequest.model_validate(request)
    return Session(
        derenderer, asked, run="r", id="i", created=0, model="m", prompt_token_ids=prompt, checkpoint=checkpoint
    )


def live(live: Session, parts: list[wire.TokenChoice]) -> Iterator[dict[str, Any]]:
    for part in parts:
        chunk = msgspec.json.encode(live.step(wire.TokenChunk(request_id="r", choices=[part])))
        yield ChatCompletionStreamResponse.model_validate_json(chunk).model_dump(mode="json")["choices"][0]


def restored(
    derenderer: Derenderer, request: dict[str, Any], prompt: list[int], parts: list[wire.TokenChoice]
) -> Iterator[dict[str, Any]]:
    checkpoint = None
    for part in parts:
        one = session(derenderer, request, prompt, checkpoint)
        yield from live(one, [part])
        checkpoint = one.checkpoint()


def stateless(
    derenderer: Derenderer, request: dict[str, Any], prompt: list[int], parts: list[wire.TokenChoice], forget: bool
) -> Iterator[dict[str, Any]]:
    """Through the endpoint, all of it as JSON. `forget`: our own field of the state is lost on the way."""
    state: dict[str, Any] | None = None
    for part in parts:
        body = {
            "stream": True,
            "chat_request": request,
            "prompt_token_ids": prompt,
            "stream_state": state,
            "generate_chunk": {"request_id": "r", "choices": [msgspec.to_builtins(part)]},
        }
        done = derenderer.chat_stream(DerenderChatStreamRequest.model_validate_json(json.dumps(body)))
        state = json.loads(done.stream_state.model_dump_json())
        if forget:
            state.pop("scan", None)
        yield json.loads(done.chunk.model_dump_json())["choices"][0]


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Formats:
    return Formats(tmp_path_factory.mktemp("formats"))


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_each_format_reads_a_call_that_is_written_in_it(formats: Formats, tools: str) -> None:
    """Else the texts below would say little."""
    derenderer, text = formats.derenderer(tools, None), written(tools, "f", {"a": "x y", "n": "5"})
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": DECLARED}
    done = session(derenderer, asked, []).final([choice_of(formats.ids(text), "stop")]).model_dump(mode="json")
    whole = of_whole(done["choices"][0])
    assert [(name, json.loads(arguments)["a"]) for _, name, arguments in whole.calls.values()] == [("f", "x y")]
    assert (whole.content, whole.finish[0]) == ("", "tool_calls")


@given(
    output=outputs(),
    prompt=st.sampled_from(["a question", "<think>", "</think>"]),
    request=REQUESTS,
    finish_reason=FINISH,
    cuts=st.lists(st.integers(0, 300), max_size=12) | st.just("everywhere"),
)
@settings(deadline=None)
def test_any_chunks_say_what_the_whole_output_says(
    formats: Formats,
    output: tuple[str | None, str | None, str],
    prompt: str,
    request: dict[str, Any],
    finish_reason: str,
    cuts: list[int] | str,
) -> None:
    tools, reasoning, text = output
    derenderer, ids, before = formats.derenderer(tools, reasoning), formats.ids(text), formats.ids(prompt)
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, **request}
    places = range(len(ids)) if isinstance(cuts, str) else cuts
    edges = [0, *sorted({min(cut, len(ids)) for cut in places}), len(ids)]
    parts = [
        choice_of(ids[start:end], finish_reason if number == len(edges) - 2 else None)
        for number, (start, end) in enumerate(pairwise(edges))
    ]
    one_shot = session(derenderer, asked, before).final([choice_of(ids, finish_reason)]).model_dump(mode="json")
    whole = of_whole(one_shot["choices"][0])
    assert said(list(live(session(derenderer, asked, before), parts))) == whole
    assert said(list(restored(derenderer, asked, before, parts))) == whole
    modes: tuple[tuple[StateMode, bool], ...] = (("compact", False), ("replay", False), ("replay", True))
    for mode, forget in modes[: 1 if tools is reasoning is None else 3]:
        door = Derenderer(derenderer.core, state_mode=mode)
        assert said(list(stateless(door, asked, before, parts, forget))) == whole, (mode, forget)
