"""The documents hold: links lead somewhere, Python compiles, and no file names the machine it was written on."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)")
TEST_NAME = re.compile(r"`((?:unit|contract|integration|chaos|golden)/\w+\.py)?(::)?(test_\w+|\*)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+\s+(.+?)\s*#*$", re.MULTILINE)
# Put together here, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/" + r"(?:work|root|home/\w+)/\w")


def relative(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def anchors(document: Path) -> set[str]:
    """The names under which a heading is linked: lower case, punctuation dropped, spaces as hyphens."""
    headings = HEADING.findall(FENCE.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_is_a_readme_and_a_changelog() -> None:
    assert {"README.md", "CHANGELOG.md"} <= {relative(document) for document in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_link_to_a_file_leads_to_one(document: Path) -> None:
    targets = LINK.findall(FENCE.sub("", document.read_text()))
    broken = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        found = file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file))
        if not found:
            broken.append(target)
    assert broken == []


def test_every_test_that_the_guarantees_page_names_is_there() -> None:
    contracts = "".join(file.read_text() for file in (ROOT / "broker" / "contract").glob("*.py"))
    missing, file = [], Path()
    for path, behind_file, name in TEST_NAME.findall((ROOT / "docs" / "guarantees.md").read_text()):
        file = ROOT / "tests" / path if path else file  # one file stands for the names after it
        text = file.read_text() if behind_file and file.is_file() else "" if behind_file else contracts
        if f"def {name}(" not in text and not (name == "*" and text):
            missing.append(f"{path or file.name}::{name}" if behind_file else name)
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_python_block_compiles(document: Path) -> None:
    text = document.read_text()
    for match in FENCE.finditer(text):
        if match[1] in {"python", "py"}:
            line = text[: match.start()].count("\n") + 1
            # Top-level await is how an example reads best.
            compile(match[2], f"{relative(document)}:{line}", "exec", flags=TOP_LEVEL_AWAIT)


def test_no_file_names_the_machine_it_was_written_on() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue  # weights and pictures
        found += [f"{name}: {match[0]}" for match in MACHINE_PATH.finditer(content.decode())]
    assert found == []
