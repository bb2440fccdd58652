"""What a client says, and what it is told, is in no log event; nothing is unpickled or evaluated."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.embedded import Embedded
from headrace.protocol import jobs
from headrace.protocol.jobs import Cancel
from headrace.workers import runtime
from tests.line import CLIENT, Listener, listening, render_job, roles, working

CANARY = "canary5f3a"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    monkeypatch.setattr(runtime, "backoff", lambda tries, **_: 0.0)
    home = Embedded()
    async with listening(home.broker) as listener, working(roles(home.broker, heartbeat=0.3)):
        yield listener
    home.close()


async def say_everything(client: Listener) -> None:
    """Requests of every kind that hold the canary: good, bad, broken, cancelled, late."""
    words = {"messages": [{"role": "user", "content": CANARY}]}
    await client.chat("good", **words, max_tokens=4)
    tool = {"type": "function", "function": {"name": CANARY, "parameters": {"type": "object"}}}
    await client.chat("tools", **words, tools=[tool], max_tokens=4)
    await client.chat("bad", messages=[{"role": "user", "content": CANARY}], temperature=CANARY)
    await client.chat("unknown", messages=[{"role": CANARY, "content": CANARY}])
    await client.generate("ids", token_ids=[5], sampling_params={"max_tokens": CANARY})
    await client.generate("late", sampling_params={"max_tokens": 4}, cache_salt=CANARY)
    broken = json.dumps({"type": "render", "client": CLIENT, "request_id": "broken", "model": "demo", "body": CANARY})
    for body in (broken, broken[:-1], f'"{CANARY}"', json.dumps({"type": CANARY, CANARY: CANARY})):
        await client.send("render.demo", body.encode())
    await client.send("control", jobs.encode(Cancel(client=CLIENT, request_id="good", reason=CANARY)))
    late = render_job("past", words, deadline=1.0)
    await client.send("render.demo", jobs.encode(late))
    for name in ("good", "tools", "bad", "unknown", "ids", "late", "broken", "past"):
        await client.outcome(name)


async def test_no_log_event_of_any_level_holds_what_a_client_said(
    client: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await say_everything(client)
    assert [record.getMessage() for record in caplog.records if CANARY in record.getMessage()] == []


async def test_not_even_where_the_code_fails_over_it(
    client: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*_: object, **__: object) -> None:
        raise RuntimeError(f"cannot read {CANARY}")

    monkeypatch.setattr("headrace.workers.render.renderer.Renderer.chat", defective)
    monkeypatch.setattr(runtime, "MAX_FAILURES", 2)
    await client.chat("r1", messages=[{"role": "user", "content": CANARY}])
    outcome = await client.outcome("r1")
    assert CANARY not in jobs.encode(outcome).decode()
    assert any("job.failed" in record.getMessage() for record in caplog.records)
    assert [record for record in caplog.records if CANARY in f"{record.getMessage()} {record.exc_text}"] == []


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def sources() -> list[Path]:
    return [file for folder in ("protocol", "broker", "workers", "headrace") for file in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("file", sources(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_nothing_is_unpickled_or_evaluated(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                assert not FORBIDDEN_MODULES & {name.name for name in names}
            case ast.ImportFrom(module=str(module)):
                assert module not in FORBIDDEN_MODULES
            case ast.Call(func=ast.Name(id=name)):
                assert name not in FORBIDDEN_CALLS, f"line {node.lineno}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                assert any(keyword.arg == "weights_only" for keyword in keywords), f"line {node.lineno}"


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"a":' * 100_000, b'{"body":' + b"[" * 100_000])
def test_json_that_is_deep_is_refused_and_breaks_nothing(deep: bytes) -> None:
    with pytest.raises(jobs.EnvelopeError):
        jobs.decode(deep)
    assert jobs.sender(deep) is None
    assert jobs.ref_of(b'{"type":"ref",' + deep) is None
    with pytest.raises(jobs.EnvelopeError):
        jobs.decode_events(deep)
