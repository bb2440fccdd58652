"""With parsers: what the reference says where it agrees with itself, and what the model plainly wrote elsewhere.

Right is decided once per case. Where the recorded chunkings and the one-shot answer say the same, less the defects
that the vectors' README lists, that is right; the few cases in which it is not are in `differences.txt`, each with a
reason. Where they do not agree, the same message in another format decides: a kind and variant is one message, which
every file writes in its own markup, so its calls are the same in all of them; the hermes files, whose markup is the
simplest, are read at once by `plainly`. A call that is not well-formed (kinds tool-malformed and tool-trunc) is
streamed by the reference in part or not at all, and comes as markup in the content in one shot; ours is the call as
far as it can be read.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.protocol import HeadraceError
from headrace.workers.derender.formats import REASONING, TOOLS
from tests.golden.messages import (
    Message,
    added,
    broken_characters,
    call_ids,
    choice_of,
    of_final,
    ours,
    plainly,
    recorded,
    restarted,
    session,
    split,
    steps,
)
from tests.golden.vectors import Case, cases, load, step, whole

# Cases per file: all of them, and those of them in which the reference agrees with itself once its defects are off.
FILES = {
    "qwen3__qwen3+hermes": (227, 197),
    "qwen3__none+hermes": (167, 140),
    "qwen3__qwen3+none": (92, 89),
    "qwen3__deepseek_r1+hermes": (227, 136),
    "qwen3__none+qwen3_xml": (167, 146),
    "qwen3__qwen3+qwen3_coder": (227, 191),
    "qwen3_ext__glm45+glm45": (227, 185),
    "qwen3_ext__minimax_m2+minimax_m2": (218, 182),
    "qwen3_ext__seed_oss+seed_oss": (218, 176),
    "qwen3_ext__kimi_k2+kimi_k2": (227, 203),
    "deepseek_r1__deepseek_r1+deepseek_v3": (218, 62),
    "deepseek_r1__deepseek_v3+deepseek_v31": (236, 109),
    "gptoss__openai_gptoss+openai": (221, 206),
    "llama3_1pt__none+llama3_json": (167, 62),
    "llama3_1pt__none+pythonic": (167, 122),
    "llama3_1pt__none+llama4_pythonic": (167, 122),
    "mistral_tekken_v3__none+mistral": (112, 63),
    "qwen3_ext__granite+granite": (218, 54),
}
BROKEN = ("tool-malformed", "tool-trunc")
JSON_ALONE = ("tool-choice-required-json", "tool-choice-named-json")
"""A call was demanded, and the model wrote it as JSON without any markup, which is not the same in every format."""
HERMES = [name for name in FILES if name.endswith(("+hermes", "qwen3+none"))]
OTHERS = [name for name in FILES if name not in HERMES]


@cache
def differences() -> list[str]:
    """Patterns of the ids of cases in which we hold the reference wrong although it agrees with itself."""
    lines = (Path(__file__).parent / "differences.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def differs(case: Case) -> bool:
    """Whether the case is one in which we hold the reference wrong."""
    return any(fnmatchcase(case.id, pattern) for pattern in differences())


@cache
def written(twin: str) -> dict[tuple[str, int], tuple[Case, dict[int, Message]]]:
    """What the model wrote, by kind and variant, read from a hermes file."""
    return {
        (case.kind, case.variant): (case, {index: plainly(case, text) for index, text in enumerate(case.texts)})
        for case in cases(twin)
        if case.request is not None and case.texts != ["(ids)"]
    }


def twin_of(name: str) -> str:
    """The hermes file whose messages say in `name` what they say in hermes: in both, calls end reasoning or do not."""
    row = REASONING.get(name.partition("__")[2].partition("+")[0])
    if row is None:
        return "qwen3__none+hermes"
    return "qwen3__qwen3+hermes" if row.call_ends or not row.thinks else "qwen3__deepseek_r1+hermes"


def composed(calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The calls as the tokenizer of the hermes files makes them, which composes characters."""
    return [
        (name, json.loads(unicodedata.normalize("NFC", json.dumps(given, ensure_ascii=False)))) for name, given in calls
    ]


def same_request(one: Case, other: Case) -> bool:
    """Whether both were asked for the same, of whichever model."""
    return {**(one.request or {}), "model": None} == {**(other.request or {}), "model": None}


def demanded(case: Case) -> list[tuple[str, Any]]:
    """The calls that the model wrote as JSON alone."""
    written, choice = re.search(r"[\[{].*", case.texts[0], re.DOTALL), (case.request or {})["tool_choice"]
    assert written is not None
    value = json.loads(written[0])
    if choice == "required":
        return [(call["name"], call["parameters"]) for call in value]
    return [(choice["function"]["name"], value)]


@pytest.mark.parametrize("name", FILES)
def test_where_the_reference_agrees_with_itself_we_agree_with_it(name: str) -> None:
    derenderer = load(name)
    agreed = total = 0
    for case in cases(name):
        total += 1
        theirs = list(recorded(case))
        if any(one != theirs[0] for one in theirs) or broken_characters(case, theirs):
            continue
        agreed += 1
        if differs(case):
            assert any(message != theirs[0] for _, message in ours(derenderer, case)), f"{case.id} differs no more"
            continue
        for label, message in ours(derenderer, case):
            assert message == theirs[0], f"{case.id}, {label}"
    assert (total, agreed) == FILES[name]


@pytest.mark.parametrize("name", HERMES)
def test_every_case_says_what_the_model_plainly_wrote_under_every_chunking(name: str) -> None:
    derenderer = load(name)
    for case in cases(name):
        if case.texts == ["(ids)"] or case.request is None:
            continue
        right = {index: plainly(case, text) for index, text in enumerate(case.texts)}
        for label, message in ours(derenderer, case):
            assert message == right, f"{case.id}, {label}"


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_message_has_the_same_calls_in_every_format(name: str) -> None:
    derenderer = load(name)
    twins = written(twin_of(name))
    tools = TOOLS.get(name.partition("+")[2])
    compared = 0
    for case in cases(name):
        twin, right = twins.get((case.kind, case.variant), (None, {}))
        if twin is None or case.kind.startswith((*BROKEN, *JSON_ALONE)) or not same_request(twin, case):
            continue
        if not (case.request or {}).get("tools") and tools is not None and tools.unasked == "calls":
            continue
        for label, message in ours(derenderer, case):
            for index, said in message.items():
                assert composed(said.calls) == right[index].calls, f"{case.id}, {label}"
                assert said.finish_reason == right[index].finish_reason, f"{case.id}, {label}"
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", FILES)
def test_a_demanded_call_may_be_json_alone_where_the_format_has_it_so_and_is_never_lost(name: str) -> None:
    derenderer, tools = load(name), TOOLS.get(name.partition("+")[2])
    for case in cases(name):
        if tools is None or case.kind not in JSON_ALONE:
            continue
        right = demanded(case)
        for label, message in ours(derenderer, case):
            for index, said in message.items():
                kept = case.texts[index][-20:] in (said.content or "")
                assert said.calls == right or (kept and not tools.forced_json), f"{case.id}, {label}"


@pytest.mark.parametrize("name", FILES)
def test_no_marker_of_a_call_is_content(name: str) -> None:
    derenderer = load(name)
    tools = TOOLS.get(name.partition("+")[2])
    for case in cases(name):
        if tools is None or tools.tentative or not (case.request or {}).get("tools"):
            continue
        if case.request is None or case.request.get("tool_choice") == "none":
            continue
        for label, message in ours(derenderer, case):
            for said in message.values():
                assert not any(start in (said.content or "") for start in tools.starts), f"{case.id}, {label}"


@pytest.mark.parametrize("name", FILES)
def test_every_chunking_and_one_shot_say_the_same(name: str) -> None:
    derenderer = load(name)
    for case in cases(name):
        messages = dict(ours(derenderer, case))
        for label, message in messages.items():
            assert message == messages.get("one-shot", message), f"{case.id}, {label}"


@pytest.mark.parametrize("name", FILES)
def test_any_chunking_with_a_restart_after_every_chunk_gives_the_same(name: str) -> None:
    derenderer = load(name)
    rng = random.Random(7)
    for case in cases(name):
        if case.request is None or case.prompt_token_ids is None:
            continue
        for index, ids in enumerate(case.token_ids):
            one_shot = session(derenderer, case).final([choice_of(index, ids, case.finish_reason)])
            want = one_shot.choices[0].model_dump(mode="json")
            sizes = rng.choice([(1, 3), (1, 12), (5, 40)])
            deltas = restarted(derenderer, case, index, list(split(ids, sizes, rng)))
            assert [added(deltas)] == [of_final(want)], case.id
            assert call_ids(deltas) == [call["id"] for call in want["message"].get("tool_calls", [])], case.id


@pytest.mark.parametrize("name", FILES)
def test_what_the_reference_refuses_we_refuse_in_its_words(name: str) -> None:
    derenderer = load(name)
    refused = [case for case in cases(name) if case.kind in ("noreq", "noprompt")]
    assert refused
    for case in refused:
        for event in (event for stream in case.streams for event in stream.events):
            with pytest.raises(HeadraceError) as caught:
                step(derenderer, case, event.chunk, None)
            assert caught.value.error.model_dump(mode="json") == event.response, case.id


@pytest.mark.parametrize("name", FILES)
def test_chunks_carry_the_usage_the_ids_and_the_log_probabilities_that_were_asked_for(name: str) -> None:
    derenderer = load(name)
    for case in cases(name):
        if case.request is None or case.prompt_token_ids is None:
            continue
        hidden = case.request.get("include_reasoning") is False
        for event, done in steps(derenderer, case):
            theirs = event.response["chunk"]
            assert done.get("usage") == theirs["usage"], case.id
            for sent, choice, their_choice in zip(
                event.chunk["choices"], done["choices"], theirs["choices"], strict=True
            ):
                assert choice["token_ids"] == their_choice["token_ids"], case.id
                logprobs = (sent.get("logprobs") or {}).get("content")
                if logprobs and not hidden:
                    assert len(choice["logprobs"]["content"]) == len(logprobs), case.id


def test_streamed_log_probabilities_equal_the_one_shot_ones_of_the_reference() -> None:
    derenderer = load("qwen3__qwen3+hermes")
    found = [case for case in cases("qwen3__qwen3+hermes") if case.kind == "logprobs-parser"]
    assert found
    for case in found:
        want = case.nonstream["response"]["choices"][0]["logprobs"]["content"]
        for stream in case.streams:
            events = [done for _, done in steps(derenderer, case, stream.chunking)]
            got = [entry for done in events for choice in done["choices"] for entry in choice["logprobs"]["content"]]
            assert got == want, f"{case.id}, {stream.chunking}"
        assert whole(derenderer, case)["choices"][0]["logprobs"]["content"] == want, case.id
