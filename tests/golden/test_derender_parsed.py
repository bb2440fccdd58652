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

import random
from functools import cache
from pathlib import Path

import pytest

from headrace.protocol import HeadraceError
from headrace.workers.derender.formats import TOOLS
from tests.golden.messages import (
    Message,
    added,
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
}
HERMES = [name for name in FILES if name.endswith(("+hermes", "qwen3+none"))]
OTHERS = [name for name in FILES if name not in HERMES]


@cache
def differences() -> dict[str, str]:
    """Cases in which we hold the reference wrong although it agrees with itself: id to reason."""
    lines = (Path(__file__).parent / "differences.txt").read_text("utf-8").splitlines()
    return dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))


@cache
def written(twin: str) -> dict[tuple[str, int], tuple[Case, dict[int, Message]]]:
    """What the model wrote, by kind and variant, read from a hermes file."""
    return {
        (case.kind, case.variant): (case, {index: plainly(case, text) for index, text in enumerate(case.texts)})
        for case in cases(twin)
        if case.request is not None and case.texts != ["(ids)"]
    }


@pytest.mark.parametrize("name", FILES)
def test_where_the_reference_agrees_with_itself_we_agree_with_it(name: str) -> None:
    derenderer = load(name)
    agreed = total = 0
    for case in cases(name):
        total += 1
        theirs = list(recorded(case))
        if any(one != theirs[0] for one in theirs):
            continue
        agreed += 1
        if case.id in differences():
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
    twins = written("qwen3__none+hermes" if "__none" in name else "qwen3__qwen3+hermes")
    compared = 0
    for case in cases(name):
        twin, right = twins.get((case.kind, case.variant), (None, {}))
        if twin is None or case.kind.startswith(("tool-malformed", "tool-trunc")) or twin.request != case.request:
            continue
        for label, message in ours(derenderer, case):
            for index, said in message.items():
                assert said.calls == right[index].calls, f"{case.id}, {label}"
                assert said.finish_reason == right[index].finish_reason, f"{case.id}, {label}"
        compared += 1
    assert compared > 50


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
