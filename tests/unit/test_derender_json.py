"""The JSON formats: what their rows read, in any pieces, and what they leave alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol import ChatCompletionResponse, wire
from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender.call_ids import tool_call_id
from headrace.workers.derender.formats import REASONING, TOOLS, Declared, Found, MessageScanner, ScanState, ToolFormat
from headrace.workers.derender.formats.bodies import JsonBody
from headrace.workers.derender.formats.demanded import ArgumentsSection, DemandedSection
from headrace.workers.derender.formats.json_section import MAX_KEPT, MAX_NAME, MAX_UNSURE, JsonSection
from headrace.workers.derender.formats.json_string import string_of, unescaped
from tests.unit.json_written import BOTH, WRITTEN, F, G
from tests.unit.scanned import Said, linear, pieces_of, read, said
from tests.unit.small_chat import chunk, session

JSON_ROWS = {row.name: row for row in TOOLS.values() if isinstance(row.body, JsonBody)}
OTHERWISE = [
    ("granite", f"<tool_call>[{F}, {G}]"),
    ("mistral", f"[TOOL_CALLS][{F}, {G}]"),
    ("mistral", f"[TOOL_CALLS]{F}[TOOL_CALLS]{G}"),
    ("mistral", '[TOOL_CALLS]f{"a": [1, "}"]}[TOOL_CALLS]g[ARGS]{}'),
    ("llama3_json", f"{F}; {G}"),
    ("llama3_json", f"[{F}, {G}]"),
    ("xlam", f"```json\n[{F}, {G}]\n```"),
    ("xlam", f"```\n[{F}, {G}]\n```"),
    ("xlam", f"[TOOL_CALLS][{F}, {G}]"),
    ("xlam", f"<tool_call>[{F}, {G}]</tool_call>"),
    ("hermes", f"<tool_call>[{F}, {G}]</tool_call>"),
    ("hermes", f"<tool_call>{F}\n{G}</tool_call>"),
]


def declared(*names: str) -> Declared:
    return Declared([ChatCompletionToolsParam.model_validate({"function": {"name": name}}) for name in names])


def ids(text: str, tools: ToolFormat) -> list[str | None]:
    found = Found()
    MessageScanner(tools=tools).feed(ScanState(), text, found)
    return [piece.id for piece in found.calls if piece.name is not None]


def test_every_json_format_has_an_example() -> None:
    assert set(WRITTEN) == set(JSON_ROWS)


@pytest.mark.parametrize(("name", "text"), [*WRITTEN.items(), *OTHERWISE])
def test_calls_are_read_in_every_spelling(name: str, text: str) -> None:
    assert said(text, tools=TOOLS[name]) == Said("", "", BOTH)
    assert read(MessageScanner(tools=TOOLS[name]), list(text))[0] == Said("", "", BOTH)
    assert said(f"So: {text.strip()}", tools=TOOLS[name]) == Said("", "So: ", BOTH)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_anywhere_keeps_what_was_written_of_it(name: str) -> None:
    text, whole = WRITTEN[name], [("f", '{"a": [1, "}"]}'), ("g", "{}")]
    counts = []
    for length in range(len(text)):
        found = said(text[:length], tools=TOOLS[name])
        for (called, arguments), (right, complete) in zip(found.calls, whole, strict=False):
            assert called == right
            assert complete.startswith(arguments), length
        counts.append(len(found.calls))
        if not TOOLS[name].tentative and not TOOLS[name].text_after and found.calls:
            assert found.content == "", length
    assert counts == sorted(counts)
    assert counts[-1] == len(whole)


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        # a list goes on behind an object that cannot be read
        ("granite", f'<tool_call>[{{"name" "f" "arguments" {{"a" 1}}}} {G}]', [("f", '{"a" 1}'), ("g", "{}")]),
        ("granite", f'<tool_call>[{{"name": "", "arguments": {{"x": 1}}}}, {G}]', [("g", "{}")]),
        ("granite", f'<tool_call>[{{3: "}}"}}, {G}]', [("g", "{}")]),
        ("jamba", f'<tool_calls>[{{"name": "f"oo}}, {G}]</tool_calls>', [("f", "{}"), ("g", "{}")]),
        # its end marker, or the next start, ends a call that was not closed
        ("jamba", f'<tool_calls>[{{"name": "f", "arguments": {{"a": [</tool_calls> <tool_calls>[{G}]', ["open", "g"]),
        ("granite", f'<tool_call>[{{"name": "f", "arguments": {{"a": [<|tool_call|>{G}', ["open", "g"]),
        ("mistral", f'[TOOL_CALLS]f{{"a": [[TOOL_CALLS]{G}', ["open", "g"]),
        ("granite-20b-fc", f'<function_call>{{"name": "f", "arguments": {{"a": [<function_call>{G}', ["open", "g"]),
        # but not within a string
        ("granite", '<tool_call>{"name": "f", "arguments": "<tool_call>"}', [("f", '"<tool_call>"')]),
        ("mistral", '[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}', [("f", '{"a": "[TOOL_CALLS]"}')]),
        ("mistral", '[TOOL_CALLS]f[ARGS]x {"a": 1}', [("f", "{}")]),
        ("mistral", "[TOOL_CALLS]f[TOOL_CALLS]g{}", [("f", "{}"), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS][TOOL_CALLS]g{}", [("f", "{}"), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS]", [("f", "")]),
        ("mistral", f"[TOOL_CALLS]{'f' * MAX_NAME}{{}}[TOOL_CALLS]g{{}}", [("f" * MAX_NAME, "{}"), ("g", "{}")]),
        ("mistral", f"[TOOL_CALLS]{'f' * (MAX_NAME + 1)}{{}}[TOOL_CALLS]g{{}}", [("g", "{}")]),
        ("mistral", "[TOOL_CALLS][ARGS]{}[TOOL_CALLS]g{}", [("g", "{}")]),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": [1]}, {"": {}}, 7]', [("f", "{}"), ("g", "[1]")]),
        ("granite", "<tool_call>nothing of the kind", []),
        ("jamba", "<tool_calls>[]</tool_calls>", []),
    ],
)
def test_malformed_calls_are_read_as_far_as_they_go(name: str, text: str, calls: list[Any]) -> None:
    right = [{"open": ("f", '{"a": ['), "g": ("g", "{}")}.get(call, call) for call in calls]
    assert said(f"Hi. {text}", tools=TOOLS[name]) == Said("", "Hi. ", right)


CONTENT = [
    "a {b} c",
    "{}",
    "[]",
    '{"name": 1}',
    '{"name": "f"}',
    '{"name": "f", "size": 3}',
    '{"a": {"name": "f", "arguments": {}}}',
    '[1, {"b": 2}]',
    "[link](to) and [f(x)]",
    'f(x) = {x: 1, "name": "f"}',
    "```json\n{}\n```",
    "```python\nprint({})\n```",
    '{"name": "f", "argu',
    '[{"name": "',
    "import functools[",
    "functools.wraps",
    "{" * 50,
    f'{{"text": "{"x" * 2 * MAX_UNSURE}", "name": "f", "arguments": {{}}}}',
]


@pytest.mark.parametrize("text", CONTENT)
@pytest.mark.parametrize("name", ["llama3_json", "phi4_mini_json", "xlam"])
def test_a_start_that_no_call_follows_is_content(name: str, text: str) -> None:
    scanner = MessageScanner(tools=TOOLS[name])
    assert read(scanner, [text])[0] == read(scanner, list(text))[0] == Said("", text, [])
    assert said(f"{text} {F}", tools=TOOLS["llama3_json"]).content.startswith(text[:1])


def test_a_declared_name_needs_no_arguments_to_be_a_call() -> None:
    llama, tools = TOOLS["llama3_json"], declared("f")
    assert said('{"name": "f"}', tools=llama, declared=tools) == Said("", "", [("f", "{}")])
    assert said('{"name": "f"', tools=llama, declared=tools) == Said("", "", [("f", "{}")])
    assert said('{"name": "g"}', tools=llama, declared=tools) == Said("", '{"name": "g"}', [])
    assert said("[TOOL_CALLS]f", tools=TOOLS["mistral"], declared=tools).calls == [("f", "{}")]
    assert said("[TOOL_CALLS]fe", tools=TOOLS["mistral"], declared=tools).calls == []


def test_a_certain_start_is_never_content_even_if_no_call_follows() -> None:
    assert said('<|python_tag|>print("x")', tools=TOOLS["llama3_json"]) == Said("", 'print("x")', [])
    assert said('Hm. <|python_tag|>{"a": 1}', tools=TOOLS["llama3_json"]) == Said("", 'Hm. {"a": 1}', [])


def test_a_bare_start_is_a_thought_within_reasoning() -> None:
    found = said(f"so {F}</think>{G}", "reasoning", reasoning=REASONING["qwen3"], tools=TOOLS["llama3_json"])
    assert found == Said(f"so {F}", "", [("g", "{}")])


def test_arguments_may_come_before_the_name() -> None:
    first = '{"parameters": {"a": 1}, "name": "f"}'
    assert said(first, tools=TOOLS["llama3_json"]) == Said("", "", [("f", '{"a": 1}')])
    long = json.dumps({"a": "x" * (MAX_KEPT - 20)})
    assert said(f'{{"parameters": {long}, "name": "f"}}', tools=TOOLS["llama3_json"]).calls == [("f", long)]


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_arguments_that_wait_too_long_for_their_name_are_dropped_at_the_same_place(extra: int) -> None:
    text = f'<tool_calls>[{{"arguments": ["{"x" * (MAX_KEPT - 4 + extra)}"], "name": "f"}}, {G}]</tool_calls>'
    scanner = MessageScanner(tools=TOOLS["jamba"])
    names = ["f", "g"] if extra <= 0 else ["g"]
    for pieces in (
        [text],
        pieces_of(text, range(0, len(text), 997)),
        pieces_of(text, [MAX_KEPT + n for n in range(60)]),
    ):
        assert [name for name, _ in read(scanner, pieces)[0].calls] == names


@pytest.mark.parametrize("extra", [-3, -2, -1, 0])
def test_a_key_or_a_name_that_is_too_long_is_not_read_in_any_pieces(extra: int) -> None:
    long, scanner = "n" * (MAX_NAME + extra), MessageScanner(tools=TOOLS["granite"])
    for text, right in (
        (f'<tool_call>[{{"{long}": 1, "name": "f"}}, {G}]', [("f", "{}"), ("g", "{}")]),
        (f'<tool_call>[{{"name": "{long}"}}, {G}]', [(long, "{}")] * (extra < -1) + [("g", "{}")]),
    ):
        assert read(scanner, [text])[0].calls == read(scanner, list(text))[0].calls == right


def test_arguments_written_as_a_string_of_json_are_that_json() -> None:
    inner = {"a": 'é😀 "quoted" \\ \n', "b": [1, {}]}
    for ascii_only in (True, False):
        written = json.dumps(json.dumps(inner, ensure_ascii=ascii_only), ensure_ascii=ascii_only)
        text = f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]'
        for pieces in ([text], list(text)):
            [(name, arguments)] = read(MessageScanner(tools=TOOLS["mistral"]), pieces)[0].calls
            assert (name, json.loads(arguments)) == ("f", inner)
    assert said(r'<tool_call>{"name": "f", "arguments": "\u007b"}', tools=TOOLS["hermes"]).calls == [("f", r'"\u007b"')]


@pytest.mark.parametrize("blanks", range(7, 12))
def test_a_string_is_told_from_json_after_a_few_blanks(blanks: int) -> None:
    text = f'[TOOL_CALLS]f[ARGS]"{" " * blanks}{{}}"'
    whole = said(text, tools=TOOLS["mistral"]).calls
    assert whole == read(MessageScanner(tools=TOOLS["mistral"]), list(text))[0].calls
    assert whole == [("f", "{}" if blanks <= 8 else text[19:])]


@given(value=st.text(), cuts=st.lists(st.integers(0, 100), max_size=6), ascii_only=st.booleans())
def test_a_string_in_pieces_says_what_the_whole_string_says(value: str, cuts: list[int], ascii_only: bool) -> None:
    right, rest = "", ""
    for piece in pieces_of(json.dumps(value, ensure_ascii=ascii_only)[1:-1], cuts):
        text, rest = unescaped(rest + piece)
        assert len(rest) < 12
        right += text
    assert (right, rest) == (value, "")


@given(pieces=st.lists(st.sampled_from([r"\ud83d", r"\ude00", r"\u0041", r"\n", r"\\", "u", "a"]), max_size=8))
def test_half_a_surrogate_pair_is_replaced_wherever_it_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole, rest = unescaped(text)
    whole += unescaped(f"{rest} ")[0]
    given_out, waiting = "", ""
    for character in f"{text} ":
        said_now, waiting = unescaped(waiting + character)
        given_out += said_now
    assert given_out == whole == string_of(f'"{text} "')
    whole.encode()


def test_no_name_holds_half_a_surrogate_pair() -> None:
    assert said(r'<tool_call>{"name": "f\ud83d"}</tool_call>', tools=TOOLS["hermes"]).calls == [("f\ufffd", "{}")]


def test_an_id_that_the_model_wrote_is_kept() -> None:
    mistral = TOOLS["mistral"]
    assert ids(WRITTEN["mistral"], mistral) == ["abcdefghi", None]
    assert ids('[TOOL_CALLS][{"id": "123456789", "name": "f", "arguments": {}}, {"name": "g"}]', mistral) == [
        "123456789",
        None,
    ]
    assert ids(WRITTEN["cohere_command3"], TOOLS["cohere_command3"]) == ["0", "1"]
    assert ids('<tool_call>{"id": "1", "name": "f"}', TOOLS["hermes"]) == [None]


def test_ids_are_made_in_the_style_of_the_family_and_the_same_every_time() -> None:
    made = {tool_call_id(run, choice, index, "f", "mistral") for run in "ab" for choice in (0, 1) for index in (0, 1)}
    assert len(made) == 8
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in made)
    assert tool_call_id("a", 0, 1, "f", "mistral") in made
    assert tool_call_id("a", 0, 1, "f", "kimi") == "functions.f:1"
    assert tool_call_id("a", 0, 1) == tool_call_id("a", 0, 1, "f", "openai") != tool_call_id("a", 0, 2)


VARIANTS = [
    *JSON_ROWS.values(),
    replace(TOOLS["jamba"], tentative=True, bare=("(",), forced_json=False),
    replace(TOOLS["llama3_json"], text_after=True),
    replace(TOOLS["apertus"], text_after=False),
]
PIECES = [
    *("{", "}", "[", "]", '"', "\\", ":", ", ", "; ", " ", "\n\n", "word", "é", "functools", "```json", "[TOOL", "<"),
    *('"name": "f"', '"name": ', '"arguments": ', '"parameters": {', '"id": "i"', r'"{\"b\": \u00e9\ud83d"', '"x"'),
    *(F, G, "[ARGS]", "[CALL_ID]", "</think>", "stop"),
]


@st.composite
def written(draw: st.DrawFn) -> tuple[ToolFormat, str]:
    tools = draw(st.sampled_from(VARIANTS))
    markers = [*tools.starts, *tools.bare, *tools.body.ends] if isinstance(tools.body, JsonBody) else []
    parts = draw(st.lists(st.sampled_from([*markers, *markers, *PIECES]), max_size=16))
    return tools, "".join(parts)


@given(
    message=written(),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    demanded=st.sampled_from([None, "", "f"]),
    stop=st.sampled_from([(), ("stop", "word,")]),
    tools=st.sampled_from([declared(), declared("f")]),
)
def test_any_pieces_of_the_same_text_say_the_same(
    message: tuple[ToolFormat, str], cuts: list[int], demanded: str | None, stop: tuple[str, ...], tools: Declared
) -> None:
    row, text = message
    scanner = MessageScanner(REASONING["qwen3"], row, demanded=demanded, stop=stop)
    whole, end = read(scanner, [text], declared=tools)
    cut, cut_end = read(scanner, pieces_of(text, cuts), declared=tools)
    single, single_end = read(scanner, list(text), declared=tools)
    assert whole == cut == single
    assert (end.stopped, end.calls) == (cut_end.stopped, cut_end.calls) == (single_end.stopped, single_end.calls)
    json.dumps(whole).encode()


@given(message=written())
def test_no_text_is_said_twice(message: tuple[ToolFormat, str]) -> None:
    row, text = message
    found = said(text, tools=row)
    passed_on = [arguments for _, arguments in found.calls if arguments != "{}"]
    assert len(found.content) + sum(map(len, passed_on)) <= len(text)


SECTIONS = st.one_of(
    *(
        st.builds(
            kind,
            unsure=st.sampled_from([None, "", "x", "{"]),
            at=st.sampled_from(["calls", "key", "value", "name", "id", "arguments"]),
            listed=st.booleans(),
            reading=st.sampled_from(["", "key", "name", "id", "arguments", "other", "lost"]),
            value=st.builds(
                dict,
                kind=st.sampled_from(["", "string", "nested", "scalar"]),
                depth=st.sampled_from([0, 1, 1 << 39]),
                quoted=st.booleans(),
                escaped=st.booleans(),
            ),
            raw=st.sampled_from(["", '"', "f", r'"\u12', "x" * MAX_NAME]),
            written=st.sampled_from(["", "null", "quoted", "json"]),
            kept=st.sampled_from(["", "{", "x" * MAX_KEPT]),
            name=st.sampled_from(["", "f"]),
            announced=st.booleans(),
            argued=st.booleans(),
        )
        for kind in (JsonSection, DemandedSection)
    ),
    st.builds(ArgumentsSection, opened=st.booleans()),
)


@given(section=SECTIONS, calls=st.sampled_from([0, 3]), message=written())
def test_whatever_place_a_state_names_reading_goes_on_without_a_failure(
    section: Any, calls: int, message: tuple[ToolFormat, str]
) -> None:
    row, text = message
    body = msgspec.to_builtins(section)
    state = msgspec.convert({"phase": "call", "section": body, "calls": calls}, ScanState)
    scanner = MessageScanner(tools=replace(row, forced_json=True), demanded="f")
    for piece in (text[:5], text[5:]):
        scanner.feed(state, piece, Found())
        state = msgspec.convert(msgspec.to_builtins(state), ScanState)
    scanner.finish(state, Found())


BULK = [
    "{",
    "[",
    '"',
    "\\",
    " ",
    "x",
    "[{",
    '{"',
    '{"name": "f", ',
    ", ",
    "[TOOL_CALLS]",
    "[AR",
    '"{',
    r"\u12",
    "```js",
]


@pytest.mark.parametrize("bulk", BULK)
@pytest.mark.parametrize("name", ["llama3_json", "mistral", "granite", "xlam"])
@pytest.mark.parametrize("begun", ["", '{"name": "f", "arguments": "'])
def test_what_is_held_has_a_bound(bulk: str, name: str, begun: str) -> None:
    scanner = MessageScanner(tools=TOOLS[name], demanded="")
    state, bound = ScanState(), MAX_UNSURE + MAX_KEPT + 2000
    start = TOOLS[name].starts[0] + begun
    scanner.feed(state, start, Found())
    for _ in range(300):
        scanner.feed(state, bulk * 40, Found())
        state = msgspec.convert(msgspec.to_builtins(state), ScanState)
        assert len(msgspec.json.encode(state)) < 2 * bound


@pytest.mark.parametrize("bulk", [*BULK, "{}", "[]", f"{F}; ", '{"arguments": ', '{"name": "f", "a": {}}', "{x"])
@pytest.mark.parametrize("name", ["llama3_json", "mistral", "granite", "xlam", "jamba"])
def test_the_time_to_read_a_text_grows_with_its_length_and_no_faster(bulk: str, name: str) -> None:
    scanner = MessageScanner(tools=TOOLS[name], demanded="")

    def work(length: int) -> None:
        text = f"{TOOLS[name].starts[0]}{bulk * (length // len(bulk))}"
        read(scanner, [text])
        read(scanner, [text[at : at + 9] for at in range(0, len(text) // 16, 9)])

    assert linear(work, 20_000)


def test_the_client_gets_the_models_id_or_one_in_the_familys_style(tmp_path: Path) -> None:
    live, tokenizer = session(tmp_path, "mistral")
    output = tokenizer.encode(WRITTEN["mistral"]).ids
    streamed = []
    for number, token in enumerate(output, 1):
        choice = chunk([token], "stop" if number == len(output) else None)
        done = live.step(wire.TokenChunk(request_id="id", choices=[choice]))
        assert isinstance(done, wire.ChatChunk)
        streamed += [call.id for call in done.choices[0].delta.tool_calls if call.id]
    final = live.final([chunk(output, "stop")])
    assert isinstance(final, ChatCompletionResponse)
    assert streamed == [call.id for call in final.choices[0].message.tool_calls]
    assert streamed == ["abcdefghi", tool_call_id("run", 0, 1, "g", "mistral")]
