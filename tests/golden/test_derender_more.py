"""Formats that the shared vectors do not cover: the message that was written comes back, and the reference agrees.

The vectors are recorded by record.py from the messages of markup.py.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.golden.markup import MARKUPS, MESSAGES, Markup, Said
from tests.golden.messages import (
    Message,
    added,
    call_ids,
    choice_of,
    of_final,
    ours,
    recorded,
    restarted,
    session,
    split,
)
from tests.golden.test_derender_parsed import differs
from tests.golden.vectors import cases, load

NAMES = [markup.name for markup in MARKUPS]
SAID = {said.kind: said for said in MESSAGES}


@pytest.mark.parametrize("markup", MARKUPS, ids=NAMES)
def test_the_message_that_was_written_comes_back_under_every_chunking(markup: Markup) -> None:
    derenderer = load(markup.name)
    for case in cases(markup.name):
        said = SAID[case.kind]
        for label, messages in ours(derenderer, case):
            check(markup, said, messages[0], f"{case.id}, {label}")


@pytest.mark.parametrize("markup", MARKUPS, ids=NAMES)
def test_where_the_reference_says_what_was_written_we_say_it_in_the_same_characters(markup: Markup) -> None:
    derenderer = load(markup.name)
    for case in cases(markup.name):
        theirs = list(recorded(case))
        if not theirs or any(one != theirs[0] for one in theirs) or not says(markup, SAID[case.kind], theirs[0]):
            continue
        same = all(message == theirs[0] for _, message in ours(derenderer, case))
        assert same is not differs(case), case.id


@pytest.mark.parametrize("markup", MARKUPS, ids=NAMES)
def test_any_chunking_with_a_restart_after_every_chunk_gives_the_same(markup: Markup) -> None:
    derenderer = load(markup.name)
    rng = random.Random(7)
    for case in cases(markup.name):
        ids = case.token_ids[0]
        whole = session(derenderer, case).final([choice_of(0, ids, case.finish_reason)]).choices[0]
        want = whole.model_dump(mode="json")
        deltas = restarted(derenderer, case, 0, list(split(ids, rng.choice([(1, 3), (1, 12), (5, 40)]), rng)))
        assert [added(deltas)] == [of_final(want)], case.id
        assert call_ids(deltas) == [call["id"] for call in want["message"].get("tool_calls", [])], case.id


def check(markup: Markup, said: Said, message: Message, label: str) -> None:
    """`message` is what `said` was, as far as it was written and asked for."""
    request = said.request
    calls = list(markup.made(said))
    if request.get("tool_choice") == "none":
        assert message.calls == [], label
        assert (message.content or "").strip().startswith(said.content), label
        return
    if request.get("parallel_tool_calls") is False:
        calls = calls[:1]
    if said.cut < 100:
        cut_short(markup, said, calls, message, label)
        return
    assert message.calls == [list_of(call) for call in calls], label
    assert (message.content or "").strip() == said.content.strip(), label
    hidden = request.get("include_reasoning") is False or markup.reasoning_parser is None or markup.think is None
    assert (message.reasoning or "").strip() == ("" if hidden else said.reasoning.strip()), label
    assert message.finish_reason == ("tool_calls" if calls else "stop"), label


def says(markup: Markup, said: Said, messages: dict[int, Message]) -> bool:
    try:
        check(markup, said, messages[0], "")
    except AssertionError:
        return False
    return True


def cut_short(markup: Markup, said: Said, calls: list[Any], message: Message, label: str) -> None:
    """What was written before the cut is there, and nothing else."""
    assert message.finish_reason == "length", label
    assert (message.content or "") == "" or not said.calls, label
    for given, (name, arguments) in zip(calls, message.calls, strict=False):
        assert name == given[0], label
        whole = isinstance(arguments, dict) and arguments == given[1]
        assert whole or isinstance(arguments, str) or set(arguments) <= set(given[1]), label
    assert len(message.calls) <= len(calls), label


def list_of(call: tuple[str, Any]) -> tuple[str, Any]:
    return call[0], json.loads(json.dumps(call[1]))
