"""With parsers: what the reference says where it agrees with itself, and what the model plainly wrote elsewhere.

Right is decided once per case. Where the recorded chunkings and the one-shot answer say the same, less the defects
that the vectors' README lists, that is right. Where they do not, `plainly` reads the whole text at once, in the
simplest way. A call that is not well-formed (kinds tool-malformed and tool-trunc) is streamed by the reference in
part or not at all, and comes as markup in the content in one shot; ours is the call as far as it can be read: a
missing colon loses nothing, broken arguments are given as they were written, a call without a name is none.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from headrace.protocol import ChatCompletionRequest, DerenderStreamState, HeadraceError, wire
from headrace.workers.derender import Derenderer, Session
from tests.golden.vectors import Case, cases, load, step, whole

EOS = "<|im_end|>"
START, END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

# Cases per file: all of them, and those of them in which the reference agrees with itself once its defects are off.
FILES = {
    "qwen3__qwen3+hermes": (227, 197),
    "qwen3__none+hermes": (167, 140),
    "qwen3__qwen3+none": (92, 89),
    "qwen3__deepseek_r1+hermes": (227, 136),
}


class Message(NamedTuple):
    """What a choice came to; arguments are parsed where they are JSON."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, Any]]
    finish_reason: str | None


@pytest.mark.parametrize("name", FILES)
def test_where_the_reference_agrees_with_itself_we_agree_with_it(name: str) -> None:
    derenderer = load(name)
    agreed = total = 0
    for case in cases(name):
        total += 1
        theirs = list(recorded(case))
        if any(one != theirs[0] for one in theirs):
            continue
        agreed += 1
        for label, message in ours(derenderer, case):
            assert message == theirs[0], f"{case.id}, {label}"
    assert (total, agreed) == FILES[name]


@pytest.mark.parametrize("name", FILES)
def test_every_case_says_what_the_model_plainly_wrote_under_every_chunking(name: str) -> None:
    derenderer = load(name)
    for case in cases(name):
        if case.texts == ["(ids)"] or case.request is None:
            continue
        right = {index: plainly(case, text) for index, text in enumerate(case.texts)}
        for label, message in ours(derenderer, case):
            assert message == right, f"{case.id}, {label}"


@pytest.mark.parametrize("name", FILES)
def test_any_chunking_with_a_restart_after_every_chunk_gives_the_same(name: str) -> None:
    derenderer = load(name)
    rng = random.Random(7)
    for case in cases(name):
        if case.request is None or case.prompt_token_ids is None:
            continue
        for index, ids in enumerate(case.token_ids):
            one_shot = session(derenderer, case).final([_choice(index, ids, case.finish_reason)])
            want = one_shot.choices[0].model_dump(mode="json")
            sizes = rng.choice([(1, 3), (1, 12), (5, 40)])
            deltas = restarted(derenderer, case, index, list(split(ids, sizes, rng)))
            assert [added(deltas)] == [of_final(want)], case.id
            assert call_ids(deltas) == [call["id"] for call in want["message"].get("tool_calls", [])], case.id


@pytest.mark.parametrize("name", FILES)
def test_what_the_reference_refuses_we_refuse_in_its_words(name: str) -> None:
    derenderer = load(name)
    refused = [case for case in cases(name) if case.kind in ("noreq", "noprompt")]
    assert refused
    for case in refused:
        for event in (event for stream in case.streams for event in stream.events):
            with pytest.raises(HeadraceError) as caught:
                step(derenderer, case, event.chunk, None)
            assert caught.value.error.model_dump(mode="json") == event.response, case.id


@pytest.mark.parametrize("name", FILES)
def test_chunks_carry_the_usage_the_ids_and_the_log_probabilities_that_were_asked_for(name: str) -> None:
    derenderer = load(name)
    for case in cases(name):
        if case.request is None or case.prompt_token_ids is None:
            continue
        hidden = case.request.get("include_reasoning") is False
        for event, done in steps(derenderer, case):
            theirs = event.response["chunk"]
            assert done.get("usage") == theirs["usage"], case.id
            for sent, choice, their_choice in zip(
                event.chunk["choices"], done["choices"], theirs["choices"], strict=True
            ):
                assert choice["token_ids"] == their_choice["token_ids"], case.id
                logprobs = (sent.get("logprobs") or {}).get("content")
                if logprobs and not hidden:
                    assert len(choice["logprobs"]["content"]) == len(logprobs), case.id


def test_streamed_log_probabilities_equal_the_one_shot_ones_of_the_reference() -> None:
    derenderer = load("qwen3__qwen3+hermes")
    found = [case for case in cases("qwen3__qwen3+hermes") if case.kind == "logprobs-parser"]
    assert found
    for case in found:
        want = case.nonstream["response"]["choices"][0]["logprobs"]["content"]
        for stream in case.streams:
            events = [done for _, done in steps(derenderer, case, stream.chunking)]
            got = [entry for done in events for choice in done["choices"] for entry in choice["logprobs"]["content"]]
            assert got == want, f"{case.id}, {stream.chunking}"
        assert whole(derenderer, case)["choices"][0]["logprobs"]["content"] == want, case.id


def ours(derenderer: Derenderer, case: Case) -> Iterator[tuple[str, dict[int, Message]]]:
    """Our messages by choice index, for every recorded chunking and in one shot."""
    for stream in case.streams:
        deltas: dict[int, list[dict[str, Any]]] = {}
        for _, done in steps(derenderer, case, stream.chunking):
            for choice in done["choices"]:
                deltas.setdefault(choice["index"], []).append(choice)
        if deltas:
            yield stream.chunking, {index: added(parts) for index, parts in deltas.items()}
    if case.request is not None:
        yield "one-shot", {choice["index"]: of_final(choice) for choice in whole(derenderer, case)["choices"]}


def steps(derenderer: Derenderer, case: Case, chunking: str | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
    carried: dict[tuple[str, int | None], DerenderStreamState] = {}
    if case.request is None or case.prompt_token_ids is None:
        return
    for stream in case.streams:
        if chunking in (None, stream.chunking):
            for event in stream.events:
                key = (stream.chunking, event.index)
                done = step(derenderer, case, event.chunk, carried.get(key))
                # Through JSON, as over HTTP.
                carried[key] = DerenderStreamState.model_validate_json(done.stream_state.model_dump_json())
                yield event, done.chunk.model_dump(mode="json")


def recorded(case: Case) -> Iterator[dict[int, Message]]:
    """The reference's messages, less its known defects."""
    for stream in case.streams:
        parts: dict[int, list[dict[str, Any]]] = {}
        for event in stream.events:
            for choice in event.response.get("chunk", {"choices": []})["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        if parts:
            yield {index: mended(case, added(deltas)) for index, deltas in parts.items()}
    response = case.nonstream["response"]
    if "choices" in response:
        yield {choice["index"]: mended(case, of_final(choice)) for choice in response["choices"]}


def mended(case: Case, message: Message) -> Message:
    content, reasoning, calls, finish_reason = message
    content = content and (content.removesuffix(EOS) or None)
    reasoning = reasoning and (reasoning.removesuffix(EOS) or None)
    if calls and content is not None and not content.strip():
        content = None
    named = isinstance((case.request or {}).get("tool_choice"), dict)
    if calls and finish_reason == "stop" and not named:
        finish_reason = "tool_calls"
    return Message(content, reasoning, calls, finish_reason)


def added(choices: Iterable[dict[str, Any]]) -> Message:
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    finish_reason = None
    for choice in choices:
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or []:
            text = calls.setdefault(call["index"], ["", ""])
            text[0] += call["function"].get("name") or ""
            text[1] += call["function"].get("arguments") or ""
        finish_reason = choice.get("finish_reason") or finish_reason
    ordered = [(calls[index][0], parsed(calls[index][1])) for index in sorted(calls)]
    return Message(content or None, reasoning or None, ordered, finish_reason)


def of_final(choice: dict[str, Any]) -> Message:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return Message(
        message["content"] or None,
        message["reasoning"] or None,
        [(call["name"], parsed(call["arguments"])) for call in calls],
        choice["finish_reason"],
    )


def call_ids(choices: Iterable[dict[str, Any]]) -> list[str]:
    return [call["id"] for choice in choices for call in choice["delta"].get("tool_calls") or [] if call.get("id")]


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def plainly(case: Case, text: str) -> Message:
    """The whole text read at once: markers split it, calls are JSON between theirs."""
    request = case.request or {}
    thinks = case.reasoning_parser is not None and not (
        case.reasoning_parser == "qwen3" and request.get("chat_template_kwargs") == {"enable_thinking": False}
    )
    tools = case.tool_parser is not None and "tools" in request and request.get("tool_choice") != "none"
    closed = thinks and request.get("chat_template_kwargs") == {"enable_thinking": False}
    text = unicodedata.normalize("NFC", text).removesuffix(EOS)  # as the tokenizer does before it splits
    reasoning = content = ""
    if thinks:
        reasoning, content = thoughts(text, tools=tools and case.reasoning_parser == "qwen3", closed=closed)
    else:
        content = text
    calls: list[tuple[str, Any]] = []
    if tools and CALL in content:
        content, _, rest = content.partition(CALL)
        calls = [call for body in rest.split(CALL) if (call := call_of(body)) is not None]
        content = content if content.strip() else ""
    if request.get("parallel_tool_calls") is False:
        calls = calls[:1]
    finish_reason = case.finish_reason
    if calls and finish_reason == "stop" and not isinstance(request.get("tool_choice"), dict):
        finish_reason = "tool_calls"
    shown = reasoning if request.get("include_reasoning") is not False else ""
    return Message(content or None, shown or None, calls, finish_reason)


def thoughts(text: str, *, tools: bool, closed: bool) -> tuple[str, str]:
    """Reasoning and the rest. With `tools`, a call ends the reasoning, and what follows it stays together."""
    reasoning = content = ""
    thinking = not closed
    for part in re.split(f"({START}|{END}{f'|{CALL}' if tools else ''})", text):
        if part == CALL:
            start = text.index(CALL)
            return reasoning, content + text[start:]
        if part in (START, END):
            thinking = part == START
        elif thinking:
            reasoning += part
        else:
            content += part
    return reasoning, content


def call_of(body: str) -> tuple[str, Any] | None:
    body, closed, _ = body.partition(CALL_END)
    try:
        call = json.loads(body)
    except ValueError:
        broken = re.match(r'\s*\{"name":? "([^"]+)", "arguments": ?(.*)', body.rstrip() if closed else body, re.DOTALL)
        return (broken[1], parsed(broken[2].removesuffix("}") if closed else broken[2])) if broken else None
    return (call["name"], call.get("arguments", {})) if call["name"] else None


def session(derenderer: Derenderer, case: Case, checkpoint: bytes | None = None) -> Session:
    return Session(
        derenderer,
        ChatCompletionRequest.model_validate(case.request),
        run=case.id,
        id=case.id,
        created=0,
        model=case.tokenizer,
        prompt_token_ids=case.prompt_token_ids,
        checkpoint=checkpoint,
    )


def restarted(derenderer: Derenderer, case: Case, index: int, parts: list[list[int]]) -> list[dict[str, Any]]:
    """The choice's deltas when the worker dies after each chunk."""
    deltas, checkpoint = [], None
    for number, part in enumerate(parts, 1):
        live = session(derenderer, case, checkpoint)
        finish_reason = case.finish_reason if number == len(parts) else None
        done = live.step(wire.TokenChunk(request_id=case.id, choices=[_choice(index, part, finish_reason)]))
        deltas.append(msgspec.to_builtins(done)["choices"][0])
        checkpoint = live.checkpoint()
    return deltas


def split(ids: list[int], sizes: tuple[int, int], rng: random.Random) -> Iterator[list[int]]:
    at = 0
    while at < len(ids):
        size = rng.randint(*sizes)
        yield ids[at : at + size]
        at += size
    if not ids or rng.random() < 0.3:
        yield []


def _choice(index: int, ids: list[int], finish_reason: str | None) -> wire.TokenChoice:
    return wire.TokenChoice(index=index, token_ids=ids, finish_reason=finish_reason)
