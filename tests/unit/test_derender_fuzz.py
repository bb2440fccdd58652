"""Whatever is sent, the answer is an answer or a clean refusal, and the work is in proportion to what was sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from pydantic import ValidationError

from headrace.protocol import (
    BadRequest,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    bad_request,
)
from headrace.protocol.tools import ChatCompletionToolsParam
from headrace.workers.derender import Derenderer
from headrace.workers.derender.formats import TOOLS, Declared, Found, Scanner, ScanState, scanner
from tests.unit.derender_formats import DECLARED, REASONING_NAMES, TOOL_NAMES, Formats, markers, outputs, written
from tests.unit.scanned import linear

LONG: Final = 32_768
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": DECLARED, "stop": ["}x", "é"]}
COMPLETION = {"model": "m", "prompt": "hi", "stop": ["}x", "é"]}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PAIR = st.tuples(st.none() | st.sampled_from(TOOL_NAMES), st.none() | st.sampled_from(REASONING_NAMES))


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Formats:
    return Formats(tmp_path_factory.mktemp("formats"))


def ask(derenderer: Derenderer, door: str, body: bytes) -> dict[str, Any] | None:
    """The answer as JSON; None for a refusal, which has the spec's body. Nothing else may come."""
    try:
        match door:
            case "chat":
                answer: Any = derenderer.chat(DerenderChatRequest.model_validate_json(body))
            case "chat_stream":
                answer = derenderer.chat_stream(DerenderChatStreamRequest.model_validate_json(body))
            case "completion":
                answer = derenderer.completion(DerenderCompletionRequest.model_validate_json(body))
            case _:
                answer = derenderer.completion_stream(DerenderCompletionStreamRequest.model_validate_json(body))
    except (ValidationError, BadRequest) as refused:
        error = bad_request(refused) if isinstance(refused, ValidationError) else refused
        assert error.error.model_dump().keys() == {"error"}
        assert error.status == 400
        return None
    told = json.loads(answer.model_dump_json())
    assert isinstance(told, dict)
    return told


# ------------------------------------------------------------------------------------------ states


def leaves(of: inspect.Type, path: str = "") -> Iterator[tuple[str, inspect.Type]]:
    """The fields of a carried value that are no Structs themselves."""
    if isinstance(of, inspect.StructType):
        for field in of.fields:
            yield from leaves(field.type, f"{path}.{field.encode_name}")
    elif isinstance(of, inspect.UnionType):
        for number, kind in enumerate(of.types):
            yield from leaves(kind, f"{path}|{number}")
    else:
        yield path, of


def test_everything_that_a_scan_carries_is_bounded() -> None:
    characters = 0
    for path, kind in leaves(inspect.type_info(ScanState)):
        match kind:
            case inspect.StrType() if path.endswith(".refused"):
                pass  # says something within a step alone; a state that has it is refused
            case inspect.StrType():
                assert kind.max_length is not None, path
                characters += kind.max_length
            case inspect.IntType():
                assert (kind.ge, kind.le) != (None, None), path
            case _:
                assert isinstance(kind, inspect.BoolType | inspect.NoneType | inspect.LiteralType), path
    assert characters < 1 << 20


def values(of: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type as they come over the wire, mostly."""
    match of:
        case inspect.StructType():
            fields = {field.encode_name: st.one_of(values(field.type), values(field.type), JSON) for field in of.fields}
            tag = {} if of.tag_field is None else {of.tag_field: st.just(of.tag)}
            return st.fixed_dictionaries(tag, optional=fields)
        case inspect.UnionType():
            return st.one_of([values(kind) for kind in of.types])
        case inspect.LiteralType():
            return st.sampled_from(of.values)
        case inspect.StrType():
            return st.sampled_from(["", "<", '"', "{", "f", "\\", "</tool_", '{"a"', "x", "é", " "]) | st.text(
                max_size=4
            )
        case inspect.IntType():
            return st.integers(-1, 6) | st.sampled_from([of.le or 0, 1 << 40, 1 << 62, 1 << 70])
        case inspect.BoolType():
            return st.booleans()
    return st.none()


STATE = st.fixed_dictionaries(
    {},
    optional={
        "prev_tokens": st.lists(st.text(max_size=6), max_size=6),
        "prefix_offset": st.integers(-1, 8),
        "read_offset": st.integers(-1, 8),
        "role_sent": st.booleans(),
        "logprob_context_token_ids": st.lists(st.integers(), max_size=5),
        "logprob_text_offset": st.integers(),
        "output_token_ids": st.lists(st.integers(-5, 400), max_size=5),
        "output_chunk_lens": st.lists(st.integers(0, 5), max_size=3),
        "tools_streamed": st.booleans(),
        "last_tool_call_ids": st.lists(st.text(max_size=4), max_size=3),
        "scan": values(inspect.type_info(ScanState)) | st.dictionaries(st.text(max_size=5), JSON, max_size=3),
        "of_next_year": JSON,
    },
)


@given(pair=PAIR, state=STATE, output=outputs(), finish_reason=st.sampled_from([None, "stop"]))
@settings(deadline=None, max_examples=300)
def test_any_state_is_answered_or_refused_and_what_is_answered_can_be_continued(
    formats: Formats,
    pair: tuple[str | None, str | None],
    state: dict[str, Any],
    output: tuple[str | None, str | None, str],
    finish_reason: str | None,
) -> None:
    derenderer = formats.derenderer(*pair)
    for door, request in (
        ("chat_stream", {"chat_request": CHAT}),
        ("completion_stream", {"completion_request": COMPLETION}),
    ):
        choice = {"index": 0, "token_ids": formats.ids(output[2]), "finish_reason": finish_reason}
        body = {"stream": True, "prompt_token_ids": [1], "stream_state": state, **request}
        first = ask(derenderer, door, json.dumps({**body, "generate_chunk": {"choices": [choice]}}).encode())
        if first is None:
            continue
        carried = first["stream_state"]
        carried.get("scan", {}).pop("tokens", None)  # else the model's length may be used up
        more = {"index": 0, "token_ids": formats.ids("x"), "finish_reason": "stop"}
        again = {**body, "stream_state": carried, "generate_chunk": {"choices": [more]}}
        assert ask(derenderer, door, json.dumps(again).encode()) is not None


@given(pair=PAIR, output=outputs(), data=st.data())
@settings(deadline=None, max_examples=200)
def test_a_state_with_random_bytes_in_it_is_answered_or_refused(
    formats: Formats,
    pair: tuple[str | None, str | None],
    output: tuple[str | None, str | None, str],
    data: st.DataObject,
) -> None:
    derenderer = formats.derenderer(*output[:2])
    chunk = {"choices": [{"index": 0, "token_ids": formats.ids(output[2])}]}
    rest = {"stream": True, "prompt_token_ids": [1], "chat_request": CHAT, "generate_chunk": chunk}
    first = ask(derenderer, "chat_stream", json.dumps(rest).encode())
    assert first is not None
    state = bytearray(json.dumps(first["stream_state"]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(state) - 1))
        state[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    body = json.dumps({**rest, "stream_state": "HERE"}).encode().replace(b'"HERE"', bytes(state))
    ask(derenderer, "chat_stream", body)
    ask(formats.derenderer(*pair), "chat_stream", body)  # and by a model of other formats


@pytest.mark.parametrize("door", ["chat", "chat_stream", "completion", "completion_stream"])
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_body_of_random_bytes_is_refused(formats: Formats, door: str, body: bytes) -> None:
    assert ask(formats.derenderer("hermes", "qwen3"), door, body) is None


# ------------------------------------------------------------------------------------------ chunks

IDS = st.lists(st.integers(0, 400) | st.sampled_from([-1, 1 << 31, 1 << 40, 1 << 63, 1 << 70]), max_size=30)
LOGPROB = st.fixed_dictionaries(
    {"token_id": st.integers(-1, 400), "logprob": st.floats(max_value=0, allow_infinity=False)},
    optional={
        "top_logprobs": st.lists(st.fixed_dictionaries({"token_id": st.integers(0, 400), "logprob": st.just(-1)}))
    },
)
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(-1, 3) | st.just(1 << 70)},
    optional={
        "token_ids": st.none() | IDS,
        "finish_reason": st.none() | st.text(max_size=6),
        "stop_reason": st.none() | st.integers() | st.text(max_size=3),
        "logprobs": st.none()
        | st.fixed_dictionaries({}, optional={"content": st.none() | st.lists(LOGPROB, max_size=3)}),
        "routed_experts": st.none() | st.text(max_size=3),
        "sampling_mask": st.none() | st.lists(IDS, max_size=2),
        "of_next_year": JSON,
    },
)
CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, max_size=2)},
    optional={
        "request_id": st.text(max_size=4),
        "usage": st.none() | st.fixed_dictionaries({}, optional={"prompt_tokens": st.integers(), "total_tokens": JSON}),
        "prompt_token_ids": st.none() | IDS,
        "metrics": st.none() | st.fixed_dictionaries({}, optional={"queue_time_ms": st.floats(allow_nan=False)}),
        "prompt_logprobs": JSON,
        "of_next_year": JSON,
    },
)
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "include_reasoning": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "echo": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 400), max_size=3),
        "max_tokens": st.integers(0, 3),
        "logprobs": st.booleans() | st.integers(0, 2),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["enable_thinking", "thinking", "x"]), JSON, max_size=2
        ),
    },
)


@given(pair=PAIR, chunk=CHUNK, asked=ASKED, prompt=st.none() | IDS, prompt_tokens=st.none() | st.integers(-1, 9))
@settings(deadline=None, max_examples=400)
def test_any_chunk_is_answered_or_refused_at_every_door(
    formats: Formats,
    pair: tuple[str | None, str | None],
    chunk: dict[str, Any],
    asked: dict[str, Any],
    prompt: list[int] | None,
    prompt_tokens: int | None,
) -> None:
    derenderer = formats.derenderer(*pair)
    chat, completion = {"chat_request": CHAT | asked}, {"completion_request": COMPLETION | asked}
    rest = {"prompt_token_ids": prompt, "prompt_tokens": prompt_tokens}
    several = {name: None if value is None else [value, value] for name, value in rest.items()}
    for door, body in (
        ("chat", {"generate_response": chunk, **rest, **chat}),
        ("chat_stream", {"stream": True, "generate_chunk": chunk, **rest, **chat}),
        ("completion", {"generate_responses": [chunk, chunk], **several, **completion}),
        ("completion_stream", {"stream": True, "generate_chunk": chunk, **rest, **completion}),
    ):
        ask(derenderer, door, json.dumps(body).encode())


@given(pair=PAIR, ids=st.lists(st.integers(0, 400) | st.integers(0, 2**40), max_size=60))
@settings(deadline=None)
def test_any_token_ids_are_answered(formats: Formats, pair: tuple[str | None, str | None], ids: list[int]) -> None:
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
    body = {"generate_response": {"choices": [choice]}, "chat_request": CHAT, "prompt_token_ids": ids[:5]}
    assert ask(formats.derenderer(*pair), "chat", json.dumps(body).encode()) is not None


# ------------------------------------------------------------------------------------------ bulk

BULK = ('"', "\\", "{", "[", "(", "'", "<", " ", "\n", "a", "f(", '"a":', '{"a":', "a=", "1,", '{"name":"', "\\u", "、")
ARGUMENTS = {"a": "x" * 8, "o": "y"}


def bulks(tools: str, reasoning: str | None = None) -> Iterator[tuple[str, str]]:
    """What a text of this format begins with, and what it then repeats: built to make a scanner read again."""
    call = written(tools, "f", ARGUMENTS)
    name, argument = call.find("f"), call.find("xxxx")
    repeated = (*BULK, *(part for marker in markers(tools, reasoning) for part in (marker, marker[:-1]) if part))
    for start in dict.fromkeys(("", call[: name + 1], call[:argument], call[: argument + 4])):
        for bulk in dict.fromkeys(repeated):
            yield start, bulk
    yield "", call


DECLARED_TOOLS: Final = Declared([ChatCompletionToolsParam.model_validate(tool) for tool in DECLARED])


def scan(scan: Scanner, pieces: Iterable[str]) -> int:
    """How many characters were read, those that had been held back read again."""
    state, read = ScanState(), 0
    for piece in pieces:
        read += len(state.held) + len(piece)
        scan.feed(state, piece, Found(), DECLARED_TOOLS)
    scan.finish(state, Found(), DECLARED_TOOLS)
    return read


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_text_in_small_pieces_is_read_a_bounded_number_of_times(tools: str) -> None:
    """Some formats look again at a window of what came before; no more than that, however long the text."""
    scans, length = scanner(tools=TOOLS[tools]), 700
    for start, bulk in bulks(tools):
        text = (start + bulk * length)[: len(start) + length]
        assert scan(scans, text) <= 200 * len(text), (start, bulk)


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_outputs_of_32768_hostile_tokens_are_answered(formats: Formats, tools: str) -> None:
    derenderer, prompt = formats.derenderer(tools, "qwen3"), formats.ids("</think>")
    for start, bulk in list(bulks(tools, "qwen3"))[::17]:
        opening, repeated = formats.ids(start), formats.ids(bulk)
        ids = (opening + repeated * LONG)[:LONG]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "length"}
        body = {"generate_response": {"choices": [choice]}, "chat_request": CHAT, "prompt_token_ids": prompt}
        told = derenderer.chat(DerenderChatRequest.model_validate(body))
        assert told.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_the_work_for_a_whole_text_grows_with_its_length_and_no_faster(tools: str) -> None:
    """A text of four times the length takes four times the work; were any part of it squared, sixteen times."""
    scans = scanner(tools=TOOLS[tools])
    for start, bulk in bulks(tools):

        def work(length: int, start: str = start, bulk: str = bulk) -> None:
            scan(scans, [(start + bulk * length)[: len(start) + length]])

        # A scanner that gives a call up behind some length does more from there on.
        assert any(linear(work, length, tries=2) for length in (6000, 24_000, 48_000)), (start, bulk)
