"""What a choice came to, by our doors and by the recorded ones, and what a kind of case says in any format."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from headrace.protocol import ChatCompletionRequest, DerenderStreamState, wire
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.formats import REASONING
from tests.golden.vectors import Case, step, whole

ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "</s>", "<|user|>", "<seed:eos>", "<|return|>", "<|call|>")
"""Tokens that end a turn. The reference leaves their text in the content."""
EOS = "<|im_end|>"
START, END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


class Message(NamedTuple):
    """What a choice came to; arguments are parsed where they are JSON."""

    content: str | None
    reasoning: str | None
    calls: list[tuple[str, Any]]
    finish_reason: str | None


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
    content = content and (_ended(content) or None)
    if reasoning is not None and (ended := _ended(reasoning)) != reasoning:
        row = REASONING.get(case.reasoning_parser or "")
        reasoning = (ended.rstrip() if row is not None and row.trim_reasoning else ended) or None
    if calls and content is not None and not content.strip():
        content = None
    named = isinstance((case.request or {}).get("tool_choice"), dict)
    if calls and finish_reason == "stop" and not named:
        finish_reason = "tool_calls"
    return Message(content, reasoning, calls, finish_reason)


def broken_characters(case: Case, said: list[dict[int, Message]]) -> bool:
    """Whether the reference broke up characters that the model wrote: a defect that can't be mended."""
    return "\ufffd" in str(said) and not any("\ufffd" in text for text in case.texts)


def _ended(text: str) -> str:
    return next((text.removesuffix(end) for end in ENDS if text.endswith(end)), text)


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
        done = live.step(wire.TokenChunk(request_id=case.id, choices=[choice_of(index, part, finish_reason)]))
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


def choice_of(index: int, ids: list[int], finish_reason: str | None) -> wire.TokenChoice:
    return wire.TokenChoice(index=index, token_ids=ids, finish_reason=finish_reason)


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
