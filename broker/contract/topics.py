"""What a ClientTopics promises. Subclass it under a name that starts with ``Test`` and give it ``connect``."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager

from headrace.broker.contract.queues import BOUND
from headrace.broker.ports import ClientTopics, TopicMessage


def a_client() -> str:
    """A client that no other test knows."""
    return f"contract-{uuid.uuid4().hex[:12]}"


def event(key: str, n: int = 0, *, durable: bool = True) -> TopicMessage:
    return TopicMessage(key=key, body=b"%d" % n, durable=durable, request_id=f"r{n}")


async def hear(messages: AsyncIterator[TopicMessage], count: int) -> list[TopicMessage]:
    """The next ``count`` messages. Raises TimeoutError when they do not come within the bound."""
    async with asyncio.timeout(BOUND):
        return [await anext(messages) for _ in range(count)]


async def hear_until(messages: AsyncIterator[TopicMessage], last: int) -> list[TopicMessage]:
    """All messages up to number ``last``, which is left out.

    What is published in order arrives in order: when the last is here, nothing before it is still to come.
    """
    heard: list[TopicMessage] = []
    async with asyncio.timeout(BOUND):
        async for message in messages:
            if int(message.body) == last:
                return heard
            heard.append(message)
    raise AssertionError(f"the messages ended before number {last}")


def keys(messages: Iterable[TopicMessage]) -> list[str]:
    return [message.key for message in messages]


def numbers(messages: Iterable[TopicMessage]) -> list[int]:
    return [int(message.body) for message in messages]


class ClientTopicsContract(ABC):
    """Each call of ``connect`` is one more process on the same broker."""

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[ClientTopics]:
        """Connects; leaving the context closes the connection."""

    async def test_a_message_arrives_as_it_was_sent(self) -> None:
        client = a_client()
        sent = [
            TopicMessage(f"{client}.chunk.left", b'{"seq":0}', durable=False, request_id="r-1"),
            TopicMessage(f"{client}.final", b"", durable=True, request_id="r-1"),
        ]
        async with (
            self.connect() as sender,
            self.connect() as receiver,
            receiver.subscribe(f"{client}.#") as messages,
        ):
            await sender.publish(sent)
            assert await hear(messages, 2) == sent

    async def test_a_star_matches_one_word_and_a_hash_any_number(self) -> None:
        a = a_client()
        sent = [f"{a}.chunk", f"{a}.final", f"{a}.chunk.left", f"{a}.final.left", f"{a}.chunk.left.deep", a]
        heard_by = {
            f"{a}.*": [f"{a}.chunk", f"{a}.final"],
            f"{a}.#": sent,
            f"{a}.chunk": [f"{a}.chunk"],
            f"{a}.chunk.#": [f"{a}.chunk", f"{a}.chunk.left", f"{a}.chunk.left.deep"],
            f"{a}.*.left": [f"{a}.chunk.left", f"{a}.final.left"],
            f"{a}.#.left": [f"{a}.chunk.left", f"{a}.final.left"],
            f"{a}.chunk.*.*": [f"{a}.chunk.left.deep"],
        }
        async with self.connect() as topics:
            for pattern, expected in heard_by.items():
                async with topics.subscribe(pattern) as messages:
                    last = pattern.replace("#", "end").replace("*", "end")
                    await topics.publish([*(event(key) for key in sent), event(last, 99)])
                    assert keys(await hear_until(messages, 99)) == expected, pattern

    async def test_messages_of_one_publisher_come_in_order_whatever_their_kind(self) -> None:
        client = a_client()
        async with (
            self.connect() as sender,
            self.connect() as receiver,
            receiver.subscribe(f"{client}.#") as messages,
        ):
            for start in range(0, 300, 15):
                batch = [event(f"{client}.chunk", n, durable=n % 7 == 0) for n in range(start, start + 15)]
                await sender.publish(batch)
            assert numbers(await hear(messages, 300)) == list(range(300))

    async def test_nobody_listening_is_no_error(self) -> None:
        client = a_client()
        async with self.connect() as topics:
            await topics.publish([])
            await topics.publish([event(f"{client}.chunk", durable=False), event(f"{client}.final")])
            async with topics.subscribe(f"{client}.#") as messages:
                await topics.publish([event(f"{client}.final", 2)])
                assert numbers(await hear(messages, 1)) == [2]

    async def test_a_flush_ends_and_loses_nothing(self) -> None:
        client = a_client()
        async with (
            self.connect() as sender,
            self.connect() as receiver,
            receiver.subscribe(f"{client}.#") as messages,
        ):
            await sender.flush()
            for n in range(20):
                await sender.publish([event(f"{client}.chunk", n, durable=False)])
                if n % 7 == 0:
                    async with asyncio.timeout(BOUND):
                        await sender.flush()
            assert numbers(await hear(messages, 20)) == list(range(20))

    async def test_every_subscription_hears_everything(self) -> None:
        client = a_client()
        async with (
            self.connect() as one,
            self.connect() as two,
            one.subscribe(f"{client}.*") as first,
            two.subscribe(f"{client}.*") as second,
        ):
            await one.publish([event(f"{client}.chunk", n) for n in range(20)])
            assert numbers(await hear(first, 20)) == numbers(await hear(second, 20)) == list(range(20))

    async def test_a_client_never_sees_another_clients_keys(self) -> None:
        a = a_client()
        b, longer = a_client(), f"{a}x"
        async with (
            self.connect() as topics,
            topics.subscribe(f"{a}.#") as of_a,
            topics.subscribe(f"{b}.#") as of_b,
        ):
            everyone = [event(f"{client}.chunk", n) for n in range(10) for client in (a, b, longer)]
            await topics.publish([*everyone, event(f"{a}.end", 99), event(f"{b}.end", 99)])
            assert set(keys(await hear_until(of_a, 99))) == {f"{a}.chunk"}
            assert set(keys(await hear_until(of_b, 99))) == {f"{b}.chunk"}

    async def test_a_named_subscription_keeps_messages_while_its_client_is_away(self) -> None:
        client = a_client()
        async with self.connect() as topics, topics.subscribe(f"{client}.#", name=client) as messages:
            await topics.publish([event(f"{client}.final", 1)])
            assert numbers(await hear(messages, 1)) == [1]
        async with self.connect() as topics:
            await topics.publish([event(f"{client}.final", n) for n in (2, 3)])
        async with self.connect() as topics, topics.subscribe(f"{client}.#", name=client) as messages:
            await topics.publish([event(f"{client}.final", 4)])
            assert numbers(await hear(messages, 3)) == [2, 3, 4]

    async def test_a_named_subscription_tells_again_what_its_client_died_over(self) -> None:
        client = a_client()
        async with self.connect() as topics:
            try:
                async with topics.subscribe(f"{client}.#", name=client) as messages:
                    await topics.publish([event(f"{client}.final", n) for n in range(3)])
                    await hear(messages, 2)  # asking for the second is what settles the first
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            async with topics.subscribe(f"{client}.#", name=client) as messages:
                assert numbers(await hear(messages, 2)) == [1, 2]

    async def test_an_unnamed_subscription_ends_with_its_context(self) -> None:
        client = a_client()
        async with self.connect() as topics:
            async with topics.subscribe(f"{client}.#"):
                pass
            await topics.publish([event(f"{client}.final", 1)])
            async with topics.subscribe(f"{client}.#") as messages:
                await topics.publish([event(f"{client}.final", 2)])
                assert numbers(await hear(messages, 1)) == [2]

    async def test_a_slow_client_loses_its_oldest_messages_and_holds_up_nobody(self) -> None:
        client = a_client()
        async with (
            self.connect() as topics,
            self.connect() as others,
            topics.subscribe(f"{client}.#", limit=10) as slow,
            others.subscribe(f"{client}.#") as quick,
        ):
            for start in range(0, 200, 20):
                await topics.publish([event(f"{client}.chunk", n) for n in range(start, start + 20)])
            assert numbers(await hear(quick, 200)) == list(range(200))
            heard: list[int] = []
            while not heard or heard[-1] != 199:
                heard += numbers(await hear(slow, 1))
            assert len(heard) <= 10
            assert heard == sorted(set(heard))

    async def test_a_wait_that_is_given_up_loses_no_message(self) -> None:
        client = a_client()
        got: list[int] = []
        async with self.connect() as topics, topics.subscribe(f"{client}.#") as messages:
            for _ in range(20):
                try:
                    await asyncio.wait_for(anext(messages), 0.002)
                except TimeoutError:
                    continue
                raise AssertionError("a message out of nowhere")

            async def publish_slowly() -> None:
                for n in range(20):
                    await topics.publish([event(f"{client}.chunk", n)])

            publishing = asyncio.create_task(publish_slowly())
            async with asyncio.timeout(BOUND):
                while len(got) < 20:
                    try:
                        got += numbers([await asyncio.wait_for(anext(messages), 0.001)])
                    except TimeoutError:
                        continue
            await publishing
        assert got == list(range(20))

    async def test_what_is_published_once_the_context_is_entered_is_heard(self) -> None:
        client = a_client()
        async with self.connect() as sender, self.connect() as receiver:
            for n in range(10):
                async with receiver.subscribe(f"{client}.#") as messages:
                    await sender.publish([event(f"{client}.final", n)])
                    assert numbers(await hear(messages, 1)) == [n]
