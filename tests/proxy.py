"""A TCP proxy on loopback that a test can make deaf, forgetful or broken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto


class Mood(Enum):
    """What the proxy does with the bytes that it is given."""

    FAIR = auto()
    """Passes everything on."""
    DEAF = auto()
    """Swallows both directions and keeps the sockets open: a peer that is gone without a word."""
    FORGETFUL = auto()
    """Passes requests on and swallows the replies."""
    BROKEN = auto()
    """Closes every new connection at once."""


class Proxy:
    """Listens on ``port`` for as long as its block lasts. ``mood`` may be changed at any time."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving = 0
        self._served = asyncio.Event()
        self._served.set()
        self.port = 0
        self.mood = Mood.FAIR
        self.delay = 0.0
        """Seconds that everything takes on its way."""
        self.accepted = 0
        self.requested = asyncio.Event()
        """Set when a client has sent something; a test clears it and waits for the next."""

    @classmethod
    @asynccontextmanager
    async def to(cls, host: str, port: int) -> AsyncIterator["Proxy"]:
        proxy = cls(host, port)
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.cut()
            async with asyncio.timeout(10):
                await proxy._served.wait()

    def cut(self) -> None:
        """Breaks every connection there is, both ends."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._serving += 1
        self._served.clear()
        self._writers.add(to_client)
        try:
            if self.mood is Mood.BROKEN:
                return
            from_server, to_server = await asyncio.open_connection(*self.target)
            self._writers.add(to_server)
            requests = asyncio.create_task(self._pass(from_client, to_server, (Mood.FAIR, Mood.FORGETFUL)))
            replies = asyncio.create_task(self._pass(from_server, to_client, (Mood.FAIR,)))
            await asyncio.wait((requests, replies), return_when=asyncio.FIRST_COMPLETED)
            if self.mood is Mood.DEAF:  # one end hung up, and the other does not hear that either
                await asyncio.wait((requests, replies))
            to_server.transport.abort()
            to_client.transport.abort()
            await asyncio.wait((requests, replies))
            self._writers.discard(to_server)
        except OSError:
            pass  # the server is away: so is this connection
        finally:
            to_client.transport.abort()
            self._writers.discard(to_client)
            self._serving -= 1
            if not self._serving:
                self._served.set()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moods: tuple[Mood, ...]) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if Mood.FORGETFUL in moods:
                    self.requested.set()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.mood in moods:
                    writer.write(data)
                    await writer.drain()
