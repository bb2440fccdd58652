"""``headrace dead`` on real servers: what an operator sees and does."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from headrace.broker.ports import Message
from headrace.cli import main
from headrace.client.connect import servers
from headrace.protocol import jobs
from headrace.protocol.jobs import DEAD_QUEUE
from headrace.settings import Settings
from tests.line import CLIENT, render_job
from tests.servers import RabbitMQ, Redis

pytestmark = pytest.mark.servers

SECRET = "only for the client"


@pytest.fixture
def config(vhost: RabbitMQ, redis_db: Redis) -> Settings:
    """Two dead letters, one of them large and one that nobody can read."""
    settings = Settings(amqp_url=vhost.url, redis_url=redis_db.url, inline_bytes=2_000)

    async def bury() -> None:
        async with servers(settings) as broker:
            await broker.queues.declare(["render.demo"])
            large = render_job("large", {"messages": [{"role": "user", "content": SECRET * 500}]})
            for body in (jobs.encode(large), b"garbage"):
                await broker.queues.publish("render.demo", Message(body, "large" if body != b"garbage" else ""))
            async with broker.queues.consume("render.demo", 2) as deliveries:
                for _ in range(2):
                    await broker.queues.bury(await anext(deliveries), "it failed 5 times", {"x-headrace-failures": 5})

    asyncio.run(bury())
    return settings


def invoke(config: Settings, *arguments: str, answer: str | None = None) -> Result:
    env = {
        "HEADRACE_AMQP_URL": config.amqp_url,
        "HEADRACE_REDIS_URL": config.redis_url,
        "HEADRACE_INLINE_BYTES": "2000",
    }
    return CliRunner().invoke(main, ["dead", *arguments], env=env, input=answer)


def depths(config: Settings, *queues: str) -> list[int]:
    async def look() -> list[int]:
        async with servers(config) as broker:
            return [await broker.queues.depth(queue) for queue in queues]

    return asyncio.run(look())


def test_dead_letters_are_listed_and_shown_without_what_was_asked(config: Settings) -> None:
    listed = invoke(config, "list", "--json")
    assert listed.exit_code == 0, listed.output
    large, garbage = (json.loads(line) for line in listed.stdout.splitlines())
    assert (large["request_id"], large["client"], large["queue"]) == ("large", CLIENT, "render.demo")
    assert (large["failures"], large["reason"]) == (5, "it failed 5 times")
    assert (garbage["client"], garbage["job"]) == ("", None)
    some = invoke(config, "list", "--json", "--limit", "1")
    assert (some.stdout, some.stderr) == (listed.stdout.splitlines(True)[0], "At most 1 are shown: --limit.\n")
    assert invoke(config, "list", "--json").stdout == listed.stdout
    assert "large" in invoke(config, "list", "--client", CLIENT).stdout
    assert "No dead letters" in invoke(config, "list", "--reason", "eaten").stdout
    shown = invoke(config, "show", "large")
    assert json.loads(shown.stdout)["job"]["model"] == "demo"
    assert SECRET not in listed.output + shown.output
    assert SECRET in invoke(config, "show", "large", "--body").stdout
    assert invoke(config, "show", "nothing").exit_code == 1
    assert depths(config, DEAD_QUEUE) == [2]


def test_dead_letters_are_sent_again_once_and_those_that_cannot_be_stay(config: Settings) -> None:
    assert invoke(config, "redrive").exit_code == 2
    rehearsed = invoke(config, "redrive", "--all", "--dry-run")
    assert (rehearsed.exit_code, depths(config, DEAD_QUEUE, "render.demo")) == (0, [2, 0])
    done = invoke(config, "redrive", "--all", "--rate", "1000")
    assert done.exit_code == 1
    assert "1 sent again" in done.stdout
    assert depths(config, DEAD_QUEUE, "render.demo") == [1, 1]
    for command in (("redrive", "nothing"), ("purge", "nothing", "--yes")):
        missed = invoke(config, *command)
        assert (missed.exit_code, missed.stderr) == (1, "No such dead letter.\n")


def test_dead_letters_are_thrown_away_when_the_operator_says_yes(config: Settings) -> None:
    assert invoke(config, "purge", "--all", answer="n\n").exit_code == 1
    assert depths(config, DEAD_QUEUE) == [2]
    done = invoke(config, "purge", "large", "--yes")
    assert (done.exit_code, depths(config, DEAD_QUEUE)) == (0, [1])
    assert invoke(config, "purge", "--all", "--yes").exit_code == 0
    assert depths(config, DEAD_QUEUE) == [0]
