"""RabbitMQ's client topics keep what the port promises."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.broker.contract.topics import ClientTopicsContract, a_client, event, hear, numbers
from headrace.broker.ports import ClientTopics, MessageTooLarge, TopicMessage, TopologyDrift
from headrace.broker.rabbitmq import RabbitMQ
from tests import servers

pytestmark = pytest.mark.servers


class TestRabbitClientTopics(ClientTopicsContract):
    @pytest.fixture(autouse=True)
    def _server(self, vhost: servers.RabbitMQ) -> None:
        self.url = vhost.url

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ClientTopics]:
        async with RabbitMQ.connect(self.url) as rabbit:
            yield rabbit.topics


async def test_durable_messages_that_nobody_hears_are_counted(vhost: servers.RabbitMQ) -> None:
    client = a_client()
    async with RabbitMQ.connect(vhost.url) as rabbit:
        await rabbit.topics.publish([event(f"{client}.final"), event(f"{client}.chunk", durable=False)])
        async with rabbit.topics.subscribe(f"{client}.final"):
            await rabbit.topics.publish([event(f"{client}.final")])
        assert rabbit.counters.unheard == 1


async def test_a_message_over_the_limit_is_refused_and_none_of_its_batch_is_sent(vhost: servers.RabbitMQ) -> None:
    client = a_client()
    async with RabbitMQ.connect(vhost.url, max_body=10) as rabbit, rabbit.topics.subscribe(f"{client}.#") as messages:
        with pytest.raises(MessageTooLarge, match="11 bytes are over the limit of 10"):
            await rabbit.topics.publish([event(f"{client}.chunk"), TopicMessage(f"{client}.final", b"x" * 11)])
        await rabbit.topics.publish([event(f"{client}.final", 2)])
        assert numbers(await hear(messages, 1)) == [2]


async def test_a_name_with_another_limit_is_refused_with_both_values(vhost: servers.RabbitMQ) -> None:
    client = a_client()
    async with RabbitMQ.connect(vhost.url) as rabbit:
        async with rabbit.topics.subscribe(f"{client}.#", name=client, limit=10):
            pass
        with pytest.raises(TopologyDrift, match=r"x-max-length = '5', ours is '10'"):
            async with rabbit.topics.subscribe(f"{client}.#", name=client, limit=20):
                pass


async def test_a_limit_below_two_is_refused(vhost: servers.RabbitMQ) -> None:
    async with RabbitMQ.connect(vhost.url) as rabbit:
        with pytest.raises(ValueError, match="limit: 1"):
            async with rabbit.topics.subscribe("a.#", limit=1):
                pass
