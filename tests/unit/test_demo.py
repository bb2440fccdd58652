"""The demo: every request shown with what it said, and a summary that is true."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

from headrace.cli import main
from headrace.demo.acts import Act, Call, DemoError, Summary, read_acts
from headrace.demo.run import REQUESTS, picture, play
from headrace.demo.screen import plain, said, scene
from headrace.settings import Settings
from headrace.workers.models import ModelSpec


@pytest.fixture
def null_model() -> ModelSpec:
    return ModelSpec.of("demo", engine="null")


def write(file: Path, *bodies: dict[str, object]) -> Path:
    lines = [
        {
            "custom_id": f"q{at}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"question {at}"}], "max_tokens": 20} | body,
        }
        for at, body in enumerate(bodies)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def shown(acts: list[Act], width: int = 100, height: int | None = None, summary: Summary | None = None) -> str:
    console = Console(file=StringIO(), width=width, no_color=True)
    console.print(scene(acts, width, height, summary))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_without_a_terminal_each_request_is_told_at_its_end_and_then_the_summary(
    tmp_path: Path, null_model: ModelSpec
) -> None:
    console = Console(file=StringIO(), width=80)
    requests = write(tmp_path / "r.jsonl", {}, {}, {"model": "gpt-4o"})
    acts, summary = await play(Settings(), null_model, requests, console)
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    for act in acts:
        assert plain(act) in printed
    assert "3 of 3 requests answered" in printed
    assert "\x1b" not in printed
    assert (summary.requests, summary.answered, summary.tokens) == (3, 3, sum(act.tokens for act in acts))
    assert summary.first_ms is not None


async def test_on_a_terminal_the_last_picture_shows_every_request(tmp_path: Path, null_model: ModelSpec) -> None:
    console = Console(file=StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    acts, summary = await play(Settings(), null_model, write(tmp_path / "r.jsonl", {}, {}), console)
    assert isinstance(console.file, StringIO)
    assert shown(acts, 100, None, summary) in console.file.getvalue()


async def test_the_demo_needs_no_server_even_where_one_is_named(tmp_path: Path, null_model: ModelSpec) -> None:
    nowhere = Settings(amqp_url="amqp://127.0.0.1:1/", redis_url="redis://127.0.0.1:1/")
    _, summary = await play(nowhere, null_model, write(tmp_path / "r.jsonl", {}), Console(file=StringIO()))
    assert summary.answered == 1


def test_a_request_without_an_answer_is_told_and_makes_the_exit_code_1(tmp_path: Path) -> None:
    requests = write(tmp_path / "r.jsonl", {}, {"messages": []})
    told = CliRunner().invoke(main, ["demo", "--engine", "null", "--requests", str(requests)])
    assert told.exit_code == 1
    assert "1 of 2 requests answered" in told.stdout
    assert "error: messages" in told.stdout


def test_the_picture_is_an_svg_of_the_last_screen(tmp_path: Path) -> None:
    file = tmp_path / "demo.svg"
    told = CliRunner().invoke(
        main, ["demo", "--engine", "null", "--requests", str(write(tmp_path / "r.jsonl", {})), "--svg", str(file)]
    )
    assert told.exit_code == 0, told.stderr
    words = "".join(ElementTree.parse(file).getroot().itertext()).replace("\xa0", " ")
    assert "question 0" in words
    assert "1 of 1 requests answered" in words


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "there is no request"),
        ("\n\n", "there is no request"),
        ("nonsense\n", "line 1: The line is not a JSON"),
        ('{"custom_id":"a","method":"POST","url":"/v1/completions","body":[]}', "line 1: body: Expected `object`"),
    ],
)
def test_a_request_file_that_cannot_be_played_says_why(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(content)
    with pytest.raises(DemoError, match=why):
        read_acts(file, "demo")


def test_the_shipped_requests_can_be_read_and_cover_every_endpoint() -> None:
    acts = read_acts(REQUESTS, "demo")
    assert {act.line.url for act in acts} == {"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"}
    assert all(act.asked for act in acts)


@pytest.fixture
def acts(tmp_path: Path) -> list[Act]:
    thinking, calling, failing = read_acts(write(tmp_path / "r.jsonl", {}, {}, {}), "demo")
    thinking.reasoning, thinking.text, thinking.state = "let me\nsee", "It is Paris.", "answered"
    calling.calls[0] = Call("get_weather", '{"location": "Paris"}')
    calling.state = "answered"
    failing.error, failing.state = "messages must not be empty.", "failed"
    return [thinking, calling, failing]


def test_thought_answer_call_and_error_are_told_apart(acts: list[Act]) -> None:
    thought = said(acts[0])
    assert thought.plain == "let me see It is Paris."
    assert [str(span.style) for span in thought.spans] == ["dim italic"]
    call = said(acts[1])
    assert 'get_weather({"location": "Paris"})' in call.plain
    assert "cyan" in str(call.spans[0].style)
    assert "red" in str(said(acts[2]).spans[0].style)
    assert plain(acts[0]).splitlines() == ["[q0] question 0", "  thought: let me see", "  answer: It is Paris."]
    assert "  call: get_weather" in plain(acts[1])
    assert "  error: messages must not be empty." in plain(acts[2])


@pytest.mark.parametrize("height", [12, 24, 60])
def test_a_live_picture_never_outgrows_its_terminal(acts: list[Act], height: int) -> None:
    for act in acts:
        act.text = "many words of an answer that goes on " * 200
    assert len(shown(acts, 80, height).splitlines()) < height
    assert "…" in shown(acts, 80, height)


def test_the_summary_counts_only_what_happened(acts: list[Act]) -> None:
    acts[0].sent_at, acts[0].first_at, acts[0].tokens = 1.0, 1.25, 30
    summary = Summary.of(acts, 2.0)
    assert summary.lines() == [
        "2 of 3 requests answered in 2.0 s: 1 with reasoning, 1 tool calls",
        "30 output tokens, 15 tokens/s, 1.0 requests/s; first chunk after 250 ms (median)",
    ]


def test_a_picture_can_be_made_of_anything_said(acts: list[Act], tmp_path: Path) -> None:
    acts[0].text = "<b>&amp; \x00 \u202e [red]not markup[/red]"
    picture(acts, Summary.of(acts, 1.0), tmp_path / "p.svg")
    ElementTree.parse(tmp_path / "p.svg")
