"""Formats by name, from a file, and by what a model's own files ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.protocol import ChatCompletionRequest
from headrace.protocol.wire import TokenChoice
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.formats import REASONING, TOOLS, About, FormatError, Formats
from headrace.workers.derender.formats.bodies import JsonBody
from headrace.workers.derender.formats.reasoning import ReasoningFormat
from headrace.workers.derender.formats.registry import MAX_STRING
from headrace.workers.derender.formats.tools import ToolFormat
from headrace.workers.derender.model_files import about
from tests.unit.derender_tokenizer import byte_level

OURS = """
[[tool]]
name = "angled"
aliases = ["pointed"]
starts = ["<<call>>"]
body = { kind = "json", ends = ["<</call>>"] }

[[reasoning]]
name = "musing"
starts = ["<<muse>>"]
ends = ["<</muse>>"]
call_ends = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "formats.toml"
    file.write_text(OURS)
    return file


def test_formats_are_found_by_name_and_alias() -> None:
    known, nothing = Formats(), About()
    assert known.tools("hermes", nothing) is known.tools("qwen3_json", nothing) is TOOLS["hermes"]
    assert known.reasoning("mimo", nothing) is REASONING["qwen3"]
    assert known.tools(None, nothing) is None
    assert known.reasoning(None, nothing) is None
    with pytest.raises(FormatError, match=r"tool_parser 'nope' does not exist; known are auto, .*hermes"):
        known.tools("nope", nothing)


def test_a_file_adds_formats_to_those_built_in(file: Path) -> None:
    known = Formats(file)
    added = ToolFormat("angled", ("<<call>>",), JsonBody(("<</call>>",)), aliases=("pointed",))
    assert known.tools("angled", About()) == known.tools("pointed", About()) == added
    assert known.reasoning("musing", About()) == ReasoningFormat(
        "musing", ("<<muse>>",), ("<</muse>>",), call_ends=True
    )
    assert known.tools("hermes", About()) is TOOLS["hermes"]


def test_what_a_model_writes_is_read_in_the_format_of_a_file(tmp_path: Path, file: Path) -> None:
    tokenizer = byte_level(tmp_path)
    derenderer = Derenderer.load(tmp_path, tool_parser="pointed", reasoning_parser="musing", formats=file)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    request = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    asked = ChatCompletionRequest.model_validate(request)
    session = Session(derenderer, asked, run="r", id="r", created=0, model="m", prompt_token_ids=[])
    ids = tokenizer.encode('<<muse>>why<</muse>><<call>>{"name": "f", "arguments": {"a": 1}}<</call>>').ids
    message = session.final([TokenChoice(index=0, token_ids=ids, finish_reason="stop")]).choices[0].message
    assert (message.reasoning, message.content) == ("why", None)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[tool]", "Expected ']]'"),
        ("[[tools]]\nname = 'a'", "tools is neither"),
        ("[tool]\nname = 'a'", r"\[\[tool\]\] must be a list of tables"),
        ("[[reasoning]]\nname = 'a'\nends = ['x']", r"\[\[reasoning\]\] 1: starts is missing"),
        ("[[reasoning]]\nname = 'a'\nstarts = ['x']\nends = ['x']\nstart = 'x'", r"\[\[reasoning\]\] 1: start is not"),
        ("[[reasoning]]\nname = 'a'\nstarts = 'x'\nends = ['x']", r"1: starts: Expected `array`, got `str`"),
        ("[[reasoning]]\nname = 'a'\nstarts = ['x', 1]\nends = []", r"1: starts: Expected `str`, got `int`.*\[1\]"),
        ("[[reasoning]]\nname = 'a'\nstarts = ['']\nends = []", r"1: starts holds an empty string"),
        (
            f"[[reasoning]]\nname = 'a'\nstarts = ['{'x' * (MAX_STRING + 1)}']\nends = []",
            f"1: starts holds a string of more than {MAX_STRING}",
        ),
        (
            "[[reasoning]]\nname = 'a'\nstarts = ['x']\nends = []\nbegins = 'end'",
            r"\[\[reasoning\]\] 1: begins: Invalid enum value 'end'",
        ),
        ("[[tool]]\nname = 'a'\nstarts = ['x']\nbody = {}", r"1: body must be a table whose kind is one of .*json"),
        ("[[tool]]\nname = 'a'\nstarts = ['x']\nbody = {kind = 'yaml'}", "1: body must be a table whose kind"),
        ("[[tool]]\nname = 'a'\nstarts = ['x']\nbody = {kind = 'json', stop = 1}", "1: body: stop is not known"),
        ("[[tool]]\nname = 'a'\nstarts = ['x']\nbody = {kind = 'json', ends = 1}", "1: body: ends: Expected `array`"),
        (
            "[[tool]]\nname = 'a'\nstarts = ['x']\nbody = {kind = 'json', header = {id = '!'}}",
            "1: body: header: arguments is missing",
        ),
        ("[[reasoning]]\nname = ''\nstarts = ['x']\nends = []", "1: name is missing"),
        (
            f"[[reasoning]]\nname = 'a'\nstarts = []\nends = []\nlabel = '{'x' * (MAX_STRING + 1)}'",
            "1: label holds a string of more than",
        ),
        ("[[tool]]\nname = 'hermes'\nstarts = ['x']\nbody = {kind = 'json'}", "1: the name 'hermes' is taken"),
        ("[[tool]]\nname = 'auto'\nstarts = ['x']\nbody = {kind = 'json'}", "1: the name 'auto' is taken"),
        (f"{OURS}\n[[reasoning]]\nname = 'musing'\nstarts = ['x']\nends = ['x']", "2: the name 'musing' is taken"),
    ],
)
def test_a_file_that_describes_no_format_is_refused_by_file_table_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(FormatError, match=message) as caught:
        Formats(file)
    assert str(caught.value).startswith(f"{file}: ")


HERMES_TEMPLATE = (
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>. {% for tool in tools %}{% endfor %}'
)


@pytest.mark.parametrize(
    ("template", "model_type", "reasoning", "tools"),
    [
        ("{{ messages }}", None, None, None),
        ("{{ messages }}", "qwen3", None, None),
        (HERMES_TEMPLATE, None, None, "hermes"),
        (f"{HERMES_TEMPLATE}<think></think>", "somebody", "think", "hermes"),
        (f"{HERMES_TEMPLATE}<|im_start|><think></think>enable_thinking", "qwen3", "qwen3", "hermes"),
        (f"{HERMES_TEMPLATE}<|im_start|><think></think>enable_thinking", "somebody", "think", "hermes"),
        (f"{HERMES_TEMPLATE}<|im_start|><think></think>enable_thinking", None, "qwen3", "hermes"),
        (f"{HERMES_TEMPLATE}<|start_of_role|>", None, None, "granite4"),
        (f"{HERMES_TEMPLATE}<think></think>", "ernie4_5_moe", "ernie45", "ernie45"),
        ("<|channel|>analysis<|message|> and <|call|>", None, "openai_gptoss", "openai"),
        ("<｜tool▁calls▁begin｜> and ```json", None, None, "deepseek_v3"),
        ("<｜tool▁calls▁begin｜> and <｜tool▁sep｜>", None, None, "deepseek_v31"),
    ],
)
def test_a_chat_template_asks_for_the_formats_whose_markers_it_has(
    template: str, model_type: str | None, reasoning: str | None, tools: str | None
) -> None:
    known, told = Formats(), About(template, model_type)
    found = known.reasoning("auto", told), known.tools("auto", told)
    assert tuple(row and row.name for row in found) == (reasoning, tools)


@pytest.mark.parametrize("row", [row for row in REASONING.values() if row.hints], ids=lambda row: row.name)
def test_a_template_with_all_hints_of_a_reasoning_format_asks_for_it(row: ReasoningFormat) -> None:
    for model_type in row.model_types or (None, "somebody"):
        assert Formats().reasoning("auto", About(" and ".join(row.hints), model_type)) is row


@pytest.mark.parametrize("row", [row for row in TOOLS.values() if row.hints], ids=lambda row: row.name)
def test_a_template_with_all_hints_of_a_tool_format_asks_for_it(row: ToolFormat) -> None:
    for model_type in row.model_types or (None, "somebody"):
        assert Formats().tools("auto", About(" and ".join(row.hints), model_type)) is row


def test_a_format_of_a_file_is_chosen_by_its_markers_too(file: Path) -> None:
    known, told = Formats(file), About("<<call>> <</call>> <<muse>> <</muse>>")
    assert known.tools("auto", told) is known.tools("angled", About())
    assert known.reasoning("auto", told) is known.reasoning("musing", About())


def test_a_template_with_tools_in_no_known_format_is_refused() -> None:
    with pytest.raises(FormatError, match="the chat template has tools, but none of the formats fits; name one"):
        Formats().tools("auto", About("{% for tool in tools %}"))


@pytest.mark.parametrize("model_type", [None, "somebody"])
def test_without_a_template_a_model_type_must_say_it(model_type: str | None) -> None:
    for choose in (Formats().tools, Formats().reasoning):
        with pytest.raises(FormatError, match=f"auto: no chat template, and no format for model_type {model_type!r}"):
            choose("auto", About(None, model_type))
    assert Formats().reasoning("auto", About(None, "deepseek_v32")) is REASONING["deepseek_v3"]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "one"},
        {"tokenizer_config.json": {"chat_template": "one"}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "one"}, {"name": "odd"}]}},
        {"chat_template.json": {"chat_template": "one"}},
    ],
)
def test_the_template_is_read_wherever_a_model_keeps_it(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, content in ({"config.json": {"model_type": "llama"}} | files).items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert about(tmp_path) == about(tmp_path / "tokenizer.json") == About("one", "llama")


def test_all_the_templates_of_a_model_are_read(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    (tmp_path / "chat_template.jinja").write_text("one")
    assert about(tmp_path) == About("one\ntwo")


@pytest.mark.parametrize("content", ["[]", '{"model_type": 1, "chat_template": 2}'])
def test_files_may_say_nothing_of_formats(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert about(tmp_path) == About()


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        about(tmp_path)


def test_auto_sets_a_derenderer_to_the_formats_of_its_model(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(f"{HERMES_TEMPLATE}<think></think>")
    core = Derenderer.load(tmp_path, tool_parser="auto", reasoning_parser="auto").core
    assert (core.tools, core.reasoning) == (TOOLS["hermes"], REASONING["think"])
