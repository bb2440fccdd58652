"""Harmony: what an output of messages says, whatever the pieces it comes in and however its headers are written."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from headrace.protocol import ChatCompletionRequest, wire
from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender import Derenderer, Session
from headrace.workers.derender.formats import (
    NONE,
    REASONING,
    TOOLS,
    Declared,
    Found,
    MessageScanner,
    ScanState,
    scanner,
)
from headrace.workers.derender.formats.bodies import HARMONY
from headrace.workers.derender.formats.harmony import HarmonyScanner
from headrace.workers.derender.formats.harmony_header import ENDS, MAX_HEADER
from tests.unit.derender_tokenizer import byte_level
from tests.unit.scanned import Said, linear, pieces_of, read

GPT_OSS, OPENAI = REASONING["openai_gptoss"], TOOLS["openai"]
PROMPT: Final = "<|start|>assistant"
"""What a prompt ends with, so that the output begins within a header."""
FINAL: Final = "<|channel|>final<|message|>"
ANALYSIS: Final = "<|channel|>analysis<|message|>"
CALL: Final = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT: Final = "<|end|><|start|>assistant"


def said(text: str, held: str = PROMPT, declared: Declared = NONE, **formats: Any) -> Said:
    formats = {"reasoning": GPT_OSS, "tools": OPENAI, **formats}
    return read(scanner(**formats), [text], "header", declared, held)[0]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"{FINAL}Hi<|return|>", Said("", "Hi", [])),
        (f"{ANALYSIS}why{NEXT}{FINAL}Hi<|return|>", Said("why", "Hi", [])),
        (f"{ANALYSIS}why{NEXT}{ANALYSIS} not{NEXT}{FINAL}Hi", Said("why not", "Hi", [])),
        (f"{CALL}{{}}<|call|>", Said("", "", [("f", "{}")])),
        (f"{ANALYSIS}why{NEXT}{CALL}{{}}<|call|>", Said("why", "", [("f", "{}")])),
        (f"<|channel|>commentary<|message|>Now:{NEXT}{CALL}{{}}<|call|>", Said("", "Now:", [("f", "{}")])),
        (f'{CALL}{{"a": 1}}<|call|><|start|>assistant{CALL}{{}}', Said("", "", [("f", '{"a": 1}'), ("f", "{}")])),
        (f"{CALL}{{}}<|call|><|start|>assistant{FINAL}Done", Said("", "Done", [("f", "{}")])),
        ("<|message|>Hi", Said("", "Hi", [])),
        ("<|channel|>other<|message|>Hi", Said("", "Hi", [])),
        ("", Said("", "", [])),
    ],
)
def test_the_channel_and_the_recipient_say_what_a_message_is(text: str, right: Said) -> None:
    assert said(text) == right


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        "<|channel|>commentary to=functions.f <|message|>",
        "<|channel|>commentary to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary<|constrain|>json to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f <|constrain|>json<|message|>",
        "<|channel|>final to=functions.f<|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary<|message|>",
        " to=f<|channel|>commentary<|message|>",
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>",
        "<|start|><|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f",
        "<|channel|>commentary to=functions.f <|constrain|>json ",
        "<|return|><|channel|>commentary to=functions.f<|message|>",
        "\n<|channel|> commentary  to=functions.f <|constrain|> json <|message|>\n",
    ],
)
@pytest.mark.parametrize("held", [PROMPT, "", "<|start|>"])
def test_a_call_is_read_wherever_its_header_has_the_recipient(header: str, held: str) -> None:
    role = "assistant" if held == "<|start|>" else ""
    assert said(f'{role}{header}{{"a": 1}}<|call|>', held) == Said("", "", [("f", '{"a": 1}')])


@pytest.mark.parametrize("end", [*ENDS, "<|start|>", "<|end|><|channel|>", "<|channel|>"])
def test_a_message_ends_where_the_next_one_begins_whether_or_not_it_is_closed(end: str) -> None:
    behind = {"<|start|>": f"assistant{FINAL}", "<|channel|>": "final<|message|>"}
    rest = next((text for marker, text in behind.items() if end.endswith(marker)), f"<|start|>assistant{FINAL}")
    assert said(f'{CALL}{{"a": 1}}{end}{rest}Hi') == Said("", "Hi", [("f", '{"a": 1}')])
    assert said(f"{FINAL}One, {end}{rest}two") == Said("", "One, two", [])


def test_markup_within_reasoning_is_text() -> None:
    assert said(f"{ANALYSIS}then {CALL}{{}}{NEXT}{FINAL}Hi") == Said(f"then {CALL}{{}}", "Hi", [])
    assert said(f"{ANALYSIS}to=functions.f {{}}") == Said("to=functions.f {}", "", [])


def test_markup_in_a_string_of_a_calls_arguments_is_text() -> None:
    for marker in HARMONY:
        arguments = json.dumps({"a": f'"{marker}', "b": marker})
        assert said(f"{CALL}{arguments}<|call|><|start|>assistant{FINAL}Hi") == Said("", "Hi", [("f", arguments)])


@pytest.mark.parametrize("kind", ["code", "python"])
def test_arguments_that_are_no_json_run_to_the_end_of_their_message(kind: str) -> None:
    text = f'<|channel|>commentary to=functions.f <|constrain|>{kind}<|message|>[x for x in "ab"] + [{{}}]<|call|>'
    assert said(text).calls == [("f", '[x for x in "ab"] + [{}]')]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<|channel|>commentary to=python<|message|>print()<|call|>", Said("", "", [])),
        ("<|channel|>analysis to=python code<|message|>print()<|call|>", Said("print()", "", [])),
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", Said("", "", [])),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", Said("", "", [])),
        ("<|channel|>final to=user<|message|>Hi<|end|>", Said("", "Hi", [])),
        ("<|channel|>commentary to=no_such_tool<|message|>{}<|call|>", Said("", "", [("no_such_tool", "{}")])),
        ("<|channel|>commentary to=functions.python<|message|>{}<|call|>", Said("", "", [("python", "{}")])),
    ],
)
def test_a_message_to_a_tool_that_is_no_function_is_no_call(text: str, right: Said) -> None:
    assert said(text) == right


def test_a_tool_that_the_request_declares_is_a_function_whatever_its_name() -> None:
    tool = ChatCompletionToolsParam.model_validate({"type": "function", "function": {"name": "python"}})
    text = "<|channel|>commentary to=python<|message|>{}<|call|>"
    assert said(text, declared=Declared([tool])).calls == [("python", "{}")]


@pytest.mark.parametrize("role", ["user", "system", "functions.f to=assistant", "tool", "assist"])
def test_a_message_of_another_role_is_nobodys(role: str) -> None:
    foreign = f"<|start|>{role}<|channel|>commentary<|message|>{{}}"
    text = f"{FINAL}One<|end|>{foreign}<|end|><|start|>assistant{FINAL}, two"
    assert said(text.replace("<|channel|>commentary<|message|>", "<|message|>")).content == "One, two"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a": 1}', Said("", '{"a": 1}', [])),
        (f"Hm.{NEXT}{FINAL}Hi", Said("", "Hm.Hi", [])),
        ("to be or not", Said("", "to be or not", [])),
        ("to=5 is odd", Said("", "to=5 is odd", [])),
        ("t", Said("", "t", [])),
        (f"{FINAL}One<|end|> two", Said("", "One two", [])),
        ("<|channel|>analysis We are", Said("We are", "", [])),
        ("<|channel|>analysisWe are", Said("We are", "", [])),
        ("<|channel|>final Hi<|end|>", Said("", "Hi", [])),
        (f"{FINAL}<|message|>Hi<|constrain|>!", Said("", "Hi!", [])),
        (f"<|channel|>final<|constrain|>json<|message|>{{}}{NEXT}", Said("", "{}", [])),
        (f"<|channel|>analysis<|end|>{PROMPT}{FINAL}Hi", Said("", "Hi", [])),
        (f"<|channel|>final {'x ' * MAX_HEADER}", Said("", "x " * MAX_HEADER, [])),
        (f"<|channel|>analysis {'x ' * MAX_HEADER}<|message|>y", Said(f"{'x ' * MAX_HEADER}<|message|>y", "", [])),
        (f"{' ' * 2 * MAX_HEADER}x", Said("", f"{' ' * 2 * MAX_HEADER}x", [])),
    ],
)
def test_text_whose_header_is_missing_or_never_ends_is_not_lost(text: str, right: Said) -> None:
    assert said(text) == right


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<|chan", []),
        ("<|channel|>comm", []),
        ("<|channel|>commentary to=functions.sea", []),
        ("<|channel|>commentary to=functions.search ", [("search", "")]),
        ("<|channel|>commentary to=functions.search<|chan", [("search", "")]),
        ("<|channel|>commentary to=functions.search <|constrain|>json<|mess", [("search", "")]),
        (f"{CALL}", [("f", "")]),
        (f'{CALL}{{"a": "tru', [("f", '{"a": "tru')]),
        (f'{CALL}{{"a": 1}}<|ca', [("f", '{"a": 1}')]),
        (f"{CALL}<|call|>", [("f", "{}")]),
        ("<|start|>assistant", []),
        ("<|start|>assis", []),
        ("<|end|>", []),
    ],
)
@pytest.mark.parametrize("held", [PROMPT, ""])
def test_an_output_that_is_cut_keeps_what_was_written_of_a_call_and_leaks_no_header(
    text: str, calls: list[tuple[str, str]], held: str
) -> None:
    assert said(text, held) == Said("", "", calls)


def test_a_cut_marker_within_a_message_is_its_text() -> None:
    assert said(f"{FINAL}Hi <|chan").content == "Hi <|chan"
    assert said(f"{ANALYSIS}Hm <|en").reasoning == "Hm <|en"


def test_harmony_is_read_where_only_one_of_its_formats_is_set() -> None:
    text = f"{ANALYSIS}why{NEXT}<|channel|>commentary<|message|>Now{NEXT}{CALL}{{}}<|call|>"
    assert said(text, tools=None) == Said("why", "Now", [])
    assert said(text, reasoning=None) == Said("", "Now", [("f", "{}")])


def test_white_space_alone_before_a_call_is_no_content_and_any_other_text_around_calls_is() -> None:
    assert said(f"{FINAL}\n<|end|><|start|>assistant{CALL}{{}}<|call|>") == Said("", "", [("f", "{}")])
    text = f"{FINAL}One<|end|>{PROMPT}{CALL}{{}}<|call|>{PROMPT}{FINAL}, two"
    assert said(text) == Said("", "One, two", [("f", "{}")])


@pytest.mark.parametrize(("include", "content"), [(False, "one "), (True, "one END")])
def test_content_ends_at_a_stop_string_and_reasoning_does_not(include: bool, content: str) -> None:
    text = f"{ANALYSIS}END{NEXT}{FINAL}one END two<|end|>{PROMPT}{CALL}{{}}"
    reader = scanner(GPT_OSS, OPENAI, stop=("END",), include_stop=include)
    right, state = read(reader, list(text), "header", held=PROMPT)
    assert (right, state.stopped) == (Said("END", content, []), "END")


def test_text_is_passed_on_while_it_comes_in() -> None:
    reader, state = scanner(GPT_OSS, OPENAI), ScanState(phase="header", held=PROMPT)
    for text in (CALL, "{", '"a": "<|cal', "l|>", '"}', "<|call|>", PROMPT, ANALYSIS, "why", NEXT, FINAL, "Hi", " you"):
        found = Found()
        reader.feed(state, text, found)
        arguments = "".join(call.arguments for call in found.calls)
        given = arguments + "".join(found.reasoning) + "".join(found.content)
        assert given == ("" if text in (CALL, "<|call|>", PROMPT, ANALYSIS, NEXT, FINAL) else text)


PIECES: Final = st.lists(
    st.sampled_from(
        [
            *HARMONY,
            *HARMONY,
            PROMPT,
            FINAL,
            ANALYSIS,
            CALL,
            "assistant",
            "analysis",
            "commentary",
            "final",
            " to=functions.g",
            "to=",
            " to=python",
            "json",
            '{"a": [1, "}"]}',
            '"',
            "\\",
            "{",
            "}",
            "<",
            "<|",
            "<|end",
            "<|channel",
            " ",
            "\n" * 20,
            "word",
            "x" * 90,
            "stop",
            "é你👩‍👧",
        ]
    ),
    max_size=16,
)
HELD: Final = st.sampled_from(
    [PROMPT, "", "<|start|>", f"{PROMPT}{ANALYSIS}", f"{PROMPT}{FINAL}", f"{PROMPT}<|channel|>"]
)


@given(
    parts=PIECES,
    cuts=st.lists(st.integers(0, 400), max_size=12),
    held=HELD,
    reasoning=st.sampled_from([GPT_OSS, None]),
    stop=st.sampled_from([(), ("stop",), ("word", "}"), ("ordst",)]),
)
def test_any_pieces_of_the_same_text_say_the_same(
    parts: list[str], cuts: list[int], held: str, reasoning: Any, stop: tuple[str, ...]
) -> None:
    text = "".join(parts)
    reader = scanner(reasoning, OPENAI, stop=stop)
    whole, end = read(reader, [text], "header", held=held)
    cut, cut_end = read(reader, pieces_of(text, cuts), "header", held=held)
    single, single_end = read(reader, list(text), "header", held=held)
    assert whole == cut == single
    assert (end.stopped, end.calls) == (cut_end.stopped, cut_end.calls) == (single_end.stopped, single_end.calls)


@given(parts=PIECES, held=HELD)
def test_no_text_is_said_twice_or_made_up_and_no_marker_is_content(parts: list[str], held: str) -> None:
    text = "".join(parts)
    found = said(text, held)
    assert not any(marker in found.content for marker in HARMONY)
    written = [arguments for _, arguments in found.calls if arguments != "{}"]
    assert all(arguments in text for arguments in written)
    assert len(found.content) + len(found.reasoning) + sum(map(len, written)) <= len(held + text)


@given(
    thought=st.text(max_size=30),
    answer=st.text(max_size=30),
    arguments=st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_any_message_comes_through(thought: str, answer: str, arguments: dict[str, str], cuts: list[int]) -> None:
    thought, answer = thought.replace("<|", ""), f"So: {answer.replace('<|', '')}"
    written = json.dumps(arguments, ensure_ascii=False)
    text = f"{ANALYSIS}{thought}{NEXT}{CALL}{written}<|call|>{PROMPT}{FINAL}{answer}<|return|>"
    right = Said(thought, answer, [("f", written)])
    assert read(scanner(GPT_OSS, OPENAI), pieces_of(text, cuts), "header", held=PROMPT)[0] == right


STATES: Final = st.fixed_dictionaries(
    {"phase": st.sampled_from(["header", "reasoning", "content", "other"])},
    optional={"held": st.text(max_size=20) | HELD, "content": st.sampled_from(["", "begun", "over"])},
)


@given(carried=STATES, within=st.booleans(), at=st.sampled_from(["name", "between", "arguments"]), parts=PIECES)
def test_any_state_that_can_be_carried_can_be_read_on_from(
    carried: dict[str, Any], within: bool, at: str, parts: list[str]
) -> None:
    if within:
        carried = carried | {"phase": "call", "section": {"body": "named", "at": at}}
    state = msgspec.json.decode(json.dumps(carried), type=ScanState)
    reader = scanner(GPT_OSS, OPENAI)
    assert reader.fits(state)
    for part in parts:
        reader.feed(state, part, Found())
    reader.finish(state, Found())


def test_a_state_belongs_to_the_scanner_that_made_it() -> None:
    harmony, message = HarmonyScanner(GPT_OSS, OPENAI), MessageScanner(REASONING["qwen3"], TOOLS["kimi_k2"])
    for phase in ("header", "other"):
        assert harmony.fits(ScanState(phase=phase))
        assert not message.fits(ScanState(phase=phase))
    assert not harmony.fits(ScanState(phase="between"))
    calling = ScanState(phase="call")
    assert not harmony.fits(calling)
    scanner(None, TOOLS["hermes"]).feed(within := ScanState(), "<tool_call>", Found())
    assert not harmony.fits(within)
    harmony.feed(within := ScanState(phase="header"), CALL, Found())
    assert harmony.fits(within)
    assert not HarmonyScanner(GPT_OSS).fits(within)


@pytest.fixture(scope="module", params=["tokens", "text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Derenderer, Tokenizer]:
    """A model of Harmony, with its markers as tokens of their own or as text like any other."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_level(folder)
    if request.param == "tokens":
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in HARMONY])
        tokenizer.save(str(folder / "tokenizer.json"))
    return Derenderer.load(folder, tool_parser="openai", reasoning_parser="openai_gptoss"), tokenizer


def answer(model: tuple[Derenderer, Tokenizer], prompt: str, text: str, **asked: Any) -> tuple[Said, str | None]:
    """What the whole output says, and its finish reason."""
    derenderer, tokenizer = model
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        **asked,
    }
    output = wire.TokenChoice(index=0, token_ids=tokenizer.encode(text).ids, finish_reason="stop")
    live = Session(
        derenderer,
        ChatCompletionRequest.model_validate(chat),
        run="r",
        id="r",
        created=0,
        model="m",
        prompt_token_ids=tokenizer.encode(prompt).ids,
    )
    choice = live.final([output]).model_dump(mode="json")["choices"][0]
    message, calls = choice["message"], [call["function"] for call in choice["message"].get("tool_calls") or []]
    written = [(call["name"], call["arguments"]) for call in calls]
    return Said(message["reasoning"] or "", message["content"] or "", written), choice["finish_reason"]


TURN: Final = "<|start|>system<|message|>Reasoning: high<|end|><|start|>user<|message|>hi<|end|>"


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        (f"{TURN}<|start|>assistant", f"{ANALYSIS}why{NEXT}{FINAL}Hi", "why", "Hi"),
        (f"{TURN}<|start|>assistant", "Hi", "", "Hi"),
        (f"{TURN}<|start|>", f"assistant{FINAL}Hi", "", "Hi"),
        (TURN, f"<|start|>assistant{FINAL}Hi", "", "Hi"),
        (TURN, f"{FINAL}Hi", "", "Hi"),
        (f"{TURN}<|start|>assistant<|channel|>", f"analysis<|message|>why{NEXT}{FINAL}Hi", "why", "Hi"),
        (f"{TURN}<|start|>assistant{ANALYSIS}", f"why{NEXT}{FINAL}Hi", "why", "Hi"),
        (f"{TURN}<|start|>assistant{ANALYSIS}I see", f" why{NEXT}{FINAL}Hi", " why", "Hi"),
        (f"{TURN}<|start|>assistant{ANALYSIS}<|end|>", f"<|start|>assistant{FINAL}Hi", "", "Hi"),
        (f"{TURN}<|start|>assistant{FINAL}", "Hi<|return|>", "", "Hi"),
        ("no Harmony", f"{FINAL}Hi", "", "Hi"),
        (f"{TURN}<|start|>{'x ' * MAX_HEADER}", f"<|start|>assistant{FINAL}Hi", "", "Hi"),
    ],
)
def test_an_output_goes_on_where_its_prompt_ended(
    model: tuple[Derenderer, Tokenizer], prompt: str, text: str, reasoning: str, content: str
) -> None:
    assert answer(model, prompt, text) == (Said(reasoning, content, []), "stop")


def test_a_call_that_the_prompt_began_is_named_with_its_first_arguments(model: tuple[Derenderer, Tokenizer]) -> None:
    right = (Said("", "", [("f", '{"a": 1}')]), "tool_calls")
    assert answer(model, f"{TURN}<|start|>assistant{CALL}", '{"a": 1}<|call|>') == right


@pytest.mark.parametrize(
    ("asked", "calls", "finish"),
    [({"tool_choice": "none"}, [], "stop"), ({"tools": None}, [("f", "{}")], "tool_calls")],
)
def test_a_call_that_the_request_forbids_is_dropped_but_not_one_that_it_says_nothing_about(
    model: tuple[Derenderer, Tokenizer], asked: dict[str, Any], calls: list[tuple[str, str]], finish: str
) -> None:
    text = f"{ANALYSIS}why{NEXT}{CALL}{{}}<|call|>{PROMPT}{FINAL}Hi"
    assert answer(model, f"{TURN}{PROMPT}", text, **asked) == (Said("why", "Hi", calls), finish)


def test_a_header_of_hidden_reasoning_counts_as_reasoning_before_its_end_is_seen() -> None:
    reader, state = scanner(GPT_OSS, OPENAI), ScanState(phase="header", held=PROMPT)
    reader.feed(state, "<|channel|>analysis We are", Found())
    assert state.thinking
    reader.feed(state, f"{NEXT}<|channel|>final", Found())
    assert not state.thinking


@given(ids=st.lists(st.lists(st.integers(-1, 400), max_size=6), max_size=8), data=st.data())
def test_any_tokens_are_answered(
    model: tuple[Derenderer, Tokenizer], ids: list[list[int]], data: st.DataObject
) -> None:
    """Public report: outputs of gpt-oss raise a HarmonyError in their streams."""
    derenderer, tokenizer = model
    markers = [tokenizer.token_to_id(marker) for marker in HARMONY if tokenizer.token_to_id(marker) is not None]
    chat = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    live = Session(derenderer, chat, run="r", id="r", created=0, model="m", prompt_token_ids=[1])
    for chunk in ids:
        token_ids = [data.draw(st.sampled_from([token, *markers])) for token in chunk]
        choice = wire.TokenChoice(index=0, token_ids=token_ids)
        assert len(live.step(wire.TokenChunk(request_id="r", choices=[choice])).choices) == 1


BULKS: Final = ("word", '"', "{", "\\", "<", "<|", " ", *HARMONY, PROMPT, FINAL, CALL, f"{FINAL}x", "to=functions.f ")


@pytest.mark.parametrize("bulk", BULKS)
@pytest.mark.parametrize("start", ["", "<|channel|>", FINAL, ANALYSIS, f'{CALL}{{"a": "'])
def test_the_state_stays_small_through_any_bulk_of_text(bulk: str, start: str) -> None:
    reader, state = scanner(GPT_OSS, OPENAI, stop=("a stop string",)), ScanState(phase="header", held=PROMPT)
    reader.feed(state, start, Found())
    for _ in range(600):
        reader.feed(state, bulk, Found())
        assert len(msgspec.json.encode(state)) < 1000


@pytest.mark.parametrize("bulk", [*BULKS, "<|channel|>x ", f"<|channel|>{'x' * MAX_HEADER}", f"{' ' * 240}<|start|>"])
@pytest.mark.parametrize("start", ["", "<|channel|>", ANALYSIS, f'{CALL}{{"a": "'])
def test_the_time_to_read_a_text_grows_with_its_length_and_no_faster(bulk: str, start: str) -> None:
    reader = scanner(GPT_OSS, OPENAI, stop=("</x>",))

    def work(length: int) -> None:
        text = f"{start}{bulk * (length // len(bulk))}<"
        read(reader, [text], "header")

    assert linear(work, 40_000)
