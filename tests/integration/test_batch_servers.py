"""``headrace batch run`` on real servers: every line once, whoever is killed on the way."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from tests.integration.fleet import BOUND, Fleet, fleet, wait_until
from tests.servers import RabbitMQ, Redis

pytestmark = pytest.mark.servers

LINES = 200
WANTED = sorted(f"line-{at}" for at in range(LINES))
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}),
    ("/v1/completions", {"prompt": "once upon a time", "max_tokens": 60}),
    ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 50, "ignore_eos": True}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "bye"}], "n": 2, "max_tokens": 20}),
)


@pytest.fixture
def headraces(vhost: RabbitMQ, redis_db: Redis, tmp_path: Path) -> Iterator[Fleet]:
    with fleet(vhost, redis_db, tmp_path) as started:
        yield started


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    with file.open("w") as lines:
        for at in range(LINES):
            url, body = BODIES[at % len(BODIES)]
            line = {"custom_id": f"line-{at}", "method": "POST", "url": url, "body": {"model": "demo"} | body}
            lines.write(json.dumps(line) + "\n")
    return file


def batch(headraces: Fleet, source: Path) -> tuple[subprocess.Popen[bytes], Path]:
    return headraces.headrace("batch", "run", source, "-o", source.with_name("out.jsonl"), "--max-in-flight", "24")


def rows(source: Path) -> list[dict[str, Any]]:
    out = source.with_name("out.jsonl")
    return [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []


def written(source: Path) -> int:
    out = source.with_name("out.jsonl")
    return out.read_bytes().count(b"\n") if out.exists() else 0


def ended_well(running: subprocess.Popen[bytes], said: Path, source: Path) -> None:
    """The batch ended by itself, and each line has one answer."""
    assert running.wait(timeout=BOUND) == 0, said.read_text()
    assert not source.with_name("out.jsonl.errors.jsonl").exists(), said.read_text()
    found = rows(source)
    assert sorted(row["custom_id"] for row in found) == WANTED
    assert {row["response"]["status_code"] for row in found} == {200}
    assert all(row["response"]["body"]["usage"]["completion_tokens"] > 0 for row in found)


def test_two_hundred_mixed_lines_get_two_hundred_answers(headraces: Fleet, source: Path) -> None:
    headraces.workers(("render", "control"), ("generate",), ("generate",), ("derender",), ("derender",))
    ended_well(*batch(headraces, source), source)


def test_one_worker_of_each_kind_killed_half_way_loses_and_doubles_nothing(headraces: Fleet, source: Path) -> None:
    roles = ("render", "generate", "derender")
    doomed = headraces.workers(*[(role,) for role in roles])
    headraces.workers(("render", "control"), ("generate",), ("derender",))
    running, said = batch(headraces, source)
    wait_until(lambda: written(source) >= LINES // 4 or running.poll() is not None, "a quarter of the batch")
    for process in doomed:
        process.send_signal(signal.SIGKILL)
    assert written(source) < LINES
    ended_well(running, said, source)


@pytest.mark.parametrize("role", ["render", "generate", "derender"])
def test_a_worker_that_sleeps_past_its_heartbeat_is_replaced_and_wakes_up_in_order(
    headraces: Fleet, vhost: RabbitMQ, source: Path, role: str
) -> None:
    headraces.env["HEADRACE_AMQP_URL"] = f"{vhost.url}?heartbeat=2"  # the broker keeps what a silent connection holds
    (sleeper,) = headraces.workers((role,))
    headraces.workers(("render", "control"), ("generate",), ("derender",))
    running, said = batch(headraces, source)
    wait_until(lambda: written(source) >= LINES // 4 or running.poll() is not None, "a quarter of the batch")
    sleeper.send_signal(signal.SIGSTOP)
    try:
        assert written(source) < LINES
        if role == "render":  # what it has taken is nobody else's until it wakes up
            wait_until(lambda: written(source) >= LINES // 2 or running.poll() is not None, "half of the batch")
        else:
            ended_well(running, said, source)
    finally:
        sleeper.send_signal(signal.SIGCONT)
    ended_well(running, said, source)
    sleeper.terminate()
    assert sleeper.wait(timeout=BOUND) == 0


def test_a_store_that_forgets_everything_half_way_costs_a_batch_no_line(
    headraces: Fleet, source: Path, redis_db: Redis
) -> None:
    headraces.workers(("render", "control"), ("generate",), ("generate",), ("derender",), ("derender",))
    running, said = batch(headraces, source)
    wait_until(lambda: written(source) >= LINES // 4 or running.poll() is not None, "a quarter of the batch")
    with redis_client.Redis.from_url(redis_db.url) as stored:
        stored.flushdb()
    assert written(source) < LINES
    ended_well(running, said, source)


def test_a_killed_batch_goes_on_and_runs_no_line_twice(headraces: Fleet, source: Path, redis_db: Redis) -> None:
    headraces.workers(("render", "control"), ("generate",), ("generate",), ("derender",), ("derender",))
    running, said = batch(headraces, source)
    wait_until(lambda: written(source) >= LINES // 4 or running.poll() is not None, "a quarter of the batch")
    running.send_signal(signal.SIGKILL)
    assert running.wait(timeout=BOUND) == -signal.SIGKILL, said.read_text()
    before = rows(source)
    assert len(before) < LINES

    ended_well(*batch(headraces, source), source)
    assert rows(source)[: len(before)] == before
    with redis_client.Redis.from_url(redis_db.url) as stored:
        logs = [stored.xrange(key) for key in stored.scan_iter("*:log", count=1000)]
    begins = [sum(b"begin" in entry for _, entry in log) for log in logs]
    assert begins == [1] * LINES
