"""The SDK with the workers in its own process: the whole line, no server, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest

import headrace.client.headrace
import headrace.client.stream
from headrace import Headrace
from headrace.broker.embedded import Embedded
from headrace.broker.ports import Broker, ClientTopics, TopicMessage
from headrace.client.connect import ROLES, role
from headrace.client.door import Request
from headrace.protocol import errors
from headrace.protocol.jobs import FinalEvent, Via
from headrace.settings import Settings
from headrace.workers.models import ModelSpec
from headrace.workers.runtime import serve
from headrace.workers.terms import Terms

BOUND = 30.0
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec.of("demo", engine="null")


@asynccontextmanager
async def embedded(spec: ModelSpec) -> AsyncIterator[Headrace]:
    async with asyncio.timeout(BOUND), Headrace.connect(Settings(), spec=spec) as hr:
        yield hr


async def test_the_chunks_of_a_chat_add_up_to_its_response(spec: ModelSpec) -> None:
    async with embedded(spec) as hr:
        stream = await hr.chat(messages=HELLO, max_tokens=40, seed=3)
        chunks = [chunk async for chunk in stream]
        message = (await stream.result()).choices[0].message
    assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
    assert "".join(chunk.text for chunk in chunks) == (message.content or "")
    assert "".join(chunk.reasoning for chunk in chunks) == (message.reasoning or "")
    assert chunks[-1].finish_reason == "length"


async def test_every_endpoint_answers_in_every_delivery(spec: ModelSpec) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 5},
        "/v1/completions": {"prompt": "hello", "max_tokens": 5},
        "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5}},
    }
    async with embedded(spec) as hr:
        for endpoint, body in bodies.items():
            for delivery in ("stream", "final", "tokens"):
                stream = await hr.submit(endpoint, body, delivery=delivery)  # type: ignore[arg-type]
                chunks = [chunk async for chunk in stream]
                response = await stream.result()
                assert response.usage is not None and response.usage.completion_tokens == 5, (endpoint, delivery)
                assert bool(chunks) == (delivery != "final"), (endpoint, delivery)
                if delivery == "tokens":
                    assert sum(len(chunk.token_ids) for chunk in chunks) == 5


async def test_the_same_request_id_runs_once_and_is_told_again(spec: ModelSpec) -> None:
    async with embedded(spec) as hr:
        answers = []
        for _ in range(2):
            stream = await hr.chat(messages=HELLO, max_tokens=8, temperature=1, request_id="r1", delivery="final")
            answers.append((await stream.outcome()).response)
        assert bytes(answers[0]) == bytes(answers[1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "model": "another"}, "model"),
        ({"messages": HELLO, "max_tokens": 1_000_000}, "max_tokens"),
    ],
)
async def test_what_only_the_workers_can_refuse_names_its_field(
    spec: ModelSpec, body: dict[str, object], param: str
) -> None:
    async with embedded(spec) as hr:
        with pytest.raises(errors.HeadraceError) as refused:
            await (await hr.submit("/v1/chat/completions", body)).result()
    assert (refused.value.param or "").endswith(param)


async def test_token_ids_out_of_the_vocabulary_are_refused_by_their_field(spec: ModelSpec) -> None:
    async with embedded(spec) as hr:
        with pytest.raises(errors.BadRequest) as refused:
            await (await hr.generate(token_ids=[1, 999_999], sampling_params={"max_tokens": 2})).result()
    assert (refused.value.param or "").startswith("token_ids")
    assert "999999" in refused.value.message.replace(",", "")


async def test_a_running_request_can_be_cancelled(spec: ModelSpec) -> None:
    async with embedded(spec) as hr:
        stream = await hr.chat(messages=HELLO, max_tokens=2000, ignore_eos=True)
        await anext(stream)
        await stream.cancel("enough")
        with pytest.raises(errors.Cancelled, match="enough"):
            async for _ in stream:
                pass


async def test_map_answers_many_mixed_requests(spec: ModelSpec) -> None:
    async with embedded(spec) as hr:
        requests = [
            Request("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1 + at % 7}, key=at) for at in range(60)
        ]
        done = [done async for done in hr.map(requests, max_in_flight=16)]
        assert await hr.result(done[0].request_id) is not None
    assert sorted(one.request.key for one in done) == list(range(60))  # type: ignore[type-var]
    assert all(isinstance(one.final, FinalEvent) for one in done)


async def test_workers_that_cannot_start_are_named_at_connect(spec: ModelSpec) -> None:
    nowhere = ModelSpec(name="none", path=spec.path / "missing", engine="null")
    with pytest.raises(headrace.client.Broken, match="tokenizer"):
        async with Headrace.connect(Settings(), spec=nowhere):
            pass


class Lossy:
    """Topics that lose some of what they are told; the first of each kind too."""

    def __init__(self, topics: ClientTopics, random: Random) -> None:
        self._topics = topics
        self._random = random
        self.lost = 0

    async def publish(self, messages: Sequence[TopicMessage]) -> None:
        await self._topics.publish(messages)

    async def flush(self) -> None:
        await self._topics.flush()

    @asynccontextmanager
    async def subscribe(
        self, pattern: str, *, name: str | None = None, limit: int = 100_000
    ) -> AsyncIterator[AsyncIterator[TopicMessage]]:
        async with self._topics.subscribe(pattern, name=name, limit=limit) as messages:
            yield self._some(messages)

    async def _some(self, messages: AsyncIterator[TopicMessage]) -> AsyncIterator[TopicMessage]:
        async for message in messages:
            if self._random.random() < 0.5:
                self.lost += 1
            else:
                yield message


@pytest.mark.parametrize("via", ["amqp", "redis"])
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_missing_though_half_of_all_events_are_lost(
    spec: ModelSpec, seed: int, via: Via, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.client.headrace, "TICK_S", 0.005)
    monkeypatch.setattr(headrace.client.stream, "PATIENCE_S", 0.02)
    home = Embedded()
    lossy = Lossy(home.broker.topics, Random(seed))
    broker = Broker(home.broker.queues, lossy, home.broker.log, home.broker.runs, lossy)
    stop = asyncio.Event()
    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group:
        workers = [role(name, home.broker, spec, terms=Terms(heartbeat=6.0)) for name in ROLES]
        group.create_task(serve(workers, stop=stop, grace=0.0))
        await declared(home.broker)
        async with Headrace.connect(Settings(silence=0.05), broker=broker, via=via) as hr:
            for _ in range(4):
                stream = await hr.chat(messages=HELLO, max_tokens=60, ignore_eos=True)
                chunks = [chunk async for chunk in stream]
                message = (await stream.result()).choices[0].message
                assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
                assert "".join(chunk.reasoning for chunk in chunks) == (message.reasoning or "")
        stop.set()
    home.close()
    assert lossy.lost > 3


async def declared(broker: Broker) -> None:
    await broker.queues.declare(["render.demo", "generate.demo", "derender.demo", "control"])
