"""The scanners: what an output's text says, whatever the pieces it comes in."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.derender.formats import REASONING, TOOLS, Found, MessageScanner, ScanState
from headrace.workers.derender.formats.content import MAX_BLANK
from headrace.workers.derender.formats.json_section import MAX_KEPT, MAX_NAME
from headrace.workers.derender.formats.markers import Hit, Markers
from headrace.workers.derender.formats.message import Phase
from tests.unit.scanned import Said, linear, pieces_of, read, said

QWEN3, DEEPSEEK, HERMES = REASONING["qwen3"], REASONING["deepseek_r1"], TOOLS["hermes"]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "start", "hit"),
    [
        ("one <b> two", 0, Hit(4, 7, whole=True)),
        ("one <b> two <abc>", 7, Hit(12, 17, whole=True)),
        ("one <a", 0, Hit(4, 6, whole=False)),
        ("one <", 0, Hit(4, 5, whole=False)),
        ("one <x", 0, None),
        ("<<b>", 0, Hit(1, 4, whole=True)),
        ("<ab", 0, Hit(0, 3, whole=False)),
    ],
)
def test_the_first_marker_is_found_or_what_may_become_one(text: str, start: int, hit: Hit | None) -> None:
    assert Markers(["<b>", "<abc>"]).find(text, start) == hit


def test_of_markers_that_overlap_the_one_that_is_complete_first_counts() -> None:
    assert Markers(["stop", "st"]).find("a stop") == Hit(2, 4, whole=True)
    assert Markers(["abcd", "bc"]).find("abcd") == Hit(1, 3, whole=True)
    assert Markers(["abc", "bc"]).find("abcd") == Hit(0, 3, whole=True)
    assert Markers(["abcdefg", "bcd", "f"]).find("abcdefg") == Hit(1, 4, whole=True)
    assert Markers(["abcde", "bcd", "cd", "c"]).find("abcde") == Hit(2, 3, whole=True)


def test_one_character_is_marker_enough() -> None:
    assert Markers(["|"]).find("a|b") == Hit(1, 2, whole=True)
    assert Markers(["|"]).find("ab") is None


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>why</think>so", Said("why", "so", [])),
        ("why</think>so", Said("why", "so", [])),
        ("never closed", Said("never closed", "", [])),
        ("<think>one</think>a<think>two</think>b", Said("onetwo", "ab", [])),
        ("why</thi", Said("why</thi", "", [])),
        ("why</think>so</think>there", Said("why", "sothere", [])),
        ("<think></think>", Said("", "", [])),
    ],
)
def test_reasoning_is_what_stands_between_its_markers(text: str, right: Said) -> None:
    assert said(text, "reasoning", reasoning=QWEN3) == right
    assert said(text, "reasoning", reasoning=DEEPSEEK, tools=HERMES) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (call("f", "{}"), Said("", "", [("f", "{}")])),
        (f"Look: {call('f', '{}')} done", Said("", "Look: ", [("f", "{}")])),
        (f"\n\n{call('f', '{}')}\n", Said("", "", [("f", "{}")])),
        (f"{call('f', '{}')}\n{call('g', '[1]')}", Said("", "", [("f", "{}"), ("g", "[1]")])),
        (call("f", '{"a": "</tool_call>"}'), Said("", "", [("f", '{"a": "</tool_call>"}')])),
        (call("f", r'{"a": "\"}\\"}'), Said("", "", [("f", r'{"a": "\"}\\"}')])),
        (call("f", '{"a": [{"b": "]"}]}'), Said("", "", [("f", '{"a": [{"b": "]"}]}')])),
        (call("f", "3"), Said("", "", [("f", "3")])),
        (call("f", '"text"'), Said("", "", [("f", '"text"')])),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', Said("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', Said("", "", [("f", '{"a": 1}')])),
        ('<tool_call>{"id": [1, {"name": "x"}], "name": "f"}</tool_call>', Said("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>', Said("", "", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}, "arguments": {"a": 1}}</tool_call>', Said("", "", [("f", "{}")])),
        (r'<tool_call>{"name": "f\u00fc"}</tool_call>', Said("", "", [("fü", "{}")])),
    ],
)
def test_calls_are_read_and_their_arguments_passed_on_as_written(text: str, right: Said) -> None:
    assert said(text, tools=HERMES) == right


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name" "f" "arguments" {"a" 1}}</tool_call>', [("f", '{"a" 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": so {"a": 1}}</tool_call>', [("f", 'so {"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": }</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f"</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", 3}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"name": 7}</tool_call>', []),
        ('<tool_call>{"name": "f\\q"}</tool_call>', []),
        ('<tool_call>{"arguments": {}}</tool_call>', []),
        ("<tool_call>get_weather()</tool_call>", []),
        ("<tool_call></tool_call>", []),
        (f'<tool_call>{{"name": "{"f" * MAX_NAME}"}}</tool_call>', []),
        (f'<tool_call>{{"{"k" * MAX_NAME}": 1, "name": "f"}}</tool_call>', [("f", "{}")]),
    ],
)
def test_a_malformed_call_is_read_as_far_as_it_goes_and_never_becomes_content(
    text: str, calls: list[tuple[str, str]]
) -> None:
    after = call("g", "{}")
    assert said(f"Hi.{text} bye {after}", tools=HERMES) == Said("", "Hi.", [*calls, ("g", "{}")])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "tru', [("f", '{"a": "tru')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool', [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}', [("f", "{}")]),
        ('<tool_call>{"name": "f"', [("f", "")]),
        ('<tool_call>{"name": "f', []),
        ('<tool_call>{"arguments": {"a": 1}', []),
        ("<tool_call>", []),
    ],
)
def test_a_call_that_is_cut_keeps_what_was_written_of_it(text: str, calls: list[tuple[str, str]]) -> None:
    assert said(text, tools=HERMES) == Said("", "", calls)


def test_arguments_that_wait_too_long_for_their_name_are_given_up() -> None:
    long = f'{{"a": "{"x" * MAX_KEPT}"}}'
    assert said(f'<tool_call>{{"arguments": {long}, "name": "f"}}</tool_call>', tools=HERMES) == Said("", "", [])


def test_a_call_ends_the_reasoning_of_some_models_and_is_part_of_it_in_others() -> None:
    text = f"<think>hm {call('f', '{}')} on</think>so"
    assert said(text, "reasoning", reasoning=QWEN3, tools=HERMES) == Said("hm ", "", [("f", "{}")])
    assert said(text, "reasoning", reasoning=DEEPSEEK, tools=HERMES) == Said(f"hm {call('f', '{}')} on", "so", [])


def test_markup_is_text_where_no_format_asks_for_it() -> None:
    text = f"<think>hm</think>{call('f', '{}')}"
    assert said(text) == Said("", text, [])
    assert said(text, reasoning=QWEN3) == Said("hm", call("f", "{}"), [])
    assert said(text, tools=HERMES) == Said("", "<think>hm</think>", [("f", "{}")])


@pytest.mark.parametrize("length", [MAX_BLANK - 1, MAX_BLANK, MAX_BLANK + 1])
def test_leading_blanks_are_content_unless_a_call_follows_soon(length: int) -> None:
    blanks = "\n" * length
    assert said(blanks, tools=HERMES).content == blanks
    assert said(f"{blanks}x", tools=HERMES).content == f"{blanks}x"
    assert said(f"{blanks}{call('f', '{}')}", tools=HERMES).content == (blanks if length > MAX_BLANK else "")


@pytest.mark.parametrize(("include", "content"), [(False, "one "), (True, "one END")])
def test_content_ends_at_the_first_stop_string(include: bool, content: str) -> None:
    scanner = MessageScanner(QWEN3, HERMES, stop=("END", "one END two"), include_stop=include)
    text = f"<think>END of thought</think>one END {call('f', '{}')}"
    right, state = read(scanner, list(text), "reasoning")
    assert (right, state.stopped) == (Said("END of thought", content, []), "END")


def test_a_stop_string_that_does_not_come_is_given_out_at_the_end() -> None:
    scanner = MessageScanner(stop=("STOP!",))
    assert read(scanner, ["one ST", "OP"])[0].content == "one STOP"
    assert read(scanner, ["one STO", "RE"])[0].content == "one STORE"


PIECES = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": {"a": [1, "}"]}}',
            '{"arguments": {"b": "\\"<"}, "name": "g"}',
            '"',
            "\\",
            "{",
            "}",
            "<",
            "</t",
            " ",
            "\n\n",
            "word",
            "stop",
            "é你👩‍👧",
        ]
    ),
    max_size=14,
)
FORMATS = st.fixed_dictionaries(
    {
        "reasoning": st.sampled_from([None, QWEN3, DEEPSEEK]),
        "tools": st.sampled_from([None, HERMES]),
        "stop": st.sampled_from([(), ("stop",), ("word", "\n\nw", "}"), ("ordst", "word stop", "top w")]),
        "include_stop": st.booleans(),
    }
)


@given(pieces=PIECES, cuts=st.lists(st.integers(0, 200), max_size=12), formats=FORMATS, reasoning=st.booleans())
def test_any_pieces_of_the_same_text_say_the_same(
    pieces: list[str], cuts: list[int], formats: dict[str, Any], reasoning: bool
) -> None:
    text = "".join(pieces)
    scanner = MessageScanner(**formats)
    phase: Phase = "reasoning" if reasoning else "content"
    whole, end = read(scanner, [text], phase)
    cut, cut_end = read(scanner, pieces_of(text, cuts), phase)
    single, single_end = read(scanner, list(text), phase)
    assert whole == cut == single
    assert (end.stopped, end.calls) == (cut_end.stopped, cut_end.calls) == (single_end.stopped, single_end.calls)


@given(pieces=PIECES, formats=FORMATS)
def test_no_text_is_said_twice_or_made_up(pieces: list[str], formats: dict[str, Any]) -> None:
    text = "".join(pieces)
    found = said(text, **formats)
    for part in (*found.content.splitlines(), *found.reasoning.splitlines()):
        assert part in text or "<think>" in text or "</think>" in text
    written = [arguments for _, arguments in found.calls if arguments != "{}"]
    assert all(arguments in text for arguments in written)
    assert len(found.content) + len(found.reasoning) + sum(map(len, written)) <= len(text)


@given(argument=st.text(max_size=40), name=st.from_regex(r"[a-z_]{1,20}", fullmatch=True), between=st.text(max_size=10))
def test_any_arguments_come_through(argument: str, name: str, between: str) -> None:
    arguments = json.dumps({"a": argument, "b": [argument]}, ensure_ascii=False)
    found = said(f"{call(name, arguments)}{between.replace('<', '')}{call(name, '{}')}", tools=HERMES)
    assert found.calls == [(name, arguments), (name, "{}")]


@pytest.mark.parametrize("bulk", ['"x', "{", "<tool_call", "</tool", "<think>", " ", "\\", "[{", "<"])
@pytest.mark.parametrize("start", ["", '<tool_call>{"name": "f", "arguments": {"a": "'])
def test_the_state_stays_small_through_any_bulk_of_text(bulk: str, start: str) -> None:
    scanner = MessageScanner(QWEN3, HERMES, stop=("a stop string",))
    state = ScanState()
    scanner.feed(state, start, Found())
    for _ in range(4000):
        scanner.feed(state, bulk, Found())
        assert len(msgspec.json.encode(state)) < 1000


@pytest.mark.parametrize(
    "bulk",
    [
        "<think></think>",
        '<tool_call>{"name":"f"}</tool_call>',
        '<tool_call>{"name":"f","arguments":{"a":"</tool',
        '<tool_call>{"arguments":[',
        '<tool_call>{"name":"f","arguments":{',
        "<tool_cal",
        "</x<",
    ],
)
def test_the_time_to_read_a_text_grows_with_its_length_and_no_faster(bulk: str) -> None:
    scanner = MessageScanner(QWEN3, HERMES, stop=("</x>", "<tool"))

    def work(length: int) -> None:
        text = f"{bulk * (length // len(bulk))}<"
        read(scanner, [text], "reasoning")

    assert linear(work, 80_000)


def test_nothing_is_said_behind_a_stop_string_whatever_phase_its_piece_ended_in() -> None:
    scanner = MessageScanner(QWEN3, HERMES, stop=("word",))
    assert read(scanner, ["textword<think>f"])[0] == read(scanner, ["textword<think>", "f"])[0] == Said("", "text", [])
