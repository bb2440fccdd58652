"""Calls written as tags: what is read of them, in every format, whatever the pieces they come in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.protocol import DerenderChatRequest
from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender import Derenderer
from headrace.workers.derender.formats import REASONING, TOOLS, Declared, Found, MessageScanner, ScanState
from headrace.workers.derender.formats.xml_call import MAX_BLANK, MAX_KEPT, MAX_NAME, At, XmlSection
from tests.unit import scanned
from tests.unit.derender_tokenizer import byte_level
from tests.unit.scanned import Said, linear, pieces_of

FORMATS = sorted({row.name for row in TOOLS.values() if type(row.body).__name__ == "XmlBody"})


def function(name: str, properties: dict[str, Any], **more: Any) -> ChatCompletionToolsParam:
    parameters = {"type": "object", "properties": properties, **more}
    return ChatCompletionToolsParam.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


DECLARED = Declared(
    [
        function(
            "f",
            {
                "text": {"type": "string"},
                "number": {"type": "integer"},
                "list": {"type": "array"},
                "maybe": {"type": ["string", "null"]},
                "any": {"type": "any"},
                "model": {"anyOf": [{"$ref": "#/$defs/Model"}, {"type": "null"}]},
            },
            **{"$defs": {"Model": {"type": "object"}}},
        )
    ]
)


def read(scanner: MessageScanner, pieces: Sequence[str]) -> tuple[Said, ScanState]:
    return scanned.read(scanner, pieces, declared=DECLARED)


def said(name: str, text: str) -> Said:
    return scanned.said(text, declared=DECLARED, tools=TOOLS[name])


def calls(name: str, text: str) -> list[tuple[str, str]]:
    return said(name, text).calls


class Markup(NamedTuple):
    """How a format writes a section, a call in it and a parameter of that."""

    section: str
    call: str
    parameter: str

    def write(self, *written: tuple[str, dict[str, str]]) -> str:
        calls = (self.call.replace("NAME", name).replace("BODY", self._body(given)) for name, given in written)
        return self.section.replace("CALLS", "\n".join(calls))

    def _body(self, given: dict[str, str]) -> str:
        return "".join(self.parameter.replace("KEY", key).replace("VALUE", value) for key, value in given.items())


QWEN = Markup(
    "CALLS",
    "<tool_call>\n<function=NAME>\nBODY</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
)
GLM = Markup("CALLS", "<tool_call>NAME\nBODY</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
INVOKE = Markup(
    "<minimax:tool_call>\nCALLS\n</minimax:tool_call>",
    '<invoke name="NAME">\nBODY</invoke>',
    '<parameter name="KEY">VALUE</parameter>\n',
)
DSML = Markup(
    "<｜DSML｜function_calls>\nCALLS\n</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="NAME">\nBODY</｜DSML｜invoke>',
    '<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n',
)


def renamed(markup: Markup, *pairs: tuple[str, str]) -> Markup:
    parts = list(markup)
    for old, new in pairs:
        parts = [part.replace(old, new) for part in parts]
    return Markup(*parts)


MARKUPS = {
    "qwen3_coder": QWEN,
    "mimo": renamed(QWEN, (">\nVALUE\n<", ">VALUE<")),
    "seed_oss": renamed(QWEN, ("tool_call>", "seed:tool_call>")),
    "glm45": GLM,
    "poolside_v1": GLM,
    "hy_v3": renamed(GLM, ("CALLS", "<tool_calls>CALLS</tool_calls>"), ("NAME\n", "NAME<tool_sep>\n")),
    "hy_v4": renamed(GLM, ("CALLS", "<tool_calls>CALLS</tool_calls>")),
    "k2_horizon": Markup(
        "<ifm|tool_calls>\nCALLS</ifm|tool_calls>",
        "<ifm|tool_call>NAME\nBODY</ifm|tool_call>",
        "<ifm|arg_key>KEY</ifm|arg_key><ifm|arg_type>string</ifm|arg_type><ifm|arg_value>VALUE</ifm|arg_value>",
    ),
    "minimax_m2": INVOKE,
    "minicpm5": Markup("CALLS", '<function name="NAME">BODY</function>', '<param name="KEY"><![CDATA[VALUE]]></param>'),
    "muse_glimmer": renamed(
        INVOKE, ("minimax:tool_call", "atem:function_calls"), ("invoke", "atem:invoke"), ("parameter", "atem:parameter")
    ),
    "kimi_k3": Markup(
        "<|open|>tools<|sep|>CALLS<|close|>tools<|sep|>",
        '<|open|>call tool="NAME" index="1"<|sep|>BODY<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>',
    ),
    "dots": renamed(INVOKE, ("minimax:tool_call", "dots_function_call")),
    "deepseek_v32": DSML,
    "deepseek_v4": renamed(DSML, ("function_calls", "tool_calls")),
    "deepseek_v41": renamed(DSML, ("function_calls", "calls"), ("｜DSML｜", "｜DSML｜ ")),
    "step3": Markup(
        "<｜tool_calls_begin｜>CALLS<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="NAME">BODY</steptml:invoke><｜tool_call_end｜>',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
    ),
}


def test_every_format_of_tags_is_tested_here() -> None:
    assert sorted(MARKUPS) == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_every_format(name: str) -> None:
    text = MARKUPS[name].write(
        ("f", {"text": 'Zürich <b> & "q" \\ \n\ttab', "number": "5", "list": '["a", 1]'}), ("g", {}), ("h", {"k": "1"})
    )
    assert said(name, f"Look: {text}") == Said(
        "",
        "Look: ",
        [
            ("f", r'{"text": "Zürich <b> & \"q\" \\ \n\ttab", "number": 5, "list": ["a", 1]}'),
            ("g", "{}"),
            ("h", '{"k": "1"}'),
        ],
    )


VALUES = st.text(max_size=30).map(lambda text: text.replace("<", "").replace("]", ""))


@pytest.mark.parametrize("name", FORMATS)
@given(value=VALUES, other=VALUES, cuts=st.lists(st.integers(0, 400), max_size=10))
def test_any_string_comes_through_whatever_the_pieces(name: str, value: str, other: str, cuts: list[int]) -> None:
    text = MARKUPS[name].write(("f", {"text": value}), ("unknown", {"key": other}))
    scanner = MessageScanner(tools=TOOLS[name])
    got, _ = read(scanner, pieces_of(text, cuts))
    assert [(call, json.loads(arguments)) for call, arguments in got.calls] == [
        ("f", {"text": value}),
        ("unknown", {"key": other}),
    ]


PIECES = st.lists(
    st.sampled_from(
        [
            "f",
            "text",
            "number",
            "list",
            "any",
            "5",
            '["a", {}]',
            "\n",
            "\n\n",
            " ",
            " " * MAX_BLANK,
            ">",
            '"',
            "'",
            "<",
            "</",
            "word",
            "é你👩‍👧",
            "n" * MAX_NAME,
            "<think>",
        ]
    ),
    max_size=4,
)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_pieces_of_the_same_text_say_the_same(name: str, data: st.DataObject) -> None:
    """Of well-formed calls with parts left out, doubled, cut and put elsewhere."""
    markers = st.sampled_from(sorted(TOOLS[name].markers))
    text = "".join(
        data.draw(
            st.lists(markers | st.builds("".join, PIECES), max_size=16)
            | st.lists(markers, min_size=4, max_size=20)
            | st.just(["Hi ", MARKUPS[name].write(("f", {"text": "a", "number": "5"}), ("g", {"k": "v"})), "\n bye"])
        )
    )
    first, last = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    text = data.draw(st.sampled_from([text, text[:first] + text[last:], text + text[first:last]]))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    scanner = MessageScanner(REASONING["qwen3"], TOOLS[name], stop=data.draw(st.sampled_from([(), ("word",)])))
    whole, end = read(scanner, [text])
    for pieces in (pieces_of(text, cuts), list(text)):
        other, other_end = read(scanner, pieces)
        assert (other, other_end.calls, other_end.stopped) == (whole, end.calls, end.stopped)
    for _, arguments in whole.calls:
        assert arguments == "" or arguments.startswith("{")


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_arguments_are_json_wherever_the_end_of_the_call_was_written(name: str, data: st.DataObject) -> None:
    """Whatever stands before it."""
    markers = st.sampled_from(sorted(TOOLS[name].markers))
    junk = "".join(
        data.draw(st.lists(markers | st.sampled_from(["f", "number", "\n", "x < 1", '{"a"', '"']), max_size=8))
    )
    call = MARKUPS[name].write(("f", {"text": "a", "number": "5"}))
    got = calls(name, f"{call}{junk}{call}")
    assert json.loads(got[0][1]) == {"text": "a", "number": 5}
    for _, arguments in got:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qwen3_coder", "Write </function> or </tool_call>, and <tool_call> or <function=g> in between."),
        ("qwen3_coder", f"</function>{' ' * (MAX_BLANK + 1)}</tool_call> too far apart"),
        ("qwen3_coder", "<think>no</think> <arg_key>x</arg_key> </invoke>"),
        ("glm45", "<arg_key>x</arg_key><arg_value> and </tool_call> and <tool_call>g"),
        ("minimax_m2", "</invoke>, </minimax:tool_call>, <invoke name='g'>"),
        ("deepseek_v32", "</｜DSML｜invoke> and </｜DSML｜function_calls> and <｜DSML｜function_calls>"),
        ("step3", "a < b, </steptml:invoke>, <｜tool_call_end｜> and <｜tool_calls_end｜> as text"),
    ],
)
def test_markup_in_a_value_is_text(name: str, value: str) -> None:
    text = MARKUPS[name].write(("f", {"text": value}), ("g", {}))
    expected = Said("", "", [("f", json.dumps({"text": value}, ensure_ascii=False)), ("g", "{}")])
    assert said(name, text) == expected
    assert read(MessageScanner(tools=TOOLS[name]), list(text))[0] == expected


SECTIONS = {
    "qwen3_coder": ("<tool_call>\n", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>"),
    "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
}
F_ONE = ("f", '{"text": "one"}')
F_BOTH = ("f", '{"text": "one", "number": 5}')
G = ("g", "{}")


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        # No end of a value.
        (
            "qwen3_coder",
            "<function=f>\n<parameter=text>\none\n<parameter=number>\n5\n</parameter>\n</function>",
            [F_BOTH],
        ),
        ("qwen3_coder", "<function=f>\n<parameter=text>\none\n</function>\n", [F_ONE]),
        ("qwen3_coder", "<function=f>\n<parameter=text>\none\n", [F_ONE]),
        ("minimax_m2", '<invoke name="f"><parameter name="text">one</invoke>\n', [F_ONE]),
        ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="text">one</｜DSML｜invoke>', [F_ONE]),
        # No end of a call.
        ("qwen3_coder", "<function=f>\n<parameter=text>\none\n</parameter>\n", [F_ONE]),
        ("qwen3_coder", "<function=f>\n<parameter=text>\none\n</parameter>\n<function=g></function>", [F_ONE, G]),
        ("qwen3_coder", "<function=g>\n<tool_call>\n<function=f><parameter=text>one</parameter>", [G, F_ONE]),
        ("minimax_m2", '<invoke name="f"><parameter name="text">one</parameter><invoke name="g"></invoke>', [F_ONE, G]),
        # No end of a name or a key.
        ("qwen3_coder", "<function=f<parameter=text>one</parameter></function>", [F_ONE]),
        ("qwen3_coder", "<function=g</function>", [G]),
        ("qwen3_coder", "<function=f><parameter=number</parameter><parameter=text>one</parameter></function>", [F_ONE]),
        ("glm45", "f\n<arg_value>text</arg_key><arg_key>text<arg_value>one</arg_value>", [F_ONE]),
        ("glm45", "f<arg_key>number</arg_key><arg_key>text</arg_key><arg_value>one</arg_value>", [F_ONE]),
        # Names in the wrong quotes.
        ("minimax_m2", "<invoke name='f'><parameter name=text>one</parameter></invoke>", [F_ONE]),
        ("minimax_m2", '<invoke name=f"><parameter name="text>one</parameter></invoke>', [F_ONE]),
        # Nothing to pass on.
        ("qwen3_coder", "<function=><parameter=text>one</parameter></function>", []),
        ("qwen3_coder", "<function=f><parameter=>one</parameter></function>", [("f", "{}")]),
        ("qwen3_coder", "<function f><parameter=text>one</parameter></function>", []),
        ("qwen3_coder", "so <b>be</b> it", []),
        ("qwen3_coder", f"<function={'f' * MAX_NAME}g></function><function=g></function>", [G]),
        ("qwen3_coder", f"<function=g><parameter={'f' * MAX_NAME}g>one</parameter></function>", [G]),
        ("qwen3_coder", "", []),
        ("glm45", "", []),
        ("minimax_m2", "", []),
    ],
)
def test_a_malformed_call_is_read_as_far_as_it_goes_and_never_becomes_content(
    name: str, text: str, right: list[tuple[str, str]]
) -> None:
    start, end = SECTIONS[name]
    assert said(name, f"Hi.{start}{text}{end}") == Said("", "Hi.", right)
    assert said(name, f"Hi.{start}{text}{end}\n{MARKUPS[name].write(('g', {}))}") == Said("", "Hi.", [*right, G])


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "deepseek_v32", "deepseek_v4"])
def test_a_call_needs_no_section_around_it_but_in_reasoning_it_is_a_thought(name: str) -> None:
    row = TOOLS[name]
    call = MARKUPS[name].write(("f", {"text": "one"}))
    bare = call[call.index(row.bare[0]) :]
    assert said(name, f"Hi. {bare}") == Said("", "Hi. ", [F_ONE])
    found, state = Found(), ScanState(phase="reasoning")
    MessageScanner(REASONING["qwen3"], row).feed(state, f"{bare}</think>so", found)
    assert ("".join(found.reasoning), "".join(found.content), found.calls) == (bare, "so", [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=f", None),
        ("<function=f>", ""),
        ("<function=f>\n<parameter=te", ""),
        ("<function=f>\n<parameter=text>", '{"text": "'),
        ("<function=f>\n<parameter=text>\n", '{"text": "'),
        ("<function=f>\n<parameter=text>\none\ntw", '{"text": "one\\ntw'),
        ("<function=f>\n<parameter=text>\none\n", '{"text": "one'),
        ("<function=f>\n<parameter=text>\none\n</para", '{"text": "one'),
        ("<function=f>\n<parameter=text>\none\n</parameter>", '{"text": "one"'),
        ("<function=f>\n<parameter=text>\none\n</parameter>\n</func", '{"text": "one"'),
        ("<function=f>\n<parameter=text>\none\n</parameter>\n</function>", '{"text": "one"}'),
        ("<function=f>\n<parameter=text>\none\n</function>", '{"text": "one"}'),
        ("<function=f>\n<parameter=text>\none\n</function>\n</tool", '{"text": "one"}'),
        ("<function=f>\n<parameter=number>\n", ""),
        ("<function=f>\n<parameter=number>\n5", '{"number": 5'),
        ('<function=f>\n<parameter=list>\n["a", {"b": tr', '{"list": ["a", {"b": tr'),
        ('<function=f>\n<parameter=list>\n["a"]\n</par', '{"list": ["a"]'),
        ("<function=f>\n<parameter=maybe>\nnu", '{"maybe": "nu'),
        ("<function=f>\n<parameter=text>\none\n</parameter>\n<parameter=number>\n5", '{"text": "one", "number": 5'),
    ],
)
def test_a_call_that_is_cut_keeps_what_was_written_of_it(text: str, arguments: str | None) -> None:
    assert said("qwen3_coder", f"<tool_call>\n{text}") == Said("", "", [] if arguments is None else [("f", arguments)])


def test_a_string_is_passed_on_while_it_comes_in_and_other_values_are_not() -> None:
    scanner, state, told = MessageScanner(tools=TOOLS["qwen3_coder"]), ScanState(), ""
    value, numbers = 'a "quoted" text ' * 20, json.dumps(list(range(50)))
    text = QWEN.write(("f", {"text": value, "list": numbers}))
    string, listed = text.index('a "quoted'), text.index("[0, 1")
    for at, character in enumerate(text):
        found, before = Found(), told
        scanner.feed(state, character, found, DECLARED)
        told += "".join(call.arguments for call in found.calls)
        if string <= at < string + len(value):
            assert told == f'{{"text": {json.dumps(text[string : at + 1])[:-1]}'
        elif listed <= at < listed + len(numbers):
            assert told == before
    assert json.loads(told) == {"text": value, "list": json.loads(numbers)}


def test_a_typed_value_that_waits_too_long_is_passed_on_as_a_string() -> None:
    long = f'["{"x" * MAX_KEPT}"]'
    text = QWEN.write(("f", {"list": long, "number": "5"}))
    expected = [("f", json.dumps({"list": long, "number": 5}))]
    assert calls("qwen3_coder", text) == expected
    scanner = MessageScanner(tools=TOOLS["qwen3_coder"])
    assert read(scanner, [text[at : at + 50_000] for at in range(0, len(text), 50_000)])[0].calls == expected


@pytest.mark.parametrize(
    ("value", "passed_on"),
    [("\n\na\n\n", "\na\n"), ("\n", ""), ("", ""), ("\n\n", ""), (" a ", " a "), ("a\r\n", "a\r"), ("\n\n\n", "\n")],
)
def test_a_line_break_on_either_side_of_a_value_is_markup_where_the_format_says_so(value: str, passed_on: str) -> None:
    text = f"<tool_call><function=f><parameter=text>{value}</parameter></function></tool_call>"
    assert calls("qwen3_coder", text) == [("f", json.dumps({"text": passed_on}))]
    assert calls("mimo", text) == [("f", json.dumps({"text": value}))]


@pytest.mark.parametrize(
    ("value", "passed_on"),
    [
        ("<![CDATA[a < b]]>", "a < b"),
        ("<![CDATA[]]>", ""),
        ("<![CDATA[a]]]>", "a]"),
        ("<![CDATA[a]] >", "a]] >"),
        ("<![CDATA", "<![CDATA"),
        ("plain", "plain"),
    ],
)
def test_a_value_may_stand_in_cdata(value: str, passed_on: str) -> None:
    text = f'<function name="f"><param name="text">{value}</param></function>'
    for pieces in ([text], list(text)):
        assert read(MessageScanner(tools=TOOLS["minicpm5"]), pieces)[0].calls == [
            ("f", json.dumps({"text": passed_on}))
        ]


@pytest.mark.parametrize(
    ("key", "mark", "value", "passed_on"),
    [
        ("text", "false", "5", "5"),
        ("number", "true", "5", 5),
        ("maybe", "true", "null", "null"),
        ("maybe", "false", "null", None),
        ("any", "true", "5", "5"),
        ("any", "false", "5", 5),
        ("any", None, "five", "five"),
        ("unknown", "true", "[1]", "[1]"),
        ("unknown", "false", "[1]", [1]),
        ("unknown", None, "[1]", [1]),
        ("unknown", "false", "[1", "[1"),
    ],
)
def test_the_schema_decides_what_a_value_is_and_where_it_does_not_the_mark_on_it_does(
    key: str, mark: str | None, value: str, passed_on: object
) -> None:
    text = DSML.write(("f", {key: value})).replace(' string="true"', f' string="{mark}"' if mark else "")
    assert [json.loads(arguments) for _, arguments in calls("deepseek_v32", text)] == [{key: passed_on}]


def test_without_a_schema_values_are_strings() -> None:
    got, _ = read(MessageScanner(tools=TOOLS["qwen3_coder"]), [QWEN.write(("g", {"a": "5"}), ("f", {"b": "[1]"}))])
    assert got.calls == [("g", '{"a": "5"}'), ("f", '{"b": "[1]"}')]


def test_a_reference_in_the_schema_is_followed() -> None:
    assert calls("qwen3_coder", QWEN.write(("f", {"model": '{"a": 1}'}))) == [("f", '{"model": {"a": 1}}')]
    assert calls("qwen3_coder", QWEN.write(("f", {"model": "null"}))) == [("f", '{"model": null}')]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("CALL\nCALL\n", ""),
        ("\n\nCALL\n\n", ""),
        ("Hi. CALL\nCALL", "Hi. "),
        ("Hi. CALL\n so CALL bye", "Hi. \n so  bye"),
        ("CALL<tool_c", "<tool_c"),
    ],
)
def test_text_behind_a_call_is_content_but_white_space_between_calls_is_not(text: str, content: str) -> None:
    written = text.replace("CALL", QWEN.write(("g", {})))
    for pieces in ([written], list(written)):
        assert read(MessageScanner(tools=TOOLS["qwen3_coder"]), pieces)[0].content == content


def test_text_behind_a_call_is_dropped_where_the_format_has_none() -> None:
    assert said("deepseek_v32", f"Hi.{DSML.write(('g', {}))} bye") == Said("", "Hi.", [G])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return byte_level(folder)


@pytest.mark.parametrize(
    ("name", "asked", "content", "count"),
    [
        ("qwen3_coder", {"tool_choice": "auto"}, "Hi. ", 2),
        ("qwen3_coder", {"parallel_tool_calls": False}, "Hi. ", 1),
        ("qwen3_coder", {"tool_choice": "none"}, "Hi. ", 0),
        ("qwen3_coder", {"tools": None}, "Hi. ", 0),
        ("step3", {"tool_choice": "none"}, None, 0),
        ("step3", {"tools": None}, None, 0),
    ],
)
def test_calls_that_a_request_does_not_allow_are_dropped_or_text_as_the_format_has_it(
    folder: Path, tokenizer: Tokenizer, name: str, asked: dict[str, Any], content: str | None, count: int
) -> None:
    text = f"Hi. {MARKUPS[name].write(('g', {}), ('g', {}))}"
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "g"}}],
        **asked,
    }
    choice = {"index": 0, "token_ids": tokenizer.encode(text).ids, "finish_reason": "stop"}
    request = {
        "model": "m",
        "chat_request": chat,
        "prompt_token_ids": [1],
        "generate_response": {"request_id": "r", "choices": [choice]},
    }
    response = Derenderer.load(folder, tool_parser=name).chat(DerenderChatRequest.model_validate(request), created=0)
    answer = response.choices[0]
    assert answer.message.content == (text if content is None else content)
    assert len(answer.message.tool_calls or []) == count
    assert answer.finish_reason == ("tool_calls" if count else "stop")


STATES = st.fixed_dictionaries(
    {"body": st.just("xml")},
    optional={
        "done": st.booleans(),
        "at": st.sampled_from(get_args(At)),
        "head": st.text(max_size=5),
        "function": st.sampled_from(["", "f", "g"]),
        "argued": st.booleans(),
        "text": st.booleans(),
        "begun": st.booleans(),
        "kept": st.text(max_size=5),
    },
)


@pytest.mark.parametrize("name", FORMATS)
@given(section=STATES, opened=st.integers(0, 2), pieces=st.lists(st.text(max_size=8), max_size=3), data=st.data())
def test_any_state_that_can_be_carried_can_be_read_on_from(
    name: str, section: dict[str, Any], opened: int, pieces: list[str], data: st.DataObject
) -> None:
    carried = {"phase": "call", "calls": opened, "section": section}
    state = msgspec.json.decode(json.dumps(carried), type=ScanState)
    scanner = MessageScanner(tools=TOOLS[name])
    for piece in [*pieces, data.draw(st.sampled_from(sorted(TOOLS[name].markers)))]:
        found = Found()
        scanner.feed(state, piece, found, DECLARED)
        assert all(call.index >= 0 for call in found.calls)
    scanner.finish(state, Found(), DECLARED)


def test_a_state_out_of_bounds_is_refused() -> None:
    for section in ({"head": "n" * (MAX_NAME + 1)}, {"kept": "k" * (MAX_KEPT + 1)}, {"refused": "x"}, {"at": "there"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"body": "xml", **section}, XmlSection)


@pytest.mark.parametrize("bulk", ["word", "</function>", "\n", " ", "<parameter=", "<tool_call", "<function=f>", "<"])
@pytest.mark.parametrize("start", ["", "<tool_call>", "<function=f>", "<function=f><parameter=text>"])
def test_the_state_stays_small_through_any_bulk_of_text(bulk: str, start: str) -> None:
    scanner, state = MessageScanner(tools=TOOLS["qwen3_coder"]), ScanState()
    scanner.feed(state, start, Found(), DECLARED)
    for _ in range(3000):
        scanner.feed(state, bulk, Found(), DECLARED)
        assert len(msgspec.json.encode(state)) < 2 * MAX_NAME


@pytest.mark.parametrize(
    "bulk",
    [
        "<function=f><parameter=text>",
        "<function=f></function>",
        "<tool_call><function=f><parameter=number>5</parameter>",
        "</function>x",
        "</function> ",
        f"</function>{' ' * MAX_BLANK}",
        "<parameter=text></parameter>",
        "<parameter=number>[</parameter>",
        "<parameter=list>[",
        "</param",
        "\n",
        "<",
    ],
)
@pytest.mark.parametrize("start", ["", "<tool_call><function=f>", "<tool_call><function=f><parameter=text>"])
def test_the_time_to_read_a_text_grows_with_its_length_and_no_faster(bulk: str, start: str) -> None:
    scanner = MessageScanner(tools=TOOLS["qwen3_coder"])

    def work(length: int) -> None:
        text = f"{start}{bulk * (length // len(bulk))}<"
        read(scanner, [text])

    assert linear(work, 80_000)


def test_a_section_of_tags_belongs_to_formats_of_tags() -> None:
    state = ScanState(phase="call", section=XmlSection())
    assert MessageScanner(tools=TOOLS["qwen3_coder"]).fits(state)
    assert not MessageScanner(tools=TOOLS["hermes"]).fits(state)
