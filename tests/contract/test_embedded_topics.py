"""The client topics' promises, kept in one process; and what only that one can promise."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.contract.topics import ClientTopicsContract, a_client, event, hear, numbers
from headrace.broker.embedded import Embedded, EmbeddedTopics
from headrace.broker.embedded.topics import matches
from headrace.broker.ports import ClientTopics, TopologyDrift


class TestEmbeddedTopics(ClientTopicsContract):
    @pytest.fixture(autouse=True)
    def _home(self) -> None:
        self.home = Embedded()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientTopics]:
        async with self.home.connect() as broker:
            yield broker.topics


async def test_durable_messages_that_nobody_hears_are_counted() -> None:
    home, client = Embedded(), a_client()
    topics = home.broker.topics
    assert isinstance(topics, EmbeddedTopics)
    await topics.publish([event(f"{client}.final"), event(f"{client}.chunk", durable=False)])
    async with topics.subscribe(f"{client}.final"):
        await topics.publish([event(f"{client}.final")])
    assert topics.unheard == 1


async def test_a_name_under_a_second_pattern_listens_to_both() -> None:
    home, client = Embedded(), a_client()
    topics = home.broker.topics
    async with topics.subscribe(f"{client}.final", name=client):
        pass
    async with topics.subscribe(f"{client}.error", name=client) as messages:
        await topics.publish([event(f"{client}.{kind}", n) for n, kind in enumerate(("final", "chunk", "error"))])
        assert numbers(await hear(messages, 2)) == [0, 2]


async def test_a_name_with_another_limit_is_refused_with_both_values() -> None:
    home, client = Embedded(), a_client()
    async with home.broker.topics.subscribe(f"{client}.#", name=client, limit=10):
        pass
    with pytest.raises(TopologyDrift, match=r"limit = 10, ours is 20"):
        async with home.broker.topics.subscribe(f"{client}.#", name=client, limit=20):
            pass


async def test_a_limit_below_two_is_refused() -> None:
    with pytest.raises(ValueError, match="limit: 1"):
        async with Embedded().broker.topics.subscribe("a.#", limit=1):
            pass


async def test_a_message_that_its_client_died_over_is_not_kept_past_the_limit() -> None:
    home, client = Embedded(), a_client()
    topics = home.broker.topics
    with pytest.raises(ZeroDivisionError):
        async with topics.subscribe(f"{client}.#", name=client, limit=2) as messages:
            await topics.publish([event(f"{client}.final", 0)])
            await hear(messages, 1)
            await topics.publish([event(f"{client}.final", n) for n in (1, 2)])
            raise ZeroDivisionError
    async with topics.subscribe(f"{client}.#", name=client, limit=2) as messages:
        assert numbers(await hear(messages, 2)) == [1, 2]


async def test_keys_without_end_do_not_fill_the_memory() -> None:
    home, client = Embedded(), a_client()
    topics = home.broker.topics
    assert isinstance(topics, EmbeddedTopics)
    async with topics.subscribe(f"{client}.#") as messages:
        for n in range(10_000):
            await topics.publish([event(f"{client}.final.{n}", n)])
        assert len(topics._topics._heard_by) <= 4096
        assert numbers(await hear(messages, 10_000)) == list(range(10_000))


WORDS = st.lists(st.sampled_from(("a", "b", "")), min_size=1, max_size=5)


@given(pattern=st.lists(st.sampled_from(("a", "b", "", "*", "#")), min_size=1, max_size=5), words=WORDS)
def test_a_pattern_matches_what_its_hashes_could_stand_for(pattern: list[str], words: list[str]) -> None:
    def expansions(rest: list[str]) -> list[list[str]]:
        if not rest:
            return [[]]
        heads = [["*"] * n for n in range(len(words) + 1)] if rest[0] == "#" else [[rest[0]]]
        return [head + tail for head in heads for tail in expansions(rest[1:])]

    def fits(expanded: list[str]) -> bool:
        return len(expanded) == len(words) and all(p in ("*", w) for p, w in zip(expanded, words, strict=True))

    assert matches(pattern, words) == any(map(fits, expansions(pattern)))


@given(words=WORDS)
def test_a_key_matches_itself_and_a_lone_hash(words: list[str]) -> None:
    assert matches(words, words)
    assert matches(["#"], words)
