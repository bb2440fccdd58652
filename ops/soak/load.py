"""The load of a soak: the SDK's map and a plain producer, each with a bounded number of requests in flight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aio_pika
from aio_pika.abc import AbstractIncomingMessage

from headrace.broker.rabbitmq.topology import TOPIC_EXCHANGE
from headrace.client import Headrace, Request
from headrace.protocol import jobs
from headrace.settings import Settings
from ops.soak.book import Book, Expected, bare, in_order
from tests.chaos.schedules.answers import Wish, answer_to

SDK: Final = "soak-sdk"
PLAIN: Final = "soak-plain"
HEARD: Final = "soak-heard"
IN_FLIGHT: Final = 192
"""Requests that each of the two has under way, at most."""
SDKS_SHARE: Final = 3
"""Of five requests so many go by the SDK."""
SILENCE_S: Final = 120.0
"""After so long without an outcome those that are owed are lost."""


def _chat(delivery: Literal["stream", "final", "tokens"], **body: object) -> Wish:
    messages = [{"role": "user", "content": "Write the notes."}]
    return Wish("/v1/chat/completions", json.dumps({"messages": messages, "temperature": 1} | body), delivery)


def _tokens(delivery: Literal["stream", "final", "tokens"], **parameters: object) -> Wish:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 1} | parameters}
    return Wish("/inference/v1/generate", json.dumps(body), delivery)


_TWO: Final = {"prompt": "Once upon", "n": 2, "max_tokens": 12, "temperature": 1}
BY_SDK: Final = (
    _chat("final", max_tokens=16),
    Wish("/v1/completions", json.dumps(_TWO), "final"),
    _tokens("final", max_tokens=24),
)
BY_PLAIN: Final = (
    _chat("stream", max_tokens=16),
    _chat("stream", max_tokens=200, ignore_eos=True),
    _tokens("tokens", max_tokens=24),
    _chat("final", max_tokens=12),
    Wish("/v1/completions", json.dumps(_TWO), "final"),
)
SEEDS: Final = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """A request that is sent many times, and what must come of it each time."""

    wish: Wish
    body: dict[str, Any]
    expected: Expected


async def variants(wishes: Sequence[Wish]) -> list[Variant]:
    """Each wish with some seeds."""
    made = []
    for wish in wishes:
        for seed in range(SEEDS):
            answer = await answer_to(wish, "any", seed, calls_tools=False)
            chunks = () if wish.delivery == "final" else tuple(in_order(answer.chunks))
            response = bare(json.dumps(answer.response).encode())
            made.append(Variant(wish, wish.seeded(seed), Expected(chunks, response)))
    return made


@dataclass(slots=True)
class Load:
    """Sends ``requests`` within about ``seconds``, evenly, and enters all that is heard into the book."""

    settings: Settings
    requests: int
    seconds: float
    book: Book = field(default_factory=Book)
    in_flight: int = 0
    news_at: float = 0.0
    began: float = 0.0

    async def run(self) -> None:
        """Returns when every request has its outcome, or nothing came for SILENCE_S."""
        by_sdk = self.requests * SDKS_SHARE // 5
        connection = await aio_pika.connect(self.settings.amqp_url or "")
        async with connection:
            channel = await connection.channel()
            heard = await channel.declare_queue(HEARD, durable=True)
            await heard.bind(TOPIC_EXCHANGE, f"{PLAIN}.#")
            for kind in ("final", "error"):
                await heard.bind(TOPIC_EXCHANGE, f"{SDK}.{kind}.#")
            room = asyncio.Semaphore(IN_FLIGHT)

            async def hear(message: AbstractIncomingMessage) -> None:
                for event in jobs.decode_events(message.body):
                    if self.book.heard(event) and event.client == PLAIN:
                        self.in_flight -= 1
                        self.news_at = time.monotonic()
                        room.release()

            consuming = await heard.consume(hear, no_ack=True)
            self.began = self.news_at = time.monotonic()
            sending = [
                asyncio.create_task(self._map(by_sdk)),
                asyncio.create_task(self._produce(channel, self.requests - by_sdk, room)),
            ]
            await self._while_there_is_news(sending)
            await heard.cancel(consuming)
            await heard.delete(if_unused=False, if_empty=False)

    async def _while_there_is_news(self, sending: Sequence[asyncio.Task[None]]) -> None:
        while not all(task.done() for task in sending) or self.book.lost():
            if time.monotonic() - self.news_at > SILENCE_S:
                break
            done, _ = await asyncio.wait(sending, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if len(done) == len(sending):
                await asyncio.sleep(0.5)  # what is still to be heard
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    async def _paced(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            ahead = self.began + self.seconds * number / count - time.monotonic()
            if ahead > 0:
                await asyncio.sleep(ahead)
            yield number

    async def _map(self, count: int) -> None:
        kinds = await variants(BY_SDK)

        async def asked() -> AsyncIterator[Request]:
            async for number in self._paced(count):
                variant = kinds[number % len(kinds)]
                self.book.owe(SDK, f"m{number}", variant.expected)
                self.in_flight += 1
                yield Request(variant.wish.endpoint, variant.body, request_id=f"m{number}")

        settings = self.settings.model_copy(update={"client": SDK})
        async with Headrace.connect(settings) as headrace:
            async for done in headrace.map(asked(), max_in_flight=IN_FLIGHT):
                self.in_flight -= 1
                self.news_at = time.monotonic()
                self.book.handed_over(SDK, done.request_id, done.final, done.error)

    async def _produce(self, channel: aio_pika.abc.AbstractChannel, count: int, room: asyncio.Semaphore) -> None:
        kinds = await variants(BY_PLAIN)
        async for number in self._paced(count):
            await room.acquire()
            variant = kinds[number % len(kinds)]
            self.book.owe(PLAIN, f"p{number}", variant.expected)
            self.in_flight += 1
            await self._publish(channel, f"p{number}", variant)

    async def _publish(self, channel: aio_pika.abc.AbstractChannel, request_id: str, variant: Variant) -> None:
        of_tokens = variant.wish.endpoint == "/inference/v1/generate"
        job = {
            "type": "generate" if of_tokens else "render",
            "client": PLAIN,
            "request_id": request_id,
            "model": self.settings.model,
            "endpoint": variant.wish.endpoint,
            "request" if of_tokens else "body": variant.body,
            "delivery": variant.wish.delivery,
            "replay_ttl": self.settings.replay_ttl,
        }
        message = aio_pika.Message(
            json.dumps(job).encode(), correlation_id=request_id, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )
        queue = jobs.queue_of("generate" if of_tokens else "render", self.settings.model)
        await channel.default_exchange.publish(message, queue)
