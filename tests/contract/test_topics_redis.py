"""The client topics' promises, kept on Redis; and what only those there can promise."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace.broker.redis.topics
from headrace.broker.contract.topics import ClientTopicsContract, a_client, event, hear, hear_until, numbers
from headrace.broker.embedded.topics import matches
from headrace.broker.ports import ClientTopics, MessageTooLarge, TopicMessage, TopologyDrift
from headrace.broker.redis import connect_redis
from headrace.broker.redis.keys import Keys
from tests import servers

pytestmark = pytest.mark.servers

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "structures.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in DOCUMENT.split("```")
    if block.strip().startswith("HSET")
    for line in block.strip().splitlines()
]


class TestRedisClientTopics(ClientTopicsContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis_db: servers.Redis) -> None:
        self.url = redis_db.url

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientTopics]:
        async with connect_redis(self.url) as stores:
            yield stores.topics


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A connection to look and meddle with."""
    async with redis.asyncio.Redis.from_url(url) as admin:
        yield admin


async def test_durable_messages_that_nobody_hears_are_counted(redis_db: servers.Redis) -> None:
    client = a_client()
    async with connect_redis(redis_db.url) as stores:
        await stores.topics.publish([event(f"{client}.final"), event(f"{client}.chunk", durable=False)])
        async with stores.topics.subscribe(f"{client}.final"):
            await stores.topics.publish([event(f"{client}.final")])
        assert stores.topics.unheard == 1


async def test_a_message_over_the_limit_is_refused_and_none_of_its_batch_is_sent(redis_db: servers.Redis) -> None:
    client = a_client()
    async with (
        connect_redis(redis_db.url, max_body=10) as stores,
        stores.topics.subscribe(f"{client}.#") as messages,
    ):
        with pytest.raises(MessageTooLarge, match="11 bytes are over the limit of 10"):
            await stores.topics.publish([event(f"{client}.chunk"), TopicMessage(f"{client}.final", b"x" * 11)])
        await stores.topics.publish([event(f"{client}.final", 2)])
        assert numbers(await hear(messages, 1)) == [2]


async def test_a_name_under_a_second_pattern_listens_to_both(redis_db: servers.Redis) -> None:
    client = a_client()
    async with connect_redis(redis_db.url) as stores:
        async with stores.topics.subscribe(f"{client}.final", name="mine"):
            pass
        async with stores.topics.subscribe(f"{client}.error", name="mine") as messages:
            kinds = enumerate(("final", "chunk", "error"))
            await stores.topics.publish([event(f"{client}.{kind}", n) for n, kind in kinds])
            assert numbers(await hear(messages, 2)) == [0, 2]


async def test_a_name_with_another_limit_is_refused_with_both_values(redis_db: servers.Redis) -> None:
    client = a_client()
    async with connect_redis(redis_db.url) as stores:
        async with stores.topics.subscribe(f"{client}.#", name="mine", limit=10):
            pass
        with pytest.raises(TopologyDrift, match=r"limit = 5, ours is 10"):
            async with stores.topics.subscribe(f"{client}.#", name="mine", limit=20):
                pass


async def test_two_clients_may_use_the_same_name(redis_db: servers.Redis) -> None:
    a, b = a_client(), a_client()
    async with (
        connect_redis(redis_db.url) as stores,
        stores.topics.subscribe(f"{a}.#", name="mine") as of_a,
        stores.topics.subscribe(f"{b}.#", name="mine") as of_b,
    ):
        await stores.topics.publish([event(f"{client}.final", n) for n, client in enumerate((a, b))])
        assert (numbers(await hear(of_a, 1)), numbers(await hear(of_b, 1))) == ([0], [1])


@pytest.mark.parametrize(
    ("pattern", "name", "limit", "why"),
    [
        ("a.#", None, 1, "limit: 1"),
        ("#", None, 10, "pattern: '#'"),
        ("*.final", None, 10, "pattern: "),
        ("a}.final", None, 10, "pattern: "),
        ("a.final b.#", None, 10, "pattern: "),
        ("a.#", "", 10, "name: ''"),
        ("a.#", "two words", 10, "name: "),
    ],
)
async def test_what_could_reach_another_clients_keys_is_refused(
    pattern: str, name: str | None, limit: int, why: str, redis_db: servers.Redis
) -> None:
    async with connect_redis(redis_db.url) as stores:
        with pytest.raises(ValueError, match=why.replace("*", r"\*")):
            async with stores.topics.subscribe(pattern, name=name, limit=limit):
                pass


async def test_a_clients_keys_share_its_tag_and_none_is_left(redis_db: servers.Redis) -> None:
    client = a_client()
    async with connect_redis(redis_db.url) as stores, looking(redis_db.url) as admin:
        async with stores.topics.subscribe(f"{client}.#") as messages:
            await stores.topics.publish([event(f"{client}.chunk", n) for n in range(3)])
            names = [name.decode() async for name in admin.scan_iter("hr:{c:*")]
            assert len(names) == 2
            assert all(name.startswith(f"hr:{{c:{client}}}:") for name in names)
            assert all([0 < await admin.pttl(name) <= 30_000 for name in names])
            await hear(messages, 3)
        assert [name async for name in admin.scan_iter("hr:{c:*")] == []


async def test_a_reader_leaves_nothing_behind_of_what_it_has_read(redis_db: servers.Redis) -> None:
    client = a_client()
    async with (
        connect_redis(redis_db.url) as stores,
        looking(redis_db.url) as admin,
        stores.topics.subscribe(f"{client}.#") as messages,
    ):
        (stream,) = [name async for name in admin.scan_iter("hr:{c:*events*")]
        for start in range(0, 1000, 50):
            await stores.topics.publish([event(f"{client}.chunk", n) for n in range(start, start + 50)])
            assert numbers(await hear(messages, 50)) == list(range(start, start + 50))
            assert await admin.xlen(stream) <= 64 + 50


async def test_the_subscription_of_a_process_that_died_is_gone_after_its_lease(
    redis_db: servers.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def says_nothing_more(subscription: object) -> None:
        pass

    client = a_client()
    async with connect_redis(redis_db.url) as stores, looking(redis_db.url) as admin:
        with monkeypatch.context() as dying:
            dying.setattr(headrace.broker.redis.topics, "LEASE_S", 0.2)
            dying.setattr(headrace.broker.redis.topics._Subscription, "close", says_nothing_more)
            async with stores.topics.subscribe(f"{client}.#"):
                pass
        registry = Keys().subscriptions(client)
        async with stores.topics.subscribe(f"{client}.#", name="kept") as messages:
            assert await admin.hlen(registry) == 2
            await admin.blpop("nothing is ever pushed here", 0.3)
            await stores.topics.publish([event(f"{client}.final", 1)])
            assert await admin.hkeys(registry) == [b"kept"]
            assert numbers(await hear(messages, 1)) == [1]
        assert stores.topics.unheard == 0


@pytest.mark.parametrize("name", [None, "kept"])
async def test_the_lease_of_a_reader_that_is_busy_elsewhere_is_renewed(
    name: str | None, redis_db: servers.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lease in ("LEASE_S", "NAMED_LEASE_S"):
        monkeypatch.setattr(headrace.broker.redis.topics, lease, 1.0)
    client = a_client()
    async with (
        connect_redis(redis_db.url) as stores,
        looking(redis_db.url) as admin,
        stores.topics.subscribe(f"{client}.#", name=name) as messages,
    ):
        await stores.topics.publish([event(f"{client}.final", 1)])
        await admin.blpop("nothing is ever pushed here", 2.0)
        await stores.topics.publish([event(f"{client}.final", 2)])
        assert numbers(await hear(messages, 2)) == [1, 2]


async def test_a_subscription_that_the_server_lost_is_opened_anew(redis_db: servers.Redis) -> None:
    client = a_client()
    async with (
        connect_redis(redis_db.url) as stores,
        looking(redis_db.url) as admin,
        stores.topics.subscribe(f"{client}.#") as messages,
    ):
        await stores.topics.publish([event(f"{client}.final", 1)])
        await hear(messages, 1)
        await admin.flushdb()
        hearing = asyncio.create_task(hear_until(messages, 99))
        while not hearing.done() and not await admin.exists(Keys().subscriptions(client)):
            await admin.blpop("nothing is ever pushed here", 0.01)
        await stores.topics.publish([event(f"{client}.final", n) for n in (2, 99)])
        assert numbers(await hearing) == [2]


async def test_what_a_client_makes_of_its_own_keys_harms_nobody(redis_db: servers.Redis) -> None:
    a, b, c = a_client(), a_client(), a_client()
    keys = Keys()
    async with (
        connect_redis(redis_db.url) as stores,
        looking(redis_db.url) as admin,
        stores.topics.subscribe(f"{a}.#") as of_a,
        stores.topics.subscribe(f"{b}.#") as of_b,
    ):
        strange = {"x": "", "y": "many a.#", "z": "99999999999999999999 #", "": "5 #", "no stream": "5 #", "none": "5"}
        await admin.hset(keys.subscriptions(a), mapping=strange)
        await admin.set(keys.events(a, "no stream"), "text")
        await admin.set(keys.events(a, "z"), "text")
        await admin.set(keys.subscriptions(c), "text")
        for n in range(2):
            await stores.topics.publish([event(f"{client}.final", n) for client in (c, a, b)])
        assert numbers(await hear(of_a, 2)) == numbers(await hear(of_b, 2)) == [0, 1]
        assert stores.topics.unheard == 2
        assert await admin.get(keys.events(a, "no stream")) == b"text"


async def test_what_is_told_while_a_readers_connection_is_cut_is_heard(redis_db: servers.Redis) -> None:
    client = a_client()
    async with (
        connect_redis(redis_db.url) as stores,
        looking(redis_db.url) as admin,
        stores.topics.subscribe(f"{client}.#") as messages,
    ):
        for n in range(5):
            hearing = asyncio.create_task(hear(messages, 2))
            await asyncio.wait((hearing,), timeout=0.02)  # it waits at the server
            await admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await stores.topics.publish([event(f"{client}.final", 2 * n), event(f"{client}.final", 2 * n + 1)])
            assert numbers(await hearing) == [2 * n, 2 * n + 1]


WORDS = st.lists(st.sampled_from(("a", "b", "")), min_size=1, max_size=5)
PATTERNS = st.lists(st.sampled_from(("a", "b", "", "*", "#")), min_size=0, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(pattern=PATTERNS, words=WORDS)
async def test_the_script_matches_as_the_embedded_topics_do(
    redis_db: servers.Redis, pattern: list[str], words: list[str]
) -> None:
    client = a_client()
    pattern, words = [client, *pattern], [client, *words]
    async with (
        connect_redis(redis_db.url) as stores,
        stores.topics.subscribe(".".join(pattern)) as messages,
    ):
        stores.topics.unheard = 0
        await stores.topics.publish([event(".".join(words))])
        assert stores.topics.unheard == (not matches(pattern, words))
        assert messages is not None


async def test_a_client_without_our_library_subscribes_with_the_commands_of_the_document(
    redis_db: servers.Redis,
) -> None:
    *opening, read, trim = COMMANDS
    async with connect_redis(redis_db.url) as stores, looking(redis_db.url) as admin:
        for command in opening:
            await admin.execute_command(*command)
        await stores.topics.publish([event("acme.final", n) for n in range(3)] + [event("other.final", 4)])
        ((_, entries),) = await admin.execute_command(*read)
        assert [fields[b"body"] for _, fields in entries] == [b"0", b"1", b"2"]
        assert set(entries[0][1]) == {b"key", b"body", b"request_id", b"durable"}
        milliseconds, number = entries[1][0].decode().split("-")
        await admin.execute_command(*trim[:3], f"{milliseconds}-{int(number) + 1}")
        ((_, entries),) = await admin.execute_command(*read)
        assert [fields[b"body"] for _, fields in entries] == [b"2"]
        assert stores.topics.unheard == 1
