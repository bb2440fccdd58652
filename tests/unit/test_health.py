"""What a supervisor of processes asks, and what it is told."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from headrace.workers.health import REQUEST_BYTES, health_served

HOST = "127.0.0.1"


async def ask(port: int, said: bytes) -> tuple[int, dict[str, object]]:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(said)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return (int(head.split()[1]), json.loads(body)) if head else (0, {})


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("path", "troubles", "status"),
    [
        ("/live", [], 200),
        ("/live", ["RabbitMQ is down"], 200),
        ("/ready", [], 200),
        ("/ready?verbose", [], 200),
        ("/ready", ["RabbitMQ is down"], 503),
        ("/", [], 404),
    ],
)
async def test_a_server_that_is_away_makes_it_not_ready_and_not_dead(
    path: str, troubles: list[str], status: int
) -> None:
    async with health_served(HOST, 0, lambda: troubles) as port:
        answered, body = await ask(port, get(path))
    assert (answered, body["ok"]) == (status, status == 200)
    if status == 503:
        assert body["troubles"] == troubles


@pytest.mark.parametrize("said", [b"garbage\r\n\r\n", b"x" * REQUEST_BYTES * 4 + b"\r\n\r\n", b"\r\n\r\n"])
async def test_garbage_is_hung_up_on_and_the_next_one_is_answered(said: bytes) -> None:
    async with health_served(HOST, 0, list) as port:
        try:
            answered, _ = await ask(port, said)
            assert answered in (0, 404)
        except ConnectionError:
            pass
        assert (await ask(port, get("/live")))[0] == 200


async def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(health_served(HOST, 0, list))
        with pytest.raises(OSError, match="in use"):
            await stack.enter_async_context(health_served(HOST, port, list))
