"""Calls written as a name, a separator and arguments: what their text says, whatever the pieces it comes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol import ChatCompletionRequest, wire
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.formats import REASONING, TOOLS, Found, MessageScanner, ScanState
from headrace.workers.derender.formats.arguments import At as ArgumentsAt
from headrace.workers.derender.formats.bodies import NamedBody
from headrace.workers.derender.formats.named_call import MAX_NAME, At, NamedSection
from tests.unit.derender_tokenizer import byte_level
from tests.unit.scanned import Said, linear, pieces_of, read, said

Calls = list[tuple[str, str]]


def deepseek_v3(calls: Calls) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    written = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def plamo3(calls: Calls) -> str:
    written = (
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{arguments}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        for name, arguments in calls
    )
    return "<|plamo:begin_tool_requests:plamo|>" + "".join(written) + "<|plamo:end_tool_requests:plamo|>"


WRITE: Final[dict[str, Callable[[Calls], str]]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "kimi_k2": kimi_k2,
    "plamo3": plamo3,
}
FORMATS: Final = sorted(WRITE)
JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12), lambda inner: st.lists(inner, max_size=3)
)
NAMES: Final = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,20}", fullmatch=True)


def test_every_format_of_names_and_arguments_is_tested_here() -> None:
    assert {row.name for row in TOOLS.values() if isinstance(row.body, NamedBody)} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "calls",
    [
        [("f", "{}")],
        [("f", '{"a": 1}'), ("g.h", '{"b": [{"c": "]}"}]}')],
        [("f", '{"a": 1}'), ("f", '{"a": 1}'), ("f", '{"a": 2}')],
        [("f", '[1, {"a": 2}]'), ("g", '"text"')],
        [("f", "3"), ("g", "city=Paris")],
        [("größe", '{"straße": "é你👩‍👧"}')],
    ],
)
def test_calls_are_read_and_their_arguments_passed_on_as_written(name: str, calls: Calls) -> None:
    text = f"Look: {WRITE[name](calls)}"
    found = said(text, tools=TOOLS[name])
    assert found.content == "Look: "
    assert [(function, arguments.rstrip("\n")) for function, arguments in found.calls] == calls


@pytest.mark.parametrize("name", FORMATS)
@given(
    calls=st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=12), JSON, max_size=3)), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    ascii=st.booleans(),
)
def test_any_object_comes_through_whatever_the_pieces(
    name: str, calls: list[tuple[str, Any]], cuts: list[int], ascii: bool
) -> None:
    written = [(function, json.dumps(arguments, ensure_ascii=ascii)) for function, arguments in calls]
    found, _ = read(MessageScanner(tools=TOOLS[name]), pieces_of(f"\n{WRITE[name](written)}\n", cuts))
    assert (found.content.strip(), found.calls) == ("", written)


@pytest.mark.parametrize("name", FORMATS)
def test_markup_in_a_string_is_text(name: str) -> None:
    for marker in TOOLS[name].markers:
        written = json.dumps({"a": f'"{marker}', "b": [marker]}, ensure_ascii=False)
        assert said(WRITE[name]([("f", written), ("g", "{}")]), tools=TOOLS[name]).calls == [
            ("f", written),
            ("g", "{}"),
        ]


@pytest.mark.parametrize("name", FORMATS)
def test_text_within_a_section_is_markup_and_text_behind_it_is_content_where_the_format_has_some(name: str) -> None:
    row = TOOLS[name]
    assert isinstance(row.body, NamedBody)
    one = WRITE[name]([("f", "{}")])
    begin, end = row.starts[0], row.body.section_end
    text = one.replace(begin, f"{begin} first, ").replace(end, f" and {end}")
    assert said(f"Hi.{text}Bye.", tools=row) == Said("", "Hi.Bye." if row.text_after else "Hi.", [("f", "{}")])
    assert said(f"{one}\n{one}", tools=row).calls == [("f", "{}"), ("f", "{}")]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_needs_no_section_around_it_but_in_reasoning_it_is_a_thought(name: str) -> None:
    row = TOOLS[name]
    bare = WRITE[name]([("f", '{"a": 1}')]).removeprefix(row.starts[0])
    assert said(f"Hi.{bare}", tools=row) == Said("", "Hi.", [("f", '{"a": 1}')])
    for reasoning in ("deepseek_r1", "qwen3"):
        assert said(bare, "reasoning", tools=row, reasoning=REASONING[reasoning]) == Said(bare, "", [])
    whole = WRITE[name]([("f", "{}")])
    assert said(whole, "reasoning", tools=row, reasoning=REASONING["deepseek_r1"]) == Said(whole, "", [])
    assert said(f"hm{whole}", "reasoning", tools=row, reasoning=REASONING["qwen3"]) == Said("hm", "", [("f", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_markers_that_close_nothing_are_no_content(name: str) -> None:
    row = TOOLS[name]
    for stray in row.strays:
        assert said(f"one{stray} two", tools=row).content == "one two"


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_whose_end_is_missing_ends_where_the_next_one_or_the_section_does(name: str) -> None:
    row = TOOLS[name]
    assert isinstance(row.body, NamedBody)
    ends = (row.body.end, *row.strays)
    text = WRITE[name]([("f", '{"a": 1'), ("g", '{"b": 2}')])
    for end in ends:
        if end != row.body.section_end:
            text = text.replace(end, "")
    assert [(name, arguments.rstrip()) for name, arguments in said(text, tools=row).calls] == [
        ("f", '{"a": 1'),
        ("g", '{"b": 2}'),
    ]


@pytest.mark.parametrize(
    ("name", "body", "calls"),
    [
        ("deepseek_v3", 'function<｜tool▁sep｜>f\n```OK.json\n{"a": 1}\n```', [("f", '{"a": 1}')]),
        ("deepseek_v3", 'function<｜tool▁sep｜>f\n{"a": 1}', [("f", '{"a": 1}')]),
        ("deepseek_v3", 'f\n```json\n{"a": 1}\n```', [("f", '{"a": 1}')]),
        ("deepseek_v3", 'function<｜tool▁sep｜> f \n```json{"a" 1}```', [("f", '{"a" 1}')]),
        ("deepseek_v3", "function<｜tool▁sep｜>f\n```json\n\n```", [("f", "{}")]),
        ("deepseek_v3", "function<｜tool▁sep｜>f", [("f", "{}")]),
        ("deepseek_v3", 'function<｜tool▁sep｜>\n```json\n{"a": "<｜tool▁call▁begin｜>"}\n```', []),
        ("deepseek_v31", 'f<｜tool▁sep｜>{"a": 1', [("f", '{"a": 1')]),
        ("deepseek_v31", 'f<｜tool▁sep{"a": 1}', [("f", '{"a": 1}')]),
        ("deepseek_v31", 'f<｜tool▁sep｜>{"a": 1}}{"b": 2}', [("f", '{"a": 1}')]),
        ("deepseek_v31", 'f<｜tool▁sep｜>so {"a": 1}', [("f", 'so {"a": 1}')]),
        ("deepseek_v31", "<｜tool▁sep｜>{}", []),
        ("deepseek_v31", "", []),
        ("deepseek_v31", f"{'f' * (MAX_NAME + 1)}<｜tool▁sep｜>{{}}", []),
        ("kimi_k2", 'functions.f:0<|tool_call_argument{"a": 1}', [("f", '{"a": 1}')]),
        ("kimi_k2", 'functions.f<|tool_call_argument_begin|>{"a": 1}', [("f", '{"a": 1}')]),
        ("kimi_k2", "functions.f:0<|tool_call_argument_begin|> ", [("f", "{}")]),
        ("kimi_k2", "functions.f:0", [("f", "{}")]),
        ("kimi_k2", "functions.:0<|tool_call_argument_begin|>{}", []),
        ("kimi_k2", "<|tool_call_argument_begin|>{}", []),
    ],
)
def test_a_malformed_call_is_read_as_far_as_it_goes_and_never_becomes_content(
    name: str, body: str, calls: Calls
) -> None:
    row = TOOLS[name]
    assert isinstance(row.body, NamedBody)
    after = WRITE[name]([("g", "{}")]).removeprefix(row.starts[0])
    text = f"Hi.{row.starts[0]}{row.body.call}{body}{row.strays[0]}{after}"
    assert said(text, tools=row) == Said("", "Hi.", [*calls, ("g", "{}")])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("deepseek_v3", "function<｜tool▁sep｜>get", []),
        ("deepseek_v3", "function<｜tool▁sep｜>get_weather\n```", [("get_weather", "")]),
        ("deepseek_v3", 'function<｜tool▁sep｜>f\n```json\n{"a": "tru', [("f", '{"a": "tru')]),
        ("deepseek_v3", 'function<｜tool▁sep｜>f\n```json\n{"a": 1}\n``', [("f", '{"a": 1}')]),
        ("deepseek_v31", "f<｜tool▁sep｜>", [("f", "")]),
        ("deepseek_v31", 'f<｜tool▁sep｜>{"a": 1<｜tool▁ca', [("f", '{"a": 1')]),
        ("kimi_k2", "functions.search:0<|tool_call", [("search", "")]),
        ("kimi_k2", "functions.sea", []),
        ("kimi_k2", 'functions.f:0<|tool_call_argument_begin|>{"a": "<|tool', [("f", '{"a": "<|tool')]),
        ("kimi_k2", 'functions.f:0<|tool_call_argument_begin|>{"a": 1}<|to', [("f", '{"a": 1}')]),
    ],
)
def test_a_call_that_is_cut_keeps_what_was_written_of_it(name: str, text: str, calls: Calls) -> None:
    row = TOOLS[name]
    assert isinstance(row.body, NamedBody)
    assert said(f"{row.starts[0]}{row.body.call}{text}", tools=row) == Said("", "", calls)
    assert said(row.starts[0], tools=row) == Said("", "", [])


@pytest.mark.parametrize(
    ("written", "name", "call_id"),
    [
        ("functions.get_weather:0", "get_weather", "functions.get_weather:0"),
        (" functions.a.b:12 ", "a.b", "functions.a.b:12"),
        ("mcp:search:3", "mcp:search", "mcp:search:3"),
        ("functions.get_weather", "get_weather", None),
        ("get_weather", "get_weather", None),
    ],
)
def test_the_id_that_kimi_gives_to_a_call_is_the_calls_id(written: str, name: str, call_id: str | None) -> None:
    scanner, state, found = MessageScanner(tools=TOOLS["kimi_k2"]), ScanState(), Found()
    scanner.feed(state, f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>", found)
    assert [(call.name, call.id) for call in found.calls] == [(name, call_id)]


def test_kimis_own_ids_reach_the_client_streamed_or_not(tmp_path: Path) -> None:
    """Public report: ids of kimi_k2 are thrown away or made anew, though its chat template shows them to the model."""
    tokenizer = byte_level(tmp_path)
    derenderer = Derenderer.load(tmp_path, tool_parser="kimi_k2")
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    chat = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    )
    text = kimi_k2([("f", "{}"), ("g", '{"a": 1}')]).replace("f:0", "f:5").replace("g:1", "g")
    ids = tokenizer.encode(text).ids
    live = Session(derenderer, chat, run="r", id="r", created=0, model="m", prompt_token_ids=[1])
    chunks = [
        live.step(wire.TokenChunk(request_id="r", choices=[wire.TokenChoice(index=0, token_ids=[token])]))
        for token in ids
    ]
    streamed = [call["id"] for chunk in chunks for call in _calls(msgspec.to_builtins(chunk)["choices"][0]["delta"])]
    final = live.final([wire.TokenChoice(index=0, token_ids=ids, finish_reason="stop")]).model_dump(mode="json")
    whole = [call["id"] for call in _calls(final["choices"][0]["message"])]
    assert streamed == whole == ["functions.f:5", "functions.g:1"]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for call in message.get("tool_calls") or [] if call.get("id")]


def pieces(name: str) -> st.SearchStrategy[list[str]]:
    """Markup and other text in any order, whole and broken."""
    markers = sorted({*TOOLS[name].markers, *WRITE[name]([("f", "{}")]).split("{}")} - {""})
    broken = [marker[: len(marker) // 2] for marker in markers] + [marker[1:] for marker in markers]
    texts = [
        "f",
        "functions.g:1",
        '{"a": "b"}',
        '{"a": [1, "',
        '"',
        "\\",
        "{",
        "}",
        "[",
        "\n",
        "``",
        "<",
        " ",
        "é你👩‍👧",
    ]
    return st.lists(st.sampled_from([*markers, *broken, *texts, "<think>", "</think>"]), max_size=14)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_pieces_of_the_same_text_say_the_same(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(pieces(name)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    reasoning = REASONING[data.draw(st.sampled_from(["deepseek_r1", "kimi_k2"]))]
    scanner = MessageScanner(reasoning, TOOLS[name], stop=data.draw(st.sampled_from([(), ("functions", "{")])))
    whole, end = read(scanner, [text])
    cut, cut_end = read(scanner, pieces_of(text, cuts))
    single, single_end = read(scanner, list(text))
    assert whole == cut == single
    assert (end.stopped, end.calls) == (cut_end.stopped, cut_end.calls) == (single_end.stopped, single_end.calls)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_nothing_is_made_up_and_no_start_of_a_section_is_content(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(pieces(name)))
    found = said(text, tools=TOOLS[name])
    written = [arguments for _, arguments in found.calls if arguments != "{}"]
    assert all(arguments in text for arguments in written)
    assert len(found.content) + sum(map(len, written)) <= len(text)
    starts = [start for start in (*TOOLS[name].starts, *TOOLS[name].bare) if start in text]
    assert not any(start in found.content for start in starts)


def test_arguments_are_passed_on_while_they_come_in() -> None:
    scanner, state = MessageScanner(tools=TOOLS["kimi_k2"]), ScanState()
    scanner.feed(state, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", Found())
    for piece in ('{"a', '": ', '"b<|tool', '_call"', "}"):
        found = Found()
        scanner.feed(state, piece, found)
        assert [call.arguments for call in found.calls] == [piece]


STATES: Final = st.fixed_dictionaries(
    {"body": st.just("named")},
    optional={
        "done": st.booleans(),
        "at": st.sampled_from(get_args(At)),
        "raw": st.text(max_size=5),
        "announced": st.booleans(),
        "arguments": st.fixed_dictionaries(
            {},
            optional={
                "at": st.sampled_from(get_args(ArgumentsAt)),
                "value": st.fixed_dictionaries(
                    {},
                    optional={
                        "kind": st.sampled_from(["", "string", "nested", "scalar"]),
                        "depth": st.integers(0, 3),
                        "quoted": st.booleans(),
                        "escaped": st.booleans(),
                    },
                ),
            },
        ),
    },
)


@pytest.mark.parametrize("name", FORMATS)
@given(section=STATES, opened=st.integers(0, 2), data=st.data())
def test_any_state_that_can_be_carried_can_be_read_on_from(
    name: str, section: dict[str, Any], opened: int, data: st.DataObject
) -> None:
    carried = {"phase": "call", "calls": opened, "section": section}
    state = msgspec.json.decode(json.dumps(carried), type=ScanState)
    scanner = MessageScanner(tools=TOOLS[name])
    assert scanner.fits(state)
    for piece in data.draw(pieces(name)):
        found = Found()
        scanner.feed(state, piece, found)
        assert all(call.index >= 0 for call in found.calls)
    scanner.finish(state, Found())


def test_a_state_out_of_bounds_is_refused() -> None:
    for section in ({"raw": "n" * (MAX_NAME + 1)}, {"refused": "x"}, {"at": "there"}, {"arguments": {"at": "there"}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"body": "named", **section}, NamedSection)


BULKS: Final = (
    "word",
    "{",
    '"x',
    "\\",
    " ",
    "\n",
    "<",
    "```",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "',
    "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call",
)


@pytest.mark.parametrize("bulk", BULKS)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_the_state_stays_small_through_any_bulk_of_text(name: str, bulk: str) -> None:
    scanner = MessageScanner(tools=TOOLS[name])
    for start in ("", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"):
        state = ScanState()
        scanner.feed(state, start, Found())
        for _ in range(1000):
            scanner.feed(state, bulk, Found())
            assert len(msgspec.json.encode(state)) < 3 * MAX_NAME


@pytest.mark.parametrize("bulk", BULKS)
@pytest.mark.parametrize("start", ["", "<｜tool▁call▁begin｜>", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```json\n{"a'])
def test_the_time_to_read_a_text_grows_with_its_length_and_no_faster(bulk: str, start: str) -> None:
    scanner = MessageScanner(tools=TOOLS["deepseek_v3"])

    def work(length: int) -> None:
        text = f"{start}{bulk * (length // len(bulk))}<"
        read(scanner, [text])

    assert linear(work, 40_000)
