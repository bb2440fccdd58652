"""Encrypted connections to both servers: the right certificate is taken, every other one refused in a sentence."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from headrace.broker.ports import BrokerError
from headrace.broker.rabbitmq import RabbitMQ, Timing
from headrace.broker.redis import connect_redis
from headrace.client.connect import servers
from headrace.protocol.jobs import FinalEvent
from headrace.settings import Settings, SettingsError
from tests import servers as real
from tests.line import listening, roles, working

pytestmark = pytest.mark.servers

FILES = Path(__file__).parents[1] / "tls"
SECRET = "canary-of-a-password"


def served_with(cert: str, *, asks: bool = False) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(FILES / f"{cert}.pem")
    if asks:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(FILES / "ca.pem")
    return made


@asynccontextmanager
async def encrypted(url: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A port that speaks TLS, in front of a server that does not."""
    parts = urlsplit(url)
    serving: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        inner, outer = await asyncio.open_connection(parts.hostname, parts.port)
        await asyncio.gather(copy(reader, outer), copy(inner, writer))
        serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def behind(url: str, port: int) -> str:
    """The URL by way of the encrypted port."""
    parts = urlsplit(url)
    who = f"{parts.username}:{parts.password}@" if parts.username else ""
    return f"{parts.scheme}s://{who}127.0.0.1:{port}{parts.path}"


async def test_the_whole_line_runs_over_encrypted_connections_with_a_certificate_of_its_own(
    vhost: real.RabbitMQ, redis_db: real.Redis
) -> None:
    context = served_with("server", asks=True)
    async with encrypted(vhost.url, context) as amqp, encrypted(redis_db.url, context) as redis:
        settings = Settings(
            amqp_url=behind(vhost.url, amqp),
            redis_url=behind(redis_db.url, redis),
            tls_ca=FILES / "ca.pem",
            tls_cert=FILES / "client.pem",
        )
        async with servers(settings) as broker, listening(broker) as client, working(roles(broker)):
            await client.chat("r1", max_tokens=4)
            assert isinstance(await client.outcome("r1"), FinalEvent)


Connects = Callable[[str, ssl.SSLContext | None], AbstractAsyncContextManager[object]]
CONNECTS: dict[str, Connects] = {
    "rabbitmq": lambda url, tls: RabbitMQ.connect(url, timing=Timing(connect=1.5, call=1.5), tls=tls),
    "redis": lambda url, tls: connect_redis(url, patience=1.0, reply_timeout=1.0, tls=tls),
}


@pytest.mark.parametrize("server", CONNECTS)
@pytest.mark.parametrize(
    ("cert", "asks", "settings", "said"),
    [
        ("server", False, {}, "certificate verify failed"),
        ("server", False, {"tls_ca": "other"}, "certificate verify failed"),
        ("expired", False, {"tls_ca": "ca"}, "certificate has expired"),
        ("elsewhere", False, {"tls_ca": "ca"}, "IP address mismatch"),
        ("server", True, {"tls_ca": "ca"}, ""),
    ],
    ids=["system's authorities", "another authority", "expired", "another host", "no certificate of ours"],
)
async def test_a_server_that_is_not_vouched_for_is_refused(
    request: pytest.FixtureRequest, server: str, cert: str, asks: bool, settings: dict[str, str], said: str
) -> None:
    url = request.getfixturevalue("vhost" if server == "rabbitmq" else "redis_db").url
    config = Settings.model_validate({name: FILES / f"{file}.pem" for name, file in settings.items()})
    async with encrypted(url, served_with(cert, asks=asks)) as port:
        with pytest.raises(BrokerError) as refused:
            async with CONNECTS[server](behind(url, port), config.tls()):
                pass
    assert said in str(refused.value)


@pytest.mark.parametrize("server", CONNECTS)
async def test_a_port_that_is_not_encrypted_is_refused(request: pytest.FixtureRequest, server: str) -> None:
    url = request.getfixturevalue("vhost" if server == "rabbitmq" else "redis_db").url
    parts = urlsplit(url)
    with pytest.raises(BrokerError) as refused:
        async with CONNECTS[server](f"{parts.scheme}s://u:{SECRET}@{parts.hostname}:{parts.port}{parts.path}", None):
            pass
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("field", ["tls_ca", "tls_cert"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_that_cannot_be_used_is_named_by_its_setting(tmp_path: Path, field: str, content: str | None) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=f"HEADRACE_{field.upper()}"):
        Settings.model_validate({field: file}).tls()
