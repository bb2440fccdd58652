"""Calls written in Python: what is a call, and what its literals are as JSON, in any pieces."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender.formats import NONE, REASONING, TOOLS, Declared, Found, MessageScanner, ScanState
from headrace.workers.derender.formats.bodies import PythonBody
from headrace.workers.derender.formats.python_call import PythonSection
from headrace.workers.derender.formats.python_json import MAX_DEPTH, MAX_KEPT, WINDOW
from tests.unit.scanned import Said, linear, pieces_of, read, said

ROWS = {row.name: row for row in TOOLS.values() if isinstance(row.body, PythonBody)}
PYTHONIC, LLAMA4, OLMO3, LFM2 = (ROWS[name] for name in ("pythonic", "llama4_pythonic", "olmo3", "lfm2"))
WRITTEN = {
    "pythonic": "[{}, {}]",
    "llama4_pythonic": "<|python_start|>[{}, {}]<|python_end|>",
    "olmo3": "<function_calls>{}\n{}</function_calls>",
    "lfm2": "<|tool_call_start|>[{}, {}]<|tool_call_end|>",
}
"""Two calls, as each format writes them."""


def tool(name: str, **properties: Any) -> ChatCompletionToolsParam:
    parameters = {"type": "object", "properties": properties}
    return ChatCompletionToolsParam.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


DECLARED = Declared(
    [
        tool("f", a={"type": "string"}, b={"type": "integer"}, c={"type": "object"}),
        tool("g"),
        tool("takes-object", a={"anyOf": [{"type": "object"}, {"type": "null"}]}),
    ]
)


def python(text: str, declared: Declared = DECLARED) -> Said:
    """What a text in the plainest of the formats says, at once and character by character."""
    scanner = MessageScanner(tools=PYTHONIC)
    whole = read(scanner, [text], declared=declared)[0]
    assert read(scanner, list(text), declared=declared)[0] == whole
    return whole


def value(literal: str) -> Any:
    """What the JSON says that a literal becomes."""
    ((name, arguments),) = python(f"[f(a={literal}, b=0)]").calls
    given = json.loads(arguments)
    assert (name, list(given), given["b"]) == ("f", ["a", "b"], 0)
    return given["a"]


def exactly(value: object) -> str:
    """A value as text that tells 1 from 1.0 and from true."""
    return json.dumps(value)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_reads_its_own_markup(name: str) -> None:
    text = WRITTEN[name].format("f(a='x', b=[1, -2.5])", "g()")
    calls = [("f", '{"a": "x", "b": [1, -2.5]}'), ("g", "{}")]
    for pieces in ([text], list(text), pieces_of(text, range(0, len(text), 4))):
        assert read(MessageScanner(tools=ROWS[name]), pieces, declared=DECLARED)[0] == Said("", "", calls)


@pytest.mark.parametrize(
    ("literal", "right"),
    [
        ("'x'", "x"),
        ('"it\'s"', "it's"),
        ("''", ""),
        ("'a' 'b'\n  r'\\c'", "ab\\c"),
        ("'a'\"b\"", "ab"),
        ("('a'\n 'b')", "ab"),
        ("'''a'b\n\"'''", "a'b\n\""),
        ('""""x" ""y"""', '"x" ""y'),
        ("''''x'''", "'x"),
        (r"r'\d\'+'", r"\d\'+"),
        ("u'x'", "x"),
        ("f'{x}'", "{x}"),
        ("Rb'x'", "x"),
        (r"'\x41\u00e9\U0001F600\101\0'", "A\u00e9\U0001f600A\0"),
        (r"'\N{BULLET}\N{no such name}'", "\u2022\\N{no such name}"),
        (r"'\ud83d\ude00'", "\U0001f600"),
        (r"'\a\b\f\v\q\xZ'", "\a\b\f\v\\q\\xZ"),
        ("'a\\\nb'", "ab"),
        ("'a\nb\tc'", "a\nb\tc"),
        ("0", 0),
        ("-1", -1),
        ("+ 1", 1),
        ("07", 7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("-0b11", -3),
        ("1.0", 1.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e3", 1e3),
        ("1_0.0_1E+2", 10.01e2),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("None", None),
        ("null", None),
        ("True", True),
        ("false", False),
        ("[]", []),
        ("[1, [2, [3]], ]", [1, [2, [3]]]),
        ("()", []),
        ("(1,)", [1]),
        ("(1)", 1),
        ("((1, 2), 'x')", [[1, 2], "x"]),
        ("{}", {}),
        ("{'a': {'b': {}}, \"c\": []}", {"a": {"b": {}}, "c": []}),
        ("{1: 'x', 1.50: 'y', None: 'z', True: 1}", {"1": "x", "1.5": "y", "null": "z", "true": 1}),
        ("{'a', 1}", ["a", 1]),
        ("{(1, 2)}", [[1, 2]]),
        ("{a: 1, 'b'=2}", {"a": 1, "b": 2}),
    ],
)
def test_a_literal_becomes_the_json_that_says_the_same(literal: str, right: object) -> None:
    assert exactly(value(literal)) == exactly(right)


@pytest.mark.parametrize(
    ("literal", "right"),
    [
        ("celsius", "celsius"),
        ("New York", "New York"),
        ("2024-01-15", "2024-01-15"),
        ("1 + 2", "1 + 2"),
        ("12:30", "12:30"),
        ("--1", "--1"),
        ("1j", "1j"),
        ("-inf", "-inf"),
        ("time.time()", "time.time()"),
        ("date(2024, 1, [')'])[0] or {}", "date(2024, 1, [')'])[0] or {}"),
        ("[x for x in y]", ["x for x in y"]),
        ("{'a': g(1, 2)}", {"a": "g(1, 2)"}),
        ("(a(1) + b)", ["a(1) + b"]),
        ("9" * (WINDOW + 1), "9" * (WINDOW + 1)),
    ],
)
def test_what_is_no_literal_is_passed_on_as_text(literal: str, right: object) -> None:
    assert value(literal) == right


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(a='x', b=1", [("f", '{"a": "x", "b": 1')]),
        ("[f(a='x')", [("f", '{"a": "x"}')]),
        ("[f(a:'x', b=1)]", [("f", '{"a": "x", "b": 1}')]),
        ("[f(a=x', b=1)]", [("f", '{"a": "x", "b": 1}')]),
        ("[f((a='x', b=1)]", [("f", '{"a": "x", "b": 1}')]),
        ("[f('a'='x', \"b\": 1)]", [("f", '{"a": "x", "b": 1}')]),
        ("[f(a='x'b=1)]", [("f", '{"a": "x\'b=1)]')]),
        ("[f(a=, b=)]", [("f", '{"a": null, "b": null}')]),
        ("[f(a=[1,, 2], c={'x', 'y'}, b={'z': })]", [("f", '{"a": [1, 2], "c": ["x", "y"], "b": {"z": null}}')]),
        ("[f(a=[1] b=2)]", [("f", '{"a": [1], "b": 2}')]),
        ("[f(a={'x': 1, b=2), g()]", [("f", '{"a": {"x": 1, "b": 2}}'), ("g", "{}")]),
        ("[f(a=[1, 2), g()]", [("f", '{"a": [1, 2]}'), ("g", "{}")]),
        ("[f(a=[1, 2}, b=3)]", [("f", '{"a": [1, 2], "b": 3}')]),
        ("[f(a=1}, b=3)]", [("f", '{"a": 1, "b": 3}')]),
        ("[f(a=1]", [("f", '{"a": 1}')]),
        ("[f(a=1)); g(), , g()]", [("f", '{"a": 1}'), ("g", "{}"), ("g", "{}")]),
        ("[f(a='sed -n '1,9p' x', b=1)]", [("f", '{"a": "sed -n \'1,9p\' x", "b": 1}')]),
        ("[f(a='say 'hi'', b=1)]", [("f", '{"a": "say \'hi\'", "b": 1}')]),
        ("[f(from=1, b=2)]", [("f", '{"from": 1, "b": 2}')]),
        ("[f(a=1, a=2)]", [("f", '{"a": 1, "a": 2}')]),
        ("[f(a=1) and then", [("f", '{"a": 1}')]),
    ],
)
def test_a_malformed_call_is_read_as_far_as_it_goes(text: str, calls: list[tuple[str, str]]) -> None:
    assert python(text) == Said("", "", calls)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("'x', 2", {"a": "x", "b": 2}),
        ("'x', b=2", {"a": "x", "b": 2}),
        ("1, 2, {'x': 3}, 4", {"a": 1, "b": 2, "c": {"x": 3}, "3": 4}),
        ("{'a': 'x', 'b': 2}", {"a": "x", "b": 2}),
        ("**{'a': 'x'}, b=2", {"a": "x", "b": 2}),
        ("**{}, b=2", {"b": 2}),
        ("x, *y", {"a": "x", "b": "*y"}),
    ],
)
def test_arguments_without_a_name_are_the_parameters_in_the_order_of_the_schema(arguments: str, right: object) -> None:
    ((_, given),) = python(f"[f({arguments})]").calls
    assert exactly(json.loads(given)) == exactly(right)


def test_a_dictionary_is_an_argument_where_an_object_is_declared_and_else_all_of_them() -> None:
    assert python("[takes-object({'b': 1})]").calls == [("takes-object", '{"a": {"b": 1}}')]
    assert python("[g({'b': 1})]").calls == [("g", '{"b": 1}')]
    assert python("[g(1, 2)]").calls == [("g", '{"0": 1, "1": 2}')]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("[g()]", "", ["g"]),
        ("\n [g()]", "", ["g"]),
        ("One. [g()]", "One. ", ["g"]),
        ("One. [f(x)] two", "One. ", ["f"]),
        ("[g()] one [f(a=1)] two", "", ["g", "f"]),
        ("[unknown()]", "", ["unknown"]),
        ("[unknown(a=1), other(2)]", "", ["unknown", "other"]),
        ("[a.b(a=1)]", "", ["a.b"]),
        ("[unknown(x)]", "[unknown(x)]", []),
        ("One. [unknown(a=1)]", "One. [unknown(a=1)]", []),
        ("[1, 2] [x] [] [g] {[", "[1, 2] [x] [] [g] {[", []),
        ("[see [g()]]", "[see ", ["g"]),
        ("[[g()]]", "[", ["g"]),
        ("[ge", "[ge", []),
        ("[ h ( ", "[ h ( ", []),
        ("[", "[", []),
        (f"[{'g' * (WINDOW + 1)}()]", f"[{'g' * (WINDOW + 1)}()]", []),
    ],
)
def test_a_bracket_is_content_unless_a_call_follows_it(text: str, content: str, names: list[str]) -> None:
    found = python(text)
    assert (found.content, [name for name, _ in found.calls]) == (content, names)


def test_a_bracket_in_reasoning_is_part_of_the_thought_and_a_marker_ends_it() -> None:
    text = "<think>[g()]<|python_start|>[g()]</think>so"
    assert said(text, "reasoning", DECLARED, reasoning=REASONING["qwen3"], tools=PYTHONIC) == Said(
        "[g()]<|python_start|>[g()]", "so", []
    )
    assert said(text, "reasoning", DECLARED, reasoning=REASONING["qwen3"], tools=LLAMA4) == Said(
        "[g()]", "", [("g", "{}")]
    )


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("llama4_pythonic", "One. <|python_start|>print(1)<|python_end|> two", Said("", "One. print(1) two", [])),
        ("llama4_pythonic", "<|python_start|>g()<|python_end|>", Said("", "", [("g", "{}")])),
        ("llama4_pythonic", "[g()]<|python_end|>", Said("", "", [("g", "{}")])),
        ("llama4_pythonic", "<|python_start|>[h('<|python_end|>')", Said("", "", [("h", '{"0": "<|python_end|>"}')])),
        (
            "llama4_pythonic",
            "<|python_start|>[f(a=[1<|python_end|>[g()]",
            Said("", "", [("f", '{"a": [1]}'), ("g", "{}")]),
        ),
        (
            "olmo3",
            "<function_calls>\n# two\n[g(),\nh(1)]</function_calls>",
            Said("", "", [("g", "{}"), ("h", '{"0": 1}')]),
        ),
        ("olmo3", "One</function_calls> two", Said("", "One two", [])),
        ("olmo3", "<function_calls>nothing</function_calls>", Said("", "", [])),
        ("lfm2", "One<|tool_call_start|>[g()] <|tool_call_end|>\ntwo", Said("", "One\ntwo", [("g", "{}")])),
        ("lfm2", "<|tool_call_start|>[g()] two<|tool_call_end|>", Said("", "two", [("g", "{}")])),
        ("lfm2", "<|tool_call_start|>[g(), ?, h()]<|tool_call_end|>", Said("", "", [("g", "{}"), ("h", "{}")])),
    ],
)
def test_markers_are_never_content(name: str, text: str, right: Said) -> None:
    for pieces in ([text], list(text)):
        assert read(MessageScanner(tools=ROWS[name]), pieces, declared=DECLARED)[0] == right


def test_containers_that_are_too_deep_are_text() -> None:
    depth = MAX_DEPTH + 20
    inner = value("[" * depth + "1, 'x'" + "]" * depth)
    for _ in range(MAX_DEPTH - 1):
        (inner,) = inner
    assert inner == "[" * 21 + "1, 'x'" + "]" * 21


@pytest.mark.parametrize("length", [MAX_KEPT - 2, MAX_KEPT - 1, MAX_KEPT, MAX_KEPT + 1])
def test_a_first_element_that_is_long_is_a_key_or_one_of_several(length: int) -> None:
    long, kept = "x" * length, length + 2 <= MAX_KEPT
    for literal, right in (
        (f"{{'{long}': 1, 'b': 2}}", {long: 1, "b": 2}),
        (f"('{long}', 1)", [long, 1]),
        (f"('{long}')", long if kept else [long]),
        (f"{{'{long}', 'b'}}", [long, "b"] if kept else {long: None, "b": None}),
    ):
        text = f"[f(a={literal})]"
        for pieces in ([text], pieces_of(text, range(0, len(text), 1000))):
            ((_, arguments),) = read(MessageScanner(tools=PYTHONIC), pieces, declared=DECLARED)[0].calls
            assert json.loads(arguments) == {"a": right}


TEXT = st.text(max_size=20) | st.sampled_from(["", "'", '"', "\\", 'it\'s "so"', "\n", "])", "<|python_end|>", "é👩‍👧"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXT | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,11}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)
CUTS = st.lists(st.integers(0, 300), max_size=12)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@settings(deadline=None)
@given(arguments=ARGUMENTS, others=ARGUMENTS, row=st.sampled_from(sorted(ROWS)), cuts=CUTS)
def test_any_arguments_come_through_in_any_pieces(
    arguments: dict[str, Any], others: dict[str, Any], row: str, cuts: list[int]
) -> None:
    text = WRITTEN[row].format(call("f", arguments), call("g", others))
    found, _ = read(MessageScanner(tools=ROWS[row]), pieces_of(text, cuts), declared=DECLARED)
    assert found.content == ""
    assert [name for name, _ in found.calls] == ["f", "g"]
    assert [exactly(json.loads(given)) for _, given in found.calls] == [exactly(arguments), exactly(others)]


@settings(deadline=None)
@given(arguments=ARGUMENTS, length=st.integers(0, 200))
def test_a_call_that_is_cut_says_what_the_whole_one_begins_with(arguments: dict[str, Any], length: int) -> None:
    text = f"[{call('f', arguments)}]"
    ((_, whole),) = python(text).calls
    found = python(text[:length])
    assert found.calls == [] or whole.startswith(found.calls[0][1])
    assert found.content == ("" if found.calls else text[:length])


FRAGMENTS = [
    "a",
    "é",
    " ",
    "\\n",
    "\\'",
    '\\"',
    "\\\\",
    "\\x4",
    "\\x41",
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\10",
    "\\N{DASH}",
]


@settings(deadline=None)
@given(
    body=st.lists(
        st.sampled_from([*FRAGMENTS, "\\N{BULLET}", "\\", "\\\n", "\\d", "1", "{", "]", ",", "'", '"']), max_size=8
    ),
    quote=st.sampled_from(["'", '"', "'''", '"""']),
    prefix=st.sampled_from(["", "r", "u", "R"]),
)
def test_a_string_says_what_python_says_it_does(body: list[str], quote: str, prefix: str) -> None:
    literal = f"{prefix}{quote}{''.join(body)}{quote}"
    with warnings.catch_warnings(action="ignore"):
        try:
            right = ast.literal_eval(literal)
            if prefix.lower() != "r" or "\\" not in literal:
                right = right.encode("utf-16", "surrogatepass").decode("utf-16")
        except (SyntaxError, ValueError):
            assume(False)
    assert value(literal) == right


SOUP = st.lists(
    st.sampled_from(
        [
            *(
                "[",
                "]",
                "(",
                ")",
                "{",
                "}",
                ",",
                ":",
                "=",
                ";",
                "'",
                '"',
                "'''",
                '"""',
                "\\",
                " ",
                "\n",
                "**",
                ".",
                "-",
            ),
            *("f", "g()", "f(a=", "[f(", "b=1", "12", "0x", "1.", "None", "Tru", "x", "r'", "é👩‍👧", "\\u00", "\\N{"),
            *("<", "<|python_start|>", "<|python_end|>", "<function_calls>", "</function_calls>", "</func"),
            *("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>", "x" * WINDOW, "' " * 20, "stop"),
        ]
    ),
    max_size=24,
)


@settings(deadline=None)
@given(parts=SOUP, cuts=CUTS, row=st.sampled_from(sorted(ROWS)), reasoning=st.sampled_from([None, "qwen3"]))
def test_any_pieces_of_the_same_text_say_the_same(
    parts: list[str], cuts: list[int], row: str, reasoning: str | None
) -> None:
    text = "".join(parts)
    scanner = MessageScanner(REASONING[reasoning] if reasoning else None, ROWS[row], stop=("stop",))
    whole = read(scanner, [text], declared=DECLARED)[0]
    assert read(scanner, pieces_of(text, cuts), declared=DECLARED)[0] == whole
    assert read(scanner, list(text), declared=DECLARED)[0] == whole


@settings(deadline=None)
@given(parts=SOUP, row=st.sampled_from(sorted(ROWS)))
def test_what_a_call_says_is_json_or_the_start_of_it(parts: list[str], row: str) -> None:
    for _, arguments in said("[f(" + "".join(parts) + ")]", tools=ROWS[row], declared=DECLARED).calls:
        assert begins_json(arguments), arguments


def begins_json(text: str) -> bool:
    """Whether nothing is wrong with the text but that it may stop too early."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos == len(text) or error.msg.startswith("Unterminated string")
    return True


STATES = st.builds(
    PythonSection,
    at=st.sampled_from(["argument", "key", "colon", "value", "string", "joint", "text", "after"]),
    within=st.text("fkdlst{(", max_size=6),
    begun=st.booleans(),
    kept=st.text('"1x', max_size=6),
    quote=st.sampled_from(["", "'", '"', "'''", '"""']),
    verbatim=st.booleans(),
    keyed=st.booleans(),
    placed=st.integers(0, 3),
    depth=st.integers(0, 2),
    done=st.booleans(),
    stage=st.sampled_from(["open", "between", "closed"]),
    marked=st.booleans(),
)


@settings(deadline=None)
@given(section=STATES, calls=st.integers(0, 2), parts=SOUP, row=st.sampled_from(sorted(ROWS)))
def test_any_state_is_answered(section: PythonSection, calls: int, parts: list[str], row: str) -> None:
    state = ScanState(phase="call", section=section, calls=calls)
    scanner = MessageScanner(tools=ROWS[row])
    for part in parts:
        scanner.feed(state, part, Found(), DECLARED)
    scanner.finish(state, Found(), DECLARED)


@pytest.mark.parametrize(
    "bulk", ["x", "' ", "'x ", "[", "{", "((", "[f(", "\\", "\\N{", "f(a=1),", " ", "1", "<", "(x,"]
)
@pytest.mark.parametrize("start", ["", "[f(a=", "[f(a='", "[f(a=x(", "[f(a={", "[f(", "<|python_start|>["])
def test_the_state_stays_small_through_any_bulk_of_text(start: str, bulk: str) -> None:
    scanner = MessageScanner(tools=LLAMA4)
    state = ScanState()
    scanner.feed(state, start, Found(), DECLARED)
    for _ in range(1000):
        scanner.feed(state, bulk, Found(), DECLARED)
        kept = state.section.kept if isinstance(state.section, PythonSection) else ""
        assert len(msgspec.json.encode(state)) < 1000 + 2 * len(kept)


@pytest.mark.parametrize(
    "bulk",
    [
        "[f(a=1)]",
        "[f(a='",
        "[f(a=x(",
        "[f(",
        "[f",
        "[ ",
        "' ",
        "{'x': [(",
        "\\N{",
        "<|python_end|",
        "<|python_start|>[g()]",
        "<|python_start|>g ",
        "x='y',",
    ],
)
@pytest.mark.parametrize("single", [False, True])
def test_the_time_to_read_a_text_grows_with_its_length_and_no_faster(bulk: str, single: bool) -> None:
    scanner = MessageScanner(tools=LLAMA4)

    def work(length: int) -> None:
        text = f"<|python_start|>[f(a={bulk * (length // len(bulk))}"
        read_all(scanner, list(text) if single else [text])

    assert linear(work, 12_000)


def read_all(scanner: MessageScanner, pieces: list[str]) -> None:
    state = ScanState()
    for piece in pieces:
        scanner.feed(state, piece, Found(), DECLARED)
    scanner.finish(state, Found(), DECLARED)


def test_without_tools_nothing_is_a_call() -> None:
    assert said("[f(a=1)]", declared=NONE) == Said("", "[f(a=1)]", [])
