"""A call that was demanded, of any function or by name: as plain JSON or in the format's own markup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.protocol import ChatCompletionResponse
from headrace.workers.derender.formats import REASONING, TOOLS, MessageScanner, ToolFormat
from tests.unit.json_written import BOTH, WRITTEN, G
from tests.unit.scanned import Said, read, said
from tests.unit.small_chat import chunk, session

FORCED = [row for row in {row.name: row for row in TOOLS.values()}.values() if row.forced_json]


@pytest.mark.parametrize("tools", FORCED, ids=lambda row: row.name)
def test_a_demanded_call_may_be_plain_json(tools: ToolFormat) -> None:
    listed = '\n[ {"name": "f", "parameters": {"a": 1}}, {"name": "g", "arguments": {}}]\n'
    right = Said("", "", [("f", '{"a": 1}'), ("g", "{}")])
    for pieces in ([listed], list(listed)):
        assert read(MessageScanner(tools=tools, demanded=""), pieces)[0] == right
        assert read(MessageScanner(tools=tools, demanded="h"), pieces)[0] == right
    alone = '{"a": {"b": "}"}}\n'
    for pieces in ([alone], list(alone)):
        assert read(MessageScanner(tools=tools, demanded="h"), pieces)[0] == Said("", "", [("h", alone.strip())])
    assert said('{"a": [', tools=tools, demanded="h").calls == [("h", '{"a": [')]
    assert said("{", tools=tools, demanded="h").calls == [("h", "{")]


@pytest.mark.parametrize("tools", [row for row in FORCED if row.name in WRITTEN], ids=lambda row: row.name)
@pytest.mark.parametrize("demanded", ["", "h"])
def test_a_demanded_call_may_be_in_the_formats_own_markup(tools: ToolFormat, demanded: str) -> None:
    text = WRITTEN[tools.name]
    for pieces in ([text], list(text)):
        assert read(MessageScanner(tools=tools, demanded=demanded), pieces)[0] == Said("", "", BOTH)


@pytest.mark.parametrize(
    "text", ["", "\n", "[", "[ ", "[1]", "I cannot.", f"So: {G}", "[]", '[{"a": 1}]', f"[{' ' * 70}"]
)
def test_what_was_said_instead_of_a_demanded_call_is_content(text: str) -> None:
    scanner = MessageScanner(tools=TOOLS["granite"], demanded="")
    assert read(scanner, [text])[0] == read(scanner, list(text))[0] == Said("", text, [])


def test_a_demanded_call_comes_after_the_reasoning() -> None:
    scanner = MessageScanner(REASONING["deepseek_r1"], TOOLS["granite4"], demanded="f")
    text = '{"b": 2}</think>\n\n{"a": 1}'
    assert read(scanner, [text], "reasoning")[0] == Said('{"b": 2}', "", [("f", '{"a": 1}')])


def test_without_a_demand_or_in_a_format_of_its_own_json_is_content() -> None:
    assert said(f"[{G}]", tools=TOOLS["granite"]) == Said("", f"[{G}]", [])
    assert said(f"[{G}]", tools=TOOLS["hermes"], demanded="") == Said("", f"[{G}]", [])


@pytest.mark.parametrize(
    ("choice", "text", "finish_reason"),
    [
        ("required", '[{"name": "f", "parameters": {"a": 1}}]', "tool_calls"),
        ({"type": "function", "function": {"name": "f"}}, '{"a": 1}', "stop"),
        ("required", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', "tool_calls"),
    ],
)
def test_a_request_may_demand_a_call(tmp_path: Path, choice: Any, text: str, finish_reason: str) -> None:
    live, tokenizer = session(tmp_path, "granite", tool_choice=choice)
    final = live.final([chunk(tokenizer.encode(text).ids, "stop")])
    assert isinstance(final, ChatCompletionResponse)
    [said_choice] = final.choices
    [call] = said_choice.message.tool_calls
    assert (call.function.name, call.function.arguments, said_choice.message.content) == ("f", '{"a": 1}', "")
    assert said_choice.finish_reason == finish_reason
