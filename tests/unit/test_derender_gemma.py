"""Calls as Gemma writes them: what is read, in any pieces, and what is left alone."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender.formats import TOOLS, Declared, Found, MessageScanner, ScanState
from headrace.workers.derender.formats.gemma_call import MAX_DEPTH, MAX_KEPT, WINDOW, GemmaSection
from tests.unit.scanned import Said, linear, pieces_of, read

GEMMA4, FUNCTIONGEMMA = TOOLS["gemma4"], TOOLS["functiongemma"]
START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
SCHEMA = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "either": {"type": ["integer", "string"]},
    "list": {"type": "array"},
}
DECLARED = Declared(
    [
        ChatCompletionToolsParam.model_validate(
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMA}}}
        )
    ]
)


def gemma(text: str, row: str = "gemma4") -> Said:
    """What a text says, at once and character by character. `~` is a delimiter."""
    text = text.replace("~", QUOTE)
    scanner = MessageScanner(tools=TOOLS[row])
    whole = read(scanner, [text], declared=DECLARED)[0]
    assert read(scanner, list(text), declared=DECLARED)[0] == whole
    return whole


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ("call:f{}", [("f", "{}")]),
        ('call:f{text:~a "b" \\ \n~,number:5}', [("f", '{"text": "a \\"b\\" \\\\ \\n", "number": 5}')]),
        (
            "call:g{a:[1,~x~,{b:true,~c:d~:null}],e:-1.5}",
            [("g", '{"a": [1, "x", {"b": true, "c:d": null}], "e": -1.5}')],
        ),
        ("call:g{a:~<tool_call|>}~}", [("g", '{"a": "<tool_call|>}"}')]),
        ("call:a.b-c{a : ~x~ , b : [ ] , c : { } }", [("a.b-c", '{"a": "x", "b": [], "c": {}}')]),
        (":f{number:1}", [("f", '{"number": 1}')]),
        ("f{number:1}", [("f", '{"number": 1}')]),
        ("call:f(number:1,text:~)~)", [("f", '{"number": 1, "text": ")"}')]),
        ("call:f{number:1}call:g{}", [("f", '{"number": 1}'), ("g", "{}")]),
        ("call:f{text:Paris,number:~5~}", [("f", '{"text": "Paris", "number": "5"}')]),
        ("call:f{text:5,either:5,number:x}", [("f", '{"text": "5", "either": 5, "number": "x"}')]),
    ],
)
def test_a_call_is_read_and_its_arguments_become_json(body: str, calls: list[tuple[str, str]]) -> None:
    assert gemma(f"One.{START}{body}{END}") == Said("", "One.", calls)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"{START}call:f{{text:~a{END}", Said("", "", [("f", f'{{"text": "a{END}')])),
        (f"{START}call:f{{list:[1{END} two", Said("", " two", [("f", '{"list": [1]}')])),
        (f"{START}call:f{{number:{END}", Said("", "", [("f", '{"number": null}')])),
        (f"{START}call:f{{{END}{START}call:g{{num{END}", Said("", "", [("f", "{}"), ("g", "{}")])),
        (f"{START}call:f{{list:[1}},number:2}}{END}", Said("", "", [("f", '{"list": [1], "number": 2}')])),
        (
            f"{START}call:f{{number:,list:[,1 ~x~,]}}{END}",
            Said("", "", [("f", '{"number": null, "list": ["1 <|\\"|>x<|\\"|>"]}')]),
        ),
        (f"{START}call:f{{number:1)}}}}{END}", Said("", "", [("f", '{"number": "1)"}')])),
        (f"{START}call:f{{number;list:[]}}{END}", Said("", "", [("f", '{"number;list": []}')])),
        (f"{START}f text{END}", Said("", "", [])),
        (f"One{END} two", Said("", "One two", [])),
        (f"{START}call:f{{number:12", Said("", "", [("f", '{"number": 12')])),
        (f"{START}call:f{{either:tr", Said("", "", [("f", '{"either": ')])),
        (f"{START}call:f{{text:~a<|", Said("", "", [("f", '{"text": "a<|')])),
        (f"{START}call:f{{text:~a~,num", Said("", "", [("f", '{"text": "a"')])),
    ],
)
def test_a_malformed_call_is_read_as_far_as_it_goes(text: str, right: Said) -> None:
    assert gemma(text) == right


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("number:<escape>5<escape>", '{"number": 5}'),
        ("text:<escape>5<escape>", '{"text": "5"}'),
        ('list:<escape>[1, "x"]<escape>,other:<escape>true<escape>', '{"list": [1, "x"], "other": true}'),
        ("number:<escape>five<escape>,either:<escape>5<escape>", '{"number": "five", "either": 5}'),
        ("number:5,text:five", '{"number": 5, "text": "five"}'),
    ],
)
def test_what_stands_between_delimiters_may_be_of_the_declared_type(value: str, right: str) -> None:
    text = f"<start_function_call>call:f{{{value}}}<end_function_call>"
    assert gemma(text, "functiongemma") == Said("", "", [("f", right)])


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("list:<escape>[1, ", '{"list": [1,'),
        ("text:<escape>fi", '{"text": "fi'),
        ("either:<escape>fi", '{"either": "fi'),
    ],
)
def test_a_value_that_is_cut_is_passed_on_as_far_as_it_was_written(value: str, right: str) -> None:
    assert gemma(f"<start_function_call>call:f{{{value}", "functiongemma").calls == [("f", right)]


def test_what_is_too_long_or_too_deep_is_text() -> None:
    long = "9" * (WINDOW + 1)
    assert gemma(f"{START}call:f{{number:{long}}}{END}").calls == [("f", f'{{"number": "{long}"}}')]
    assert gemma(f"{START}call:f{{{'k' * WINDOW}:1,number:2}}{END}").calls == [("f", '{"number": 2}')]
    text = f"{START}call:f{{list:{'[' * MAX_DEPTH}{END}"
    assert gemma(text).calls == [("f", f'{{"list": {"[" * (MAX_DEPTH - 1)}"["{"]" * (MAX_DEPTH - 1)}}}')]
    for length in (MAX_KEPT, MAX_KEPT + 1):
        digits = "0" * (length - 1) + "5"
        text = f"<start_function_call>call:f{{number:<escape>{digits}<escape>}}<end_function_call>"
        ((_, arguments),) = read(
            MessageScanner(tools=FUNCTIONGEMMA), pieces_of(text, range(0, 1 << 17, 4096)), declared=DECLARED
        )[0].calls
        assert json.loads(arguments) == {"number": digits}


TEXT = st.text(max_size=20).filter(lambda text: QUOTE not in text) | st.sampled_from(
    ["", "}", '"', "\\", "<|", END, "é👩‍👧"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 300), max_size=12)


def written(value: object) -> str:
    """A value as Gemma writes it."""
    match value:
        case str():
            return f"{QUOTE}{value}{QUOTE}"
        case list():
            return f"[{','.join(map(written, value))}]"
        case dict():
            return f"{{{','.join(f'{written(key)}:{written(inner)}' for key, inner in value.items())}}}"
        case _:
            return json.dumps(value)


@settings(deadline=None)
@given(arguments=st.dictionaries(st.from_regex("[a-z_]{1,12}", fullmatch=True), VALUES, max_size=4), cuts=CUTS)
def test_any_arguments_come_through_in_any_pieces(arguments: dict[str, Any], cuts: list[int]) -> None:
    body = ",".join(f"{key}:{written(value)}" for key, value in arguments.items())
    text = f"{START}call:g{{{body}}}{END}"
    ((name, given),) = read(MessageScanner(tools=GEMMA4), pieces_of(text, cuts), declared=DECLARED)[0].calls
    assert (name, json.dumps(json.loads(given))) == ("g", json.dumps(arguments))


SOUP = st.lists(
    st.sampled_from(
        [
            *("call:", "f", "g{", "call:f{", "number:", "text:", "list:", "k", ":", ",", "{", "}", "[", "]", "(", ")"),
            *(START, END, QUOTE, "<", "<|", "<tool_call", " ", "\n", "5", "1.", "true", "tr", "é👩‍👧", "x" * WINDOW),
            *("<start_function_call>", "<end_function_call>", "<escape>", "<esc", "stop"),
        ]
    ),
    max_size=24,
)
ROW = st.sampled_from(["gemma4", "functiongemma"])


@settings(deadline=None)
@given(parts=SOUP, cuts=CUTS, row=ROW)
def test_any_pieces_of_the_same_text_say_the_same(parts: list[str], cuts: list[int], row: str) -> None:
    scanner = MessageScanner(tools=TOOLS[row], stop=("stop",))
    text = "".join(parts)
    whole = read(scanner, [text], declared=DECLARED)[0]
    assert read(scanner, pieces_of(text, cuts), declared=DECLARED)[0] == whole
    assert read(scanner, list(text), declared=DECLARED)[0] == whole


@settings(deadline=None)
@given(
    section=st.builds(
        GemmaSection,
        at=st.sampled_from(["head", "key", "value", "string", "text", "after"]),
        within=st.text("{[(", max_size=4),
        begun=st.booleans(),
        name=st.sampled_from(["", "f"]),
        key=st.sampled_from(["", "number"]),
        kept=st.none() | st.just("5"),
    ),
    parts=SOUP,
    row=ROW,
)
def test_any_state_is_answered(section: GemmaSection, parts: list[str], row: str) -> None:
    state = ScanState(phase="call", section=section, calls=1)
    scanner = MessageScanner(tools=TOOLS[row])
    for part in parts:
        scanner.feed(state, part, Found(), DECLARED)
    scanner.finish(state, Found(), DECLARED)


@pytest.mark.parametrize("bulk", ["x", "[", "{", "k:", "k:{", "1,", QUOTE, "<|", "call:", "call:f{", "f{}", " ", END])
@pytest.mark.parametrize("start", ["", START, f"{START}call:f{{text:{QUOTE}", f"{START}call:f{{list:["])
def test_the_state_stays_small_and_the_time_linear(start: str, bulk: str) -> None:
    scanner = MessageScanner(tools=GEMMA4)

    def feed(count: int, piece: str) -> None:
        state = ScanState()
        scanner.feed(state, start, Found(), DECLARED)
        for _ in range(count):
            scanner.feed(state, piece, Found(), DECLARED)
            assert len(msgspec.json.encode(state)) < 1000

    assert linear(lambda count: feed(count, bulk), 1000)
    assert linear(lambda count: feed(1, bulk * count), 5_000)
