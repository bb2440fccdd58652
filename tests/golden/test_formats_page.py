"""docs/formats.md is true: it lists every format, each writes what the page shows, and what it calls recorded is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headrace.workers.derender.formats import (
    REASONING,
    TOOLS,
    About,
    Declared,
    Formats,
    Found,
    Phase,
    ReasoningFormat,
    ScanState,
    ToolFormat,
    scanner,
)
from headrace.workers.derender.formats.registry import BODIES
from headrace.workers.derender.formats.scanner import in_harmony
from tests.golden.markup import MARKUPS
from tests.golden.test_derender_parsed import FILES

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
PARTS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
SHARED = [name.split("__")[1].split("+") for name in FILES]
RECORDED = (
    {reasoning for reasoning, _ in SHARED} | {markup.reasoning_parser for markup in MARKUPS if markup.think},
    {tools for _, tools in SHARED} | {markup.tool_parser for markup in MARKUPS},
)
"""The names of the reasoning formats, and of the tool formats, that recorded messages are written in."""


def table(part: str) -> Iterator[list[str]]:
    """The rows of a part's table, less its head."""
    rows = [line.strip("| ").split(" |") for line in PARTS[part].splitlines() if line.startswith("|")]
    return ([cell.strip() for cell in row] for row in rows[2:])


def shown(part: str) -> dict[str, str]:
    """What a part shows of each format's markup."""
    block = re.search(r"^(`{3,})text\n(.*?)^\1$", PARTS[part], re.DOTALL | re.MULTILINE)
    assert block is not None
    lines = (re.split(" {2,}", line, maxsplit=1) for line in block[2].splitlines())
    return {name: text.replace("⏎", "\n") for name, text in lines}


@pytest.mark.parametrize(("part", "rows", "which"), [("Reasoning", REASONING, 0), ("Tool calls", TOOLS, 1)])
def test_the_table_is_the_registry(
    part: str, rows: Mapping[str, ReasoningFormat] | Mapping[str, ToolFormat], which: int
) -> None:
    expected = [
        [f"`{row.name}`", ", ".join(f"`{name}`" for name in row.aliases), "yes" if named & RECORDED[which] else "no"]
        for row in dict.fromkeys(rows.values())
        for named in [{row.name, *row.aliases}]
    ]
    listed = list(table(part))
    assert [[name, aliases, yes] for name, aliases, _, yes in listed] == expected
    assert all(models for _, _, models, _ in listed)
    assert list(shown(part)) == [row.name for row in dict.fromkeys(rows.values())]


@pytest.mark.parametrize(("name", "text"), shown("Reasoning").items())
def test_a_reasoning_format_writes_what_the_page_shows(name: str, text: str) -> None:
    row = REASONING[name]
    found, state = Found(), ScanState(phase=first(row, None))
    reading = scanner(row)
    reading.feed(state, text, found)
    reading.finish(state, found)
    said = "".join(found.reasoning).strip(), "".join(found.content).strip()
    assert said == (("why", "so") if row.ends or row.starts else ("", text))


@pytest.mark.parametrize(("name", "text"), shown("Tool calls").items())
def test_a_tool_format_writes_what_the_page_shows(name: str, text: str) -> None:
    row = TOOLS[name]
    found, state = Found(), ScanState(phase=first(None, row))
    reading = scanner(None, row)
    reading.feed(state, text, found, Declared(()))
    reading.finish(state, found, Declared(()))
    assert [piece.name for piece in found.calls if piece.name is not None] == ["f"]
    assert json.loads("".join(piece.arguments for piece in found.calls)) == {"a": "b"}
    assert "".join(found.content).strip() == ""


def test_the_file_that_the_page_shows_adds_its_formats(tmp_path: Path) -> None:
    block = re.search(r"^```toml\n(.*?)^```$", PARTS["Formats of your own"], re.DOTALL | re.MULTILINE)
    assert block is not None
    (tmp_path / "formats.toml").write_text(block[1])
    known = Formats(tmp_path / "formats.toml")
    for name in ("angled", "angled_xml"):
        assert known.tools(name, About()) not in TOOLS.values()
    assert known.reasoning("musing", About()) not in REASONING.values()


def test_every_kind_of_body_is_explained() -> None:
    assert [kind for kind, _ in table("Formats of your own")] == [f"`{kind}`" for kind in BODIES]


def first(reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Phase:
    """The phase that an output begins in."""
    if in_harmony(reasoning, tools):
        return "header"
    return "content" if reasoning is None else reasoning.begins
