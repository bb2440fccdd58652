"""``/live`` and ``/ready`` over HTTP, for whoever starts and replaces worker processes.

live: the event loop turns, so the process is of use or will be; a server that is away is no reason to replace it, or
all would be replaced at once. ready: both servers can be used and every role has started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec

REQUEST_BYTES: Final = 8192
PATIENCE_S: Final = 5.0
_TEXTS: Final = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


@asynccontextmanager
async def health_served(host: str, port: int, troubles: Callable[[], Sequence[str]]) -> AsyncIterator[int]:
    """Answers while the context lasts; yields the port. ``troubles`` says why the process is not ready.

    Raises OSError where the port cannot be had.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(PATIENCE_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(request.split(b" ", 2)[1].partition(b"?")[0], troubles()))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, port, limit=REQUEST_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _response(path: bytes, troubles: Sequence[str]) -> bytes:
    match path:
        case b"/live":
            status = 200
        case b"/ready":
            status = 503 if troubles else 200
        case _:
            status, troubles = 404, ["there are /live and /ready"]
    body = msgspec.json.encode({"ok": status == 200, "troubles": list(troubles)})
    head = f"HTTP/1.1 {status} {_TEXTS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
