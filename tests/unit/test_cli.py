"""The command line: what each command prints, where, and with which exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import click
import pytest
from click.testing import CliRunner, Result

from headrace.cli import main
from headrace.cli.running import run, signals
from headrace.cli.worker import ROLES as offered
from headrace.client.connect import ROLES as served
from headrace.settings import PREFIX

BOUND = 60.0
SERVERS = {
    "HEADRACE_AMQP_URL": "amqp://me:s3cret@127.0.0.1:1/",
    "HEADRACE_REDIS_URL": "redis://:s3cret@127.0.0.1:1/0",
}


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the machine."""
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")


def headrace(*arguments: str | Path, **env: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=env)


def batch_line(custom_id: str, max_tokens: int = 3, **body: object) -> str:
    asked = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": max_tokens} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked})


def custom_ids(file: Path) -> list[str]:
    return sorted(json.loads(text)["custom_id"] for text in file.read_text().splitlines())


def wait_for(condition: Callable[[], bool]) -> None:
    """Looks at the condition until it holds, for at most BOUND seconds."""
    tick = Event()
    for _ in range(int(BOUND / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came about")


def test_every_command_explains_itself() -> None:
    commands = {"demo", "batch", "worker", "submit", "tail", "result", "cancel", "dead", "topology", "doctor"}
    assert set(main.commands) == commands
    for name in commands:
        told = headrace(name, "--help")
        assert told.exit_code == 0
        assert len(told.output) > 100


def test_the_worker_command_offers_every_role_that_there_is() -> None:
    assert offered == served


def test_the_version_is_told_installed_or_not() -> None:
    told = headrace("--version")
    assert told.exit_code == 0
    assert told.stdout.startswith("headrace, version ")


# ----------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "command",
    [("worker", "render"), ("tail",), ("result", "r1"), ("cancel", "r1"), ("topology", "demo")],
)
def test_a_command_that_needs_servers_says_which_settings_are_missing(command: tuple[str, ...]) -> None:
    told = headrace(*command)
    assert told.exit_code == 1
    assert "HEADRACE_AMQP_URL and HEADRACE_REDIS_URL are not set" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_bad_setting_is_one_sentence() -> None:
    told = headrace("doctor", HEADRACE_LOG_LEVEL="loud")
    assert (told.exit_code, told.stdout) == (1, "")
    assert told.stderr.startswith("Error: HEADRACE_LOG_LEVEL: ")


def test_one_url_alone_is_refused() -> None:
    told = headrace("submit", "--say", "hello", HEADRACE_AMQP_URL="amqp://localhost")
    assert told.exit_code == 1
    assert "HEADRACE_REDIS_URL is not set while HEADRACE_AMQP_URL is" in told.stderr


def test_doctor_lists_every_setting_with_its_default() -> None:
    told = headrace("doctor", HEADRACE_CLIENT="evals")
    assert told.exit_code == 0
    assert "HEADRACE_CLIENT = evals" in told.stdout
    assert "(default: local)" in told.stdout
    assert "one process" in told.stdout


def test_doctor_names_the_servers_that_do_not_answer_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.operate.PATIENCE_S", 0.2)
    told = headrace("doctor", **SERVERS)
    assert told.exit_code == 1
    assert "s3cret" not in told.output
    for url in ("amqp://me:***@127.0.0.1:1/: ", "redis://:***@127.0.0.1:1/0: "):
        assert any(text.startswith(url) and not text.endswith(": ready") for text in told.stdout.splitlines())


async def test_the_first_signal_asks_and_the_second_cancels() -> None:
    asked: asyncio.Queue[int] = asyncio.Queue()
    ended: list[str] = []

    async def command() -> None:
        with signals(asked.put_nowait):
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                assert await asked.get() == signal.SIGTERM
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                ended.append("in order")

    async with asyncio.timeout(5):
        task = asyncio.create_task(command())
        await asyncio.wait((task,))
    assert task.cancelled()
    assert asked.empty()
    assert ended == ["in order"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_command_that_is_broken_off_says_nothing_about_its_tasks(error: BaseException) -> None:
    async def broken_off() -> None:
        raise error

    with pytest.raises(click.Abort):
        run(broken_off())


def test_a_model_that_is_nowhere_is_one_sentence() -> None:
    told = headrace("submit", "--say", "hello", "--model", "no such model!")
    assert told.exit_code == 1
    assert told.stderr.startswith("Error: model: 'no such model!'")


# ----------------------------------------------------------------------------------------------- submit


def test_submit_streams_one_request_and_prints_the_response_as_json() -> None:
    told = headrace("submit", "--say", "hello", "--engine", "null", "--delivery", "tokens", "--json")
    assert told.exit_code == 0, told.stderr
    *chunks, response = [json.loads(text) for text in told.stdout.splitlines()]
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert ids == response["choices"][0]["token_ids"]


def test_submit_takes_a_body_from_a_file(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"prompt": "hello", "max_tokens": 4}')
    told = headrace("submit", body, "--endpoint", "/v1/completions", "--engine", "null", "--delivery", "final")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["usage"]["completion_tokens"] == 4


def test_submit_names_the_field_of_a_bad_body(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"messages": []}')
    told = headrace("submit", body, "--engine", "null")
    assert (told.exit_code, told.stdout) == (1, "")
    assert "messages" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("arguments", [(), ("-", "--say", "hello"), ("--say", "hello", "--no-wait")])
def test_submit_refuses_arguments_that_make_no_sense(arguments: tuple[str, ...]) -> None:
    assert headrace("submit", *arguments).exit_code == 2


# ----------------------------------------------------------------------------------------------- batch


def test_batch_run_answers_every_line_and_tells_counts_on_stderr(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([batch_line("a"), batch_line("b"), "{ torn", batch_line("c", messages=[])]))
    told = headrace("batch", "run", source, "-o", out, "--engine", "null")
    assert told.exit_code == 0, told.stderr
    assert custom_ids(out) == ["a", "b"]
    errors = [json.loads(text) for text in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert len(errors) == 2
    assert told.stdout == ""
    assert "2 answered, 2 failed, 0 done before" in told.stderr
    assert "1 x invalid_json_line" in told.stderr
    assert "out.jsonl.errors.jsonl" in told.stderr


def test_each_bad_line_gets_a_clear_error_that_names_its_field(tmp_path: Path) -> None:
    def generate(custom_id: str, token_ids: list[int]) -> str:
        body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 2}}
        line = {"custom_id": custom_id, "method": "POST", "url": "/inference/v1/generate", "body": body}
        return json.dumps(line)

    bad = {
        "no messages": (batch_line("no messages", messages=[]), 400, "messages"),
        "unknown model": (batch_line("unknown model", model="gpt-4o"), 404, "model"),
        "negative": (generate("negative", [1, -7]), 400, "token_ids.1"),
        "out of vocabulary": (generate("out of vocabulary", [1, 5_000_000]), 400, "token_ids.1"),
        "hot": (batch_line("hot", temperature=9), 400, "temperature"),
    }
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [batch_line("first"), *(text for text, _, _ in bad.values()), generate("last", [1, 2])]
    source.write_text("\n".join(lines))
    told = headrace("batch", "run", source, "-o", out, "--engine", "null")
    assert told.exit_code == 0, told.stderr
    assert custom_ids(out) == ["first", "last"]
    failed = [json.loads(text) for text in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert {row["custom_id"] for row in failed} == set(bad)
    for row in failed:
        _, status, param = bad[row["custom_id"]]
        error = row["response"]["body"]["error"]
        assert (row["response"]["status_code"], error["code"], error["param"]) == (status, status, param)
        assert param.partition(".")[0] in error["message"]


def test_batch_run_strict_fails_where_a_line_failed_and_quiet_says_nothing(tmp_path: Path) -> None:
    source, out, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    source.write_text(batch_line("a") + "\nbad\n")
    arguments = ("batch", "run", source, "-o", out, "--errors", errors, "--engine", "null", "--strict", "--quiet")
    told = headrace(*arguments)
    assert (told.exit_code, told.output) == (1, "")
    assert len(errors.read_text().splitlines()) == 1
    again = headrace(*arguments)
    assert (again.exit_code, again.output) == (1, ""), "a line that failed before has failed"


def test_a_model_that_cannot_be_served_is_refused_in_one_sentence(tmp_path: Path) -> None:
    told = headrace("submit", "--say", "hello", "--model", tmp_path)
    assert told.exit_code == 1
    assert told.stderr == f"Error: model {tmp_path.name!r} has no tokenizer.json in its folder\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--tool-parser", "nope"), "tool_parser 'nope' does not exist; known are auto, "),
        (("--reasoning-parser", "nope"), "reasoning_parser 'nope' does not exist; known are auto, "),
        (("--formats", "{folder}/formats.toml"), "{folder}/formats.toml: [[tool]] 1: starts is missing\n"),
    ],
)
def test_a_format_that_cannot_be_had_is_one_sentence(tmp_path: Path, options: tuple[str, str], error: str) -> None:
    (tmp_path / "formats.toml").write_text('[[tool]]\nname = "mine"')
    told = headrace("submit", "--say", "hello", "--engine", "null", *(word.format(folder=tmp_path) for word in options))
    assert told.exit_code == 1
    assert told.stderr.startswith("Error: " + error.format(folder=tmp_path))
    assert told.stderr.count("\n") == 1


def test_a_model_is_served_in_the_formats_that_a_file_or_its_template_names(tmp_path: Path) -> None:
    (tmp_path / "formats.toml").write_text('[[reasoning]]\nname = "mine"\nstarts = ["<a>"]\nends = ["</a>"]')
    formats = ("--formats", tmp_path / "formats.toml", "--reasoning-parser", "mine", "--tool-parser", "auto")
    told = headrace("submit", "--say", "hello", "--engine", "null", *formats, "--json")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout.splitlines()[-1])["choices"][0]["message"]["reasoning"]


def test_without_torch_the_commands_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loop", "transformers"):
        monkeypatch.delitem(sys.modules, f"headrace.workers.generate.engines.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    told = headrace("demo")
    assert told.exit_code == 1
    assert "pip install 'headrace[generate]'" in told.stderr
    assert told.stderr.count("\n") == 1


def test_batch_run_again_has_nothing_left_to_do(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(batch_line("a") + "\n")
    for said in ("1 answered, 0 failed, 0 done before", "0 answered, 0 failed, 1 done before"):
        told = headrace("batch", "run", source, "-o", out, "--engine", "null")
        assert told.exit_code == 0, told.stderr
        assert said in told.stderr
    assert custom_ids(out) == ["a"]


def test_batch_run_never_writes_over_its_input(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(batch_line("a"))
    for out, errors in ((source, tmp_path / "e"), (tmp_path / "o", source), (tmp_path / "o", tmp_path / "o")):
        assert headrace("batch", "run", source, "-o", out, "--errors", errors, "--engine", "null").exit_code == 2
    assert source.read_text() == batch_line("a")


def test_batch_run_refuses_an_output_that_is_something_else(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text(batch_line("a"))
    out.write_text("my notes\n")
    told = headrace("batch", "run", source, "-o", out, "--engine", "null")
    assert told.exit_code == 1
    assert "notes.txt: line 1 is not the row of a batch" in told.stderr
    assert out.read_text() == "my notes\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_batch_says_how_to_go_on_and_does(tmp_path: Path, number: signal.Signals) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wanted = [f"q{at}" for at in range(3_000)]
    source.write_text("\n".join(batch_line(name, ignore_eos=True) for name in wanted))
    command = [sys.executable, "-m", "headrace", "batch", "run", str(source), "-o", str(out), "--engine", "null"]
    with subprocess.Popen([*command, "--max-in-flight", "4"], stderr=subprocess.PIPE, text=True) as running:
        wait_for(lambda: out.exists() and out.stat().st_size > 2_000)
        running.send_signal(number)
        _, said = running.communicate(timeout=BOUND)
    assert running.returncode == 128 + number, said
    assert "Run the same command again to go on." in said
    assert 0 < len(out.read_text().splitlines()) < len(wanted)

    source.write_text("\n".join(batch_line(name, ignore_eos=True) for name in wanted[:500]))
    told = headrace("batch", "run", source, "-o", out, "--engine", "null")
    assert told.exit_code == 0, told.stderr
    found = custom_ids(out)
    assert len(found) == len(set(found))
    assert set(wanted[:500]) <= set(found)
