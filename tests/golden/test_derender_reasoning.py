"""Reasoning is what plainly stands between a format's markers, whether or not the reference agrees with itself."""

from __future__ import annotations

import re
import unicodedata

import pytest

from headrace.workers.derender.formats import REASONING, TOOLS, ReasoningFormat, ToolFormat
from tests.golden.messages import ENDS, ours
from tests.golden.test_derender_parsed import FILES
from tests.golden.vectors import Case, cases, load

NAMES = [name for name in FILES if "__none" not in name and "gptoss" not in name]
PLAIN = ("content-", "reasoning-", "kw-", "kwthink-")
MARKED = ("markup-in-reasoning", "tool-inside-unclosed-reasoning")


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_and_answer_are_what_was_plainly_written(name: str) -> None:
    derenderer, compared = load(name), 0
    row = REASONING[name.split("__")[1].partition("+")[0]]
    for case in cases(name):
        if case.kind.startswith(PLAIN) and case.request is not None and case.texts != ["(ids)"]:
            right = plainly(row, case, case.texts[0])
            for label, messages in ours(derenderer, case):
                said = composed(messages[0].reasoning or ""), composed(messages[0].content or "")
                assert said == right, f"{case.id}, {label}"
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("+none")])
def test_a_call_within_the_thoughts_ends_them_or_is_part_of_them(name: str) -> None:
    derenderer, compared = load(name), 0
    reasoning, _, tools = name.split("__")[1].partition("+")
    for case in cases(name):
        if case.kind.startswith(MARKED):
            text = before_call(TOOLS[tools], case.texts[0]) if REASONING[reasoning].call_ends else case.texts[0]
            right, _ = plainly(REASONING[reasoning], case, text)
            for label, messages in ours(derenderer, case):
                assert composed(messages[0].reasoning or "") == right, f"{case.id}, {label}"
            compared += 1
    assert compared


def before_call(tools: ToolFormat, text: str) -> str:
    return text[: min(at for start in tools.starts if (at := text.find(start)) >= 0)]


def composed(text: str) -> str:
    """The one spelling of it that some tokenizers make of every text."""
    return unicodedata.normalize("NFC", text)


def plainly(row: ReasoningFormat, case: Case, text: str) -> tuple[str, str]:
    """The whole text read at once: markers split it, from what the prompt and the request say it begins with."""
    request = case.request or {}
    text = composed(next((text.removesuffix(end) for end in ENDS if text.endswith(end)), text))
    given = (request.get("chat_template_kwargs") or {}).values()
    if not (all(given) if given and row.switches else row.thinks) or (row.prose and not text.startswith(row.starts)):
        return "", text
    marker = "|".join(map(re.escape, (*row.starts, *row.ends)))
    thoughts, answer, thinking = [""], "", row.begins == "reasoning" and all(given)
    for part in re.split(f"({marker})", text, maxsplit=2 if row.prose else 0):
        if part in (*row.starts, *row.ends):
            thinking = part in row.starts
            thoughts.append("")
        elif thinking:
            thoughts[-1] += part.rstrip() if row.trim_reasoning else part
        else:
            answer += part
    return "" if request.get("include_reasoning") is False else "".join(thoughts), answer
