"""The examples, as they stand, against real servers and workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import BOUND, ROOT, Fleet, fleet
from tests.servers import RabbitMQ, Redis

pytestmark = pytest.mark.servers

EXAMPLES = ROOT / "examples"
THOUGHT = "The user asks for the capital of Japan."
ANSWER = "The capital of Japan is Tokyo."


@pytest.fixture(scope="module")
def workers(rabbitmq: RabbitMQ, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All roles for the shipped model, in one process."""
    with (
        rabbitmq.fresh_vhost() as vhost,
        redis_server.fresh_database() as database,
        fleet(vhost, database, tmp_path_factory.mktemp("examples")) as started,
    ):
        started.workers(("all",), model=("--model", "demo"))
        yield started


@pytest.fixture
def node_example(tmp_path: Path) -> Path:
    """A copy of the Node example with its packages."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: the Node example cannot be run")
    folder = tmp_path / "submit_node"
    shutil.copytree(EXAMPLES / "submit_node", folder, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert installed.returncode == 0, installed.stderr
    return folder


def pika_example(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "submit_pika.py"), "--url", url, "--seconds", "20", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=False)


def assert_streamed(stdout: str) -> None:
    """Thought and answer came in pieces, then the answer as a whole."""
    streamed, _, answer = stdout.partition("\n---\n")
    assert THOUGHT in streamed
    assert ANSWER in streamed
    assert answer.strip() == ANSWER


def test_a_plain_pika_producer_submits_json_and_reads_its_stream(workers: Fleet) -> None:
    told = pika_example(workers.env["HEADRACE_AMQP_URL"], "What is the capital of Japan?")
    assert told.returncode == 0, told.stderr
    assert_streamed(told.stdout)


def test_a_plain_pika_producer_is_told_of_its_mistakes(workers: Fleet) -> None:
    url = workers.env["HEADRACE_AMQP_URL"]
    nobody = pika_example(url, "--model", "nobody")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "no worker serves 'nobody'" in nobody.stderr
    too_long = pika_example(url, "word " * 5_000)
    assert (too_long.returncode, too_long.stdout) == (1, "")
    assert "Traceback" not in too_long.stderr and too_long.stderr.strip()


def test_a_plain_node_producer_submits_json_and_reads_its_stream(workers: Fleet, node_example: Path) -> None:
    env = workers.env | {"AMQP_URL": workers.env["HEADRACE_AMQP_URL"], "SECONDS": "20"}
    for model, code in (("demo", 0), ("nobody", 1)):
        told = subprocess.run(
            ["node", "index.mjs", "What is the capital of Japan?"],
            cwd=node_example,
            env=env | {"MODEL": model},
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )
        assert told.returncode == code, told.stderr
        if code == 0:
            assert_streamed(told.stdout)
        else:
            assert "no worker serves 'nobody'" in told.stderr
