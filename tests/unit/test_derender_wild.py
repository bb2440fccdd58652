"""What models get wrong in any format: the call that was meant is the call that comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender.formats import TOOLS, Declared, scanner
from headrace.workers.derender.formats.bodies import GemmaBody, HarmonyBody, JsonBody, NamedBody, PythonBody, XmlBody
from tests.unit.derender_formats import DECLARED, TOOL_NAMES, written
from tests.unit.scanned import Said, read

GIVEN = {"a": "b"}
IN_JSON = [name for name in TOOL_NAMES if isinstance(TOOLS[name].body, JsonBody | NamedBody | HarmonyBody)]
IN_OBJECTS = [
    name for name in IN_JSON if isinstance(body := TOOLS[name].body, JsonBody) and not (body.header or body.keyed)
]
NAMES = ["3d_search", "get-weather", "a.b.c", "_f", "wetter_für", "天気"]
TOLD = Declared(
    [
        *(ChatCompletionToolsParam.model_validate(tool) for tool in DECLARED),
        *(ChatCompletionToolsParam.model_validate({"function": {"name": name}}) for name in NAMES),
    ]
)
LONE_ENDS = {"glm45", "minicpm5", "poolside_v1"}
"""Formats without sections: a call's end is the only one."""


def said(name: str, text: str) -> Said:
    """What the text says, whole and character by character."""
    scan = scanner(tools=TOOLS[name])
    whole, _ = read(scan, [text], declared=TOLD)
    single, _ = read(scan, list(text), declared=TOLD)
    assert whole == single
    return whole


def end(name: str) -> str:
    """What ends a section of calls."""
    match TOOLS[name].body:
        case JsonBody(ends=ends):
            return ends[0] if ends else ""
        case NamedBody() as body:
            return body.section_end or body.end
        case XmlBody() as body:
            return body.end or body.call_end
        case PythonBody(end=end) | GemmaBody(end=end):
            return end
        case HarmonyBody():
            return "<|call|>"


def with_arguments(name: str, arguments: str) -> str:
    return written(name, "f", GIVEN).replace(json.dumps(GIVEN), arguments)


def calls(said: Said) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in said.calls]


@pytest.mark.parametrize("name", TOOL_NAMES)
@pytest.mark.parametrize("joint", ["", "\n", "\r\n", "\n\n\n"])
def test_two_outputs_in_a_row_are_two_calls(name: str, joint: str) -> None:
    text = written(name, "f", GIVEN)
    found = said(name, f"{joint}{text}{joint}{text}{joint}")
    assert (found.content, calls(found)) == ("", [("f", GIVEN)] * 2)


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_a_start_that_is_said_twice_begins_once(name: str) -> None:
    if TOOLS[name].starts:
        found = said(name, TOOLS[name].starts[0] + written(name, "f", GIVEN))
        assert (found.content, calls(found)) == ("", [("f", GIVEN)])


@pytest.mark.parametrize("name", sorted(set(TOOL_NAMES) - LONE_ENDS))
def test_an_end_that_is_said_twice_is_no_content(name: str) -> None:
    found = said(name, f"{written(name, 'f', GIVEN)}\n{end(name)}")
    assert (found.content.strip(), calls(found)) == ("", [("f", GIVEN)])


@pytest.mark.parametrize("name", [name for name in sorted(set(TOOL_NAMES) - LONE_ENDS) if end(name)])
def test_an_end_that_is_missing_is_not_missed(name: str) -> None:
    text = written(name, "f", GIVEN).removesuffix(end(name))
    for tail in ("", "\n"):
        found = said(name, text + tail)
        assert (found.content, calls(found)) == ("", [("f", GIVEN)])


@pytest.mark.parametrize("arguments", ["null", "null ", '""', "{}"])
@pytest.mark.parametrize("name", IN_JSON)
def test_a_call_that_has_no_arguments_has_an_empty_object(name: str, arguments: str) -> None:
    assert calls(said(name, with_arguments(name, arguments))) == [("f", {})]


@pytest.mark.parametrize("name", IN_JSON)
@pytest.mark.parametrize("given", [GIVEN, {"a": 'é😀 "quoted" \\ \n', "l": [1, {}]}, {}])
def test_arguments_in_a_string_are_what_it_holds(name: str, given: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        inner = json.dumps(given, ensure_ascii=ascii_only)
        assert calls(said(name, with_arguments(name, json.dumps(inner, ensure_ascii=ascii_only)))) == [("f", given)]


@pytest.mark.parametrize("name", sorted(set(IN_JSON) - {"mistral"}))
@pytest.mark.parametrize("arguments", ['"null"', '"nullable {"', "nul", "nothing", "NaN", '"  "', "5"])
def test_other_arguments_are_passed_on_as_they_are(name: str, arguments: str) -> None:
    [(function, passed)] = said(name, with_arguments(name, arguments)).calls
    assert (function, passed.strip()) == ("f", arguments)


@pytest.mark.parametrize("name", IN_OBJECTS)
def test_a_call_may_be_wrapped_as_requests_wrap_their_tools(name: str) -> None:
    body = TOOLS[name].body
    assert isinstance(body, JsonBody)
    keys = min(body.name_keys), min(body.argument_keys)
    one = f'{{"{keys[0]}": "f", "{keys[1]}": {json.dumps(GIVEN)}}}'
    wrapped = f'{{"type": "function", "function": {one}}}'
    text = written(name, "f", GIVEN)
    assert one in text
    found = said(name, text.replace(one, f"{wrapped}, {wrapped}"))
    assert (found.content, calls(found)) == ("", [("f", GIVEN)] * 2)


@pytest.mark.parametrize("name", [n for n in TOOL_NAMES if isinstance(TOOLS[n].body, XmlBody | PythonBody | GemmaBody)])
def test_an_end_closes_what_is_open_outside_of_a_string(name: str) -> None:
    text = written(name, "f", {"a": "b", "o": "c"}).removesuffix(end(name))
    for cut in range(len(text) if end(name) else 0):
        for function, arguments in said(name, text[:cut] + end(name)).calls:
            if end(name) in arguments:  # within a string, it is text
                continue
            assert isinstance(json.loads(arguments), dict), (function, text[:cut])


@pytest.mark.parametrize("name", TOOL_NAMES)
@pytest.mark.parametrize("function", NAMES)
def test_names_are_passed_on_whole(name: str, function: str) -> None:
    assert calls(said(name, written(name, function, GIVEN))) == [(function, GIVEN)]


@pytest.mark.parametrize("name", ["olmo3", "lfm2", "llama4_pythonic", "pythonic"])
@pytest.mark.parametrize("text", ["1st(a=1)", "-f(a=1)", ".5(a=1)", "2 (a=1)"])
def test_what_is_nearly_a_name_is_read_the_same_in_any_pieces(name: str, text: str) -> None:
    row = TOOLS[name]
    said(name, f"{row.starts[0] if row.starts else ''}[{text}, {text}]{end(name)}")


@pytest.mark.parametrize("name", [name for name in IN_OBJECTS if TOOLS[name].starts])
def test_a_marker_behind_a_string_that_a_piece_ends_in_is_one(name: str) -> None:
    start = TOOLS[name].starts[0]
    broken = f'{start}{{"name": "f", "tool_name": "f", "arguments": {{"a": "b"{start}'
    text = broken + written(name, "f", GIVEN).removeprefix(start)
    scan = scanner(tools=TOOLS[name])
    whole, _ = read(scan, [text])
    for at in range(len(text)):
        assert read(scan, [text[:at], text[at : at + 6], text[at + 6 :]])[0] == whole
    assert whole.calls[-1] == ("f", json.dumps(GIVEN))
