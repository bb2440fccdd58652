"""States that travel between chunks: their bounds, ours and those to be replayed, and how streams change hands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from headrace.protocol import (
    BadRequest,
)
from headrace.workers.derender import Derenderer
from tests.unit.derender_tokenizer import byte_level
from tests.unit.small_chat import CHAT, chat_step, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return byte_level(folder)


@pytest.fixture(scope="module")
def plain(folder: Path, tokenizer: Tokenizer) -> Derenderer:
    return Derenderer.load(folder)


@pytest.fixture(scope="module")
def parsing(folder: Path, tokenizer: Tokenizer) -> Derenderer:
    return Derenderer.load(folder, tool_parser="hermes", reasoning_parser="qwen3", max_model_len=100)


@pytest.mark.parametrize(
    ("state", "param", "message"),
    [
        ({"read_offset": 1}, "read_offset", r"read_offset \(1\) must be from 0 to 0"),
        ({"prev_tokens": ["a"], "prefix_offset": 1}, "prefix_offset", r"from 0 to read_offset \(0\)"),
        ({"prev_tokens": ["a" * 5000]}, "prev_tokens", "holds a token of 5000 characters, more than 4096"),
        ({"logprob_text_offset": 1 << 50}, "logprob_text_offset", "must be from 0 to"),
        ({"last_tool_call_ids": ["a"] * 20_000}, "last_tool_call_ids", r"length \(20000\) exceeds maximum"),
        ({"last_tool_call_ids": ["a" * 3000]}, "last_tool_call_ids", "holds an id of 3000 characters, more than 2048"),
        ({"scan": {"phase": "call", "section": {"body": "json", "done": True}}}, "scan", "its section is over"),
        ({"scan": {"phase": "call", "section": {"body": "json", "refused": "x"}}}, "scan", "its section is over"),
        ({"scan": {"phase": "call"}}, "scan", "its phase and its section disagree"),
        ({"scan": {"section": {"body": "json"}}}, "scan", "its phase and its section disagree"),
        ({"scan": {"v": 2}}, "scan", "Invalid enum value 2"),
        ({"scan": {"phase": "singing"}}, "scan", "Invalid enum value 'singing'"),
        ({"scan": {"held": "x" * 100_000}}, "scan", "length <= "),
        ({"scan": {"tokens": -1}}, "scan", ">= 0"),
        ({"scan": {"phase": "call", "section": {"body": "json", "value": {"depth": -1}}}}, "scan", ">= 0"),
        ({"scan": {"tokens": 1 << 60}}, "scan", "<= "),
    ],
)
def test_a_state_out_of_bounds_is_refused_by_field(
    parsing: Derenderer, state: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        chat_step(parsing, tokens({"index": 0, "token_ids": [5]}), stream_state=state)
    assert caught.value.param == f"stream_state.{param}"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "state",
    [
        {"prev_tokens": ["a"] * 1025},
        {"prefix_offset": -1},
        {"logprob_context_token_ids": [1] * 5},
        {"output_token_ids": [1, 2], "output_chunk_lens": [1]},
        {"output_chunk_lens": [0]},
        {"scan": 7},
    ],
)
def test_a_state_of_the_wrong_shape_is_refused_at_the_door(parsing: Derenderer, state: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat_step(parsing, tokens(), stream_state=state)


def test_a_state_within_a_call_needs_a_request_with_tools(parsing: Derenderer) -> None:
    state = {"scan": {"phase": "call", "section": {"body": "json"}}}
    chat_step(parsing, tokens(), stream_state=state)
    with pytest.raises(BadRequest, match="not in a format that the request allows"):
        chat_step(parsing, tokens(), stream_state=state, chat_request={**CHAT, "tool_choice": "none"})


def test_a_state_of_a_leading_usage_chunk_is_still_a_fresh_one(parsing: Derenderer, tokenizer: Tokenizer) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    first = chat_step(parsing, tokens(usage=usage), prompt_tokens=5)
    assert (first.chunk.choices, first.chunk.usage and first.chunk.usage.total_tokens) == ([], 5)
    chunk = tokens({"index": 0, "token_ids": tokenizer.encode("why").ids})
    fresh = {"role_sent": False}  # what a replaying implementation answers to such a chunk
    for state in (first.stream_state, fresh, None):
        choice = chat_step(parsing, chunk, stream_state=state).chunk.choices[0]
        assert (choice.delta.role, choice.delta.reasoning) == ("assistant", "why")


def test_a_state_without_a_scan_goes_on_where_only_stop_strings_are_looked_for(
    plain: Derenderer, tokenizer: Tokenizer
) -> None:
    one = chat_step(plain, tokens({"index": 0, "token_ids": tokenizer.encode("one ").ids}))
    assert one.stream_state.scan is None
    body = {**CHAT, "stop": ["tw"]}
    two = tokens({"index": 0, "token_ids": tokenizer.encode("and two").ids, "finish_reason": "stop"})
    done = chat_step(plain, two, stream_state=one.stream_state, chat_request=body).chunk.choices[0]
    assert (done.delta.content, done.stop_reason) == ("and ", "tw")


def test_a_carried_state_is_plain_json_of_a_few_hundred_bytes(parsing: Derenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('</think><tool_call>{"name": "f", "arguments": {"a": "x').ids
    state = chat_step(parsing, tokens({"index": 0, "token_ids": ids})).stream_state
    assert len(msgspec.json.encode(json.loads(state.model_dump_json()))) < 700


# ------------------------------------------------------------------------------------------ states to be replayed

CALL = '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def replaying(parsing: Derenderer) -> Derenderer:
    return Derenderer(parsing.core, state_mode="replay")


def steps(
    derenderer: Derenderer, ids: list[int], state: Any = None, finish_reason: str | None = None
) -> tuple[list[Any], Any]:
    """The deltas of chunks of two tokens each, and the state behind them."""
    deltas = []
    for at in range(0, len(ids), 2):
        last = at + 2 >= len(ids)
        choice = {"index": 0, "token_ids": ids[at : at + 2], "finish_reason": finish_reason if last else None}
        done = chat_step(derenderer, tokens(choice), stream_state=state)
        state = json.loads(done.stream_state.model_dump_json())
        deltas.append(done.chunk.choices[0])
    return deltas, state


def begun(deltas: list[Any]) -> list[tuple[str, str]]:
    """Ids and names of the calls that the deltas begin."""
    calls = (call for choice in deltas for call in choice.delta.tool_calls)
    return [(call.id, call.function.name) for call in calls if call.id is not None]


def test_a_state_to_be_replayed_holds_the_output_its_chunks_and_the_ids_of_its_calls(
    replaying: Derenderer, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(f"why</think>{CALL}").ids
    deltas, state = steps(replaying, ids)
    assert state["output_token_ids"] == ids
    assert state["output_chunk_lens"] == [2] * (len(ids) // 2) + [1] * (len(ids) % 2)
    assert (state["role_sent"], state["tools_streamed"]) == (True, True)
    assert state["last_tool_call_ids"] == [call_id for call_id, _ in begun(deltas)]
    again = chat_step(replaying, tokens({"index": 0, "token_ids": []}), stream_state=state).stream_state
    assert again.output_chunk_lens == state["output_chunk_lens"]


def test_a_replayed_state_goes_on_compactly(parsing: Derenderer, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("why</think>so ").ids
    state = {"output_token_ids": output, "output_chunk_lens": [len(output)], "role_sent": True}
    deltas, after = steps(parsing, tokenizer.encode("there").ids, state)
    assert "".join(choice.delta.content for choice in deltas) == "there"
    assert (after["output_token_ids"], after["scan"]["tokens"]) == (
        [],
        len(output) + len(tokenizer.encode("there").ids),
    )


def test_a_call_that_was_told_before_is_not_begun_again_and_one_that_was_not_is(
    parsing: Derenderer, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode(f'</think>{CALL}<tool_call>{{"name": "f", "arg').ids
    state = {"output_token_ids": output, "output_chunk_lens": [len(output)], "role_sent": True, "tools_streamed": True}
    rest = tokenizer.encode('uments": {}}</tool_call>').ids
    both, _ = steps(parsing, rest, {**state, "last_tool_call_ids": ["a", "b"]}, "stop")
    assert begun(both) == []
    one, _ = steps(parsing, rest, {**state, "last_tool_call_ids": ["a"]}, "stop")
    assert [name for _, name in begun(one)] == ["f"]
    none, _ = steps(parsing, rest, {**state, "last_tool_call_ids": []}, "stop")
    assert [name for _, name in begun(none)] == ["f", "f"]
    arguments = [call.function.arguments for choice in none for call in choice.delta.tool_calls if call.index == 0]
    assert json.loads("".join(arguments)) == {"city": "Paris"}


def test_a_call_that_others_told_of_before_we_see_it_begin_is_begun_once(
    parsing: Derenderer, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode('</think><tool_call>{"na').ids
    state = {"output_token_ids": output, "output_chunk_lens": [len(output)], "last_tool_call_ids": ["a"]}
    deltas, between = steps(parsing, tokenizer.encode('me": ').ids, state)
    assert between["last_tool_call_ids"] == ["a"]
    rest, after = steps(parsing, tokenizer.encode('"f", "arguments": {}}</tool_call>').ids, between)
    assert begun([*deltas, *rest]) == []
    assert [call.function.arguments for choice in rest for call in choice.delta.tool_calls if call.function.arguments]
    assert after["last_tool_call_ids"] == []  # of no more use, so not carried on


def test_calls_that_are_still_to_be_told_wait_for_a_chunk_that_can_tell_them(
    parsing: Derenderer, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode(f"</think>{CALL}").ids
    state = {"output_token_ids": output, "output_chunk_lens": [len(output)], "role_sent": True}
    between = chat_step(parsing, tokens(usage={"prompt_tokens": 1, "total_tokens": 1}), stream_state=state)
    assert between.stream_state.output_token_ids == output
    last = tokens({"index": 0, "finish_reason": "stop"})
    done = chat_step(parsing, last, stream_state=between.stream_state).chunk.choices[0]
    assert [name for _, name in begun([done])] == ["f"]


def test_a_call_that_another_implementation_told_of_shows_in_the_finish_reason(
    parsing: Derenderer, tokenizer: Tokenizer
) -> None:
    output = tokenizer.encode("why</think>so ").ids
    state = {"output_token_ids": output, "output_chunk_lens": [len(output)], "tools_streamed": True}
    _, after = steps(parsing, tokenizer.encode("there").ids, state)
    assert after["tools_streamed"] is True
    last = tokens({"index": 0, "finish_reason": "stop"})
    assert chat_step(parsing, last, stream_state=after).chunk.choices[0].finish_reason == "tool_calls"


def test_a_scan_that_was_left_behind_by_the_output_is_not_used(replaying: Derenderer, tokenizer: Tokenizer) -> None:
    _, state = steps(replaying, tokenizer.encode("why").ids)
    more = tokenizer.encode("</think>so ").ids
    state["output_token_ids"] += more
    state["output_chunk_lens"].append(len(more))
    deltas, _ = steps(replaying, tokenizer.encode("there").ids, state)
    assert "".join(choice.delta.content for choice in deltas) == "there"


def test_a_stream_that_began_compact_stays_so(parsing: Derenderer, replaying: Derenderer, tokenizer: Tokenizer) -> None:
    _, state = steps(parsing, tokenizer.encode("why</think>so ").ids)
    deltas, after = steps(replaying, tokenizer.encode("there").ids, state)
    assert "".join(choice.delta.content for choice in deltas) == "there"
    assert after["output_token_ids"] == []
    _, whole = steps(replaying, tokenizer.encode("why").ids)
    _, short = steps(parsing, tokenizer.encode("</think>").ids, whole)
    assert (short["output_token_ids"], short["last_tool_call_ids"]) == ([], [])


def test_where_nothing_is_parsed_there_is_nothing_to_replay(plain: Derenderer) -> None:
    door = Derenderer(plain.core, state_mode="replay")
    chunk = tokens({"index": 0, "token_ids": [5]})
    assert chat_step(door, chunk).stream_state == chat_step(plain, chunk).stream_state
