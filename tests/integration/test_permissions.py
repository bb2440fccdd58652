"""The permissions of docs/security.md, set on a real RabbitMQ: what a client can do with them, and what it cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from headrace.broker.ports import BrokerError, Message
from headrace.cli import main
from headrace.client import Headrace
from headrace.client.connect import role, servers, terms_of
from headrace.protocol import jobs
from headrace.protocol.jobs import DEAD_QUEUE, RenderJob
from headrace.settings import Settings
from tests.line import demo_spec, raw, working
from tests.servers import RabbitMQ, Redis

pytestmark = pytest.mark.servers

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
CLIENT = "acme"


def permissions() -> tuple[list[str], list[str]]:
    """What the page says: configure, write, read; then write and read of topics."""
    _, _, commands = PAGE.read_text().partition("set_permissions acme")
    said = re.findall(r"'([^'\n]*)'", commands.partition("```")[0])
    assert len(said) == 5
    return said[:3], said[3:]


@dataclass(frozen=True, slots=True)
class Users:
    """The settings of a worker, and of a client with no more rights than it needs."""

    worker: Settings
    client: Settings


@pytest.fixture
def users(vhost: RabbitMQ, redis_db: Redis) -> Iterator[Users]:
    place, (general, topics) = quote(vhost.vhost, safe=""), permissions()
    configure, write, read = general
    vhost.api("PUT", f"/api/users/{CLIENT}", {"password": "secret", "tags": ""})
    rights = {"configure": configure, "write": write, "read": read}
    vhost.api("PUT", f"/api/permissions/{place}/{CLIENT}", rights)
    hears = {"exchange": "headrace.topics", "write": topics[0], "read": topics[1]}
    vhost.api("PUT", f"/api/topic-permissions/{place}/{CLIENT}", hears)
    own = f"amqp://{CLIENT}:secret@{vhost.host}:{vhost.port}/{place}"
    common = {"redis_url": redis_db.url, "verify_clients": True, "trusted_users": [vhost.user]}
    try:
        yield Users(Settings(amqp_url=vhost.url, **common), Settings(amqp_url=own, client=CLIENT, **common))
    finally:
        vhost.api("DELETE", f"/api/users/{CLIENT}")


async def test_a_client_is_served_with_no_more_rights_than_the_page_gives_it(users: Users) -> None:
    names = ("render", "generate", "derender", "control")
    async with servers(users.worker) as broker:
        workers = [role(name, broker, demo_spec(), terms=terms_of(users.worker)) for name in names]
        async with working(workers), Headrace.connect(users.client) as hr:
            stream = await hr.chat(model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
            assert (await stream.result()).choices[0].finish_reason == "length"


async def test_it_hears_no_other_client_and_reads_no_work(users: Users) -> None:
    async with servers(users.worker) as broker, servers(users.client) as own:
        await broker.queues.declare(["render.demo"])
        for pattern in ("#", "*.final.#", "other.#", "acm.#", "acme2.#"):
            with pytest.raises(BrokerError, match="refuse"):
                async with own.topics.subscribe(pattern):
                    pass
        with pytest.raises(BrokerError, match="refuse"):
            async with own.queues.consume("render.demo", 1):
                pass
        async with own.topics.subscribe(f"{CLIENT}.#"):
            pass


async def test_it_cannot_send_for_another_client(users: Users) -> None:
    body = raw({"messages": [{"role": "user", "content": "Hi"}]})
    endpoint = "/v1/chat/completions"
    forged = RenderJob(client="victim", request_id="r1", model="demo", endpoint=endpoint, body=body)
    async with servers(users.worker) as broker, servers(users.client) as own, broker.topics.subscribe("#") as heard:
        workers = [role(name, broker, demo_spec(), terms=terms_of(users.worker)) for name in ("render", "control")]
        async with working(workers):
            await own.queues.publish("render.demo", Message(jobs.encode(forged), "r1"))
            async with broker.queues.consume(DEAD_QUEUE, 1) as dead:
                buried = await anext(dead)
                await broker.queues.ack(buried)
            assert CLIENT in str(buried.headers["x-headrace-reason"])
            assert await broker.runs.result(forged.run) is None
        del heard


@pytest.mark.parametrize(("who", "code", "said"), [("client", 0, "cannot be heard"), ("worker", 1, "can be heard by")])
def test_the_doctor_tries_who_can_be_heard(users: Users, who: str, code: int, said: str) -> None:
    config: Settings = getattr(users, who)
    env = {
        "HEADRACE_AMQP_URL": config.amqp_url or "",
        "HEADRACE_REDIS_URL": config.redis_url or "",
        "HEADRACE_CLIENT": config.client,
        "HEADRACE_VERIFY_CLIENTS": "true",
    }
    done = CliRunner().invoke(main, ["doctor"], env=env)
    assert done.exit_code == code, done.output
    assert said in done.output
    assert "secret" not in done.output
