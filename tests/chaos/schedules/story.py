"""A whole line on a virtual clock, and what a schedule does to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from headrace.broker.embedded import Embedded
from headrace.broker.ports import TopicMessage
from headrace.client import Headrace
from headrace.client.connect import role
from headrace.client.stream import Stream
from headrace.protocol import errors, jobs
from headrace.protocol.jobs import Event
from headrace.settings import Settings
from headrace.workers.generate.worker import GenerateWorker
from headrace.workers.runtime import Role, serve
from headrace.workers.terms import Terms
from tests.chaos.schedules.answers import CLIENT, RATE, SPEC, WISHES, Wish, engine_settings
from tests.chaos.schedules.company import Asked, Client, Mortal, Requested, Worker
from tests.chaos.schedules.steps import (
    ROLES,
    Again,
    Away,
    Cancel,
    Drain,
    Duplicate,
    Forget,
    Freeze,
    Kill,
    Lose,
    LoseOwn,
    Loss,
    Pass,
    Reconnect,
    RoleName,
    Spoil,
    Start,
    Step,
    Submit,
)
from tests.chaos.schedules.wire import Gossip, Server, Servers, Wire
from tests.virtual import Process

T = TypeVar("T")

TERMS: Final = Terms(heartbeat=6.0, consumer_timeout=3.0)
"""Deliveries are renewed at the first beat after one and a half seconds, twice or so in a run."""
GRACE_S: Final = 0.3
RESTART_S: Final = 0.3
SEEN_DEAD_S: Final = 8.0
"""After so many seconds RabbitMQ takes the connection of a process that is silent for lost."""
SECONDS: Final[tuple[RoleName, ...]] = ("generate", "derender")
"""Of these roles there are two workers at first."""
TAIL: Final = 5
"""Entries of a log that are lost at a time."""
PATIENT_S, HASTY_S = 1_800.0, 15.0
"""Deadlines."""
ENOUGH_S: Final = 400.0
"""Within so many seconds healthy workers bring everything to its end."""
QUIET_LOOKS: Final = 6
REPLAY_TTL_S: Final = 3_600.0
SETTINGS: Final = Settings(client=CLIENT, model=SPEC.name, stream_buffer=8, replay_ttl=REPLAY_TTL_S)
QUEUES: Final = ("render.demo", "generate.demo", "derender.demo", jobs.CONTROL_QUEUE, jobs.INTAKE_QUEUE)


@dataclass(slots=True)
class Story:
    """The line, and everything that a schedule does to it."""

    home: Embedded
    calls_tools: bool
    stack: AsyncExitStack
    servers: Servers = field(default_factory=Servers)
    workers: list[Worker] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    requests: list[Requested] = field(default_factory=list)
    heard: list[tuple[str, Event]] = field(default_factory=list)
    deadly: set[str] = field(default_factory=set)
    starting: list[asyncio.Task[None]] = field(default_factory=list)
    deaths: int = 0
    idle_s: float = 0.0
    back_at: float = 0.0
    """When all servers are there again."""

    # ------------------------------------------------------------------------------------------ setting the scene

    async def open(self, delay: float) -> None:
        await self.home.broker.queues.declare(QUEUES)
        everything = self.home.broker.topics.subscribe(f"{CLIENT}.#")
        listening = asyncio.create_task(self._listen(await self.stack.enter_async_context(everything)))
        self.stack.push_async_callback(end, listening)
        for name in ("a", "b"):
            await self._connect_client(name, delay)
        for each in (*ROLES, *SECONDS):
            await self.start(each, delay)

    async def _listen(self, messages: AsyncIterator[TopicMessage]) -> None:
        async for message in messages:
            _, _, topic = message.key.split(".")
            self.heard += [(topic, event) for event in jobs.decode_events(message.body)]

    async def _connect_client(self, topic: str, delay: float) -> None:
        far = await self.stack.enter_async_context(self.home.connect())
        wire = Wire(far, self.servers, delay=delay)
        gossip = Gossip(wire.broker.topics)
        sdk = await self.stack.enter_async_context(
            Headrace.connect(SETTINGS, broker=replace(wire.broker, topics=gossip), topic=topic)
        )
        self.clients.append(Client(sdk, gossip, wire))

    async def start(self, name: RoleName, delay: float) -> None:
        far = await self.stack.enter_async_context(self.home.connect())
        wire, process, stop, ready = Wire(far, self.servers, delay=delay), Process(), asyncio.Event(), asyncio.Event()
        task = process.start(serve([self._role(name, wire, process)], stop=stop, ready=ready, grace=GRACE_S))
        self.workers.append(Worker(name, process, wire, ready, stop, task))

    def _role(self, name: RoleName, wire: Wire, process: Process) -> Role:
        if name != "generate":
            return role(name, wire.broker, SPEC, terms=TERMS)
        settings = replace(engine_settings(self.calls_tools), tokens_per_second=RATE, rows=SPEC.max_rows)
        engine = Mortal(settings, self.deadly, partial(self._fall, process))
        return GenerateWorker(wire.broker, SPEC, engine=engine, terms=TERMS)

    def _fall(self, process: Process) -> None:
        """Its request took it down; another takes its place."""
        fallen = next(worker for worker in self.workers if worker.process is process)
        fallen.die()
        self._later(RESTART_S, fallen.role)

    # ------------------------------------------------------------------------------------------ steps

    async def take(self, step: Step) -> None:
        match step:
            case Submit():
                await self._submit(step)
            case Again() | Cancel() | Forget() if self.requests:
                await self._meddle(self.requests[step.nth % len(self.requests)], step)
            case Pass(seconds):
                await self._pass(seconds)
            case Start(name, delay):
                await self.start(name, delay)
            case Duplicate(back) if self.servers.published:
                queue, message = self.servers.published[-1 - back % len(self.servers.published)]
                await self.home.broker.queues.publish(queue, message)
            case Spoil(client, what, messages, late):
                self.clients[client].gossip.plan(what, messages, late)
            case Away(server, seconds):
                self._send_away(server, seconds)
            case LoseOwn(client, server, what, calls):
                self.clients[client].wire.lose(server, what, calls)
            case Kill() | Freeze() | Drain() | Reconnect() | Lose() if worker := self._worker(step.role, step.nth):
                self._afflict(worker, step)

    async def _submit(self, step: Submit) -> None:
        request = Requested(f"r{len(self.requests)}", step.deadly, deaths_before=self.deaths)
        self.requests.append(request)
        if step.deadly:
            self.deadly.add(request.run)
        wish = WISHES[step.wish % len(WISHES)]
        await self._send(request, self.clients[step.client], wish, step.seed, HASTY_S if step.hasty else PATIENT_S)

    async def _meddle(self, request: Requested, step: Again | Cancel | Forget) -> None:
        match step:
            case Again(other=other):
                await self._again(request, other)
            case Cancel():
                request.cancelled = True
                first = next(client for client in self.clients if request.request_id in client.asked)
                await _insist(lambda: first.sdk.cancel(request.request_id))
            case Forget(what=what):
                self._forget(request, what)

    def _afflict(self, worker: Worker, step: Kill | Freeze | Drain | Reconnect | Lose) -> None:
        match step:
            case Kill() | Freeze():
                strike = partial(self._strike, worker, step)
                strike() if step.at is None else worker.wire.arm((step.at, strike))
            case Drain(again=again):
                worker.stop.set()
                self._later(again, worker.role)
            case Reconnect():
                worker.wire.reconnect()
            case Lose(server=server, what=what, calls=calls):
                worker.wire.lose(server, what, calls)

    def _strike(self, worker: Worker, step: Kill | Freeze) -> None:
        if worker.dead or worker.process.stopped:
            return
        if isinstance(step, Kill):
            self.deaths += 1
            worker.die()
            self._later(step.again, worker.role)
            return
        self.deaths += step.seconds > TERMS.heartbeat - TERMS.beat
        worker.process.stop()
        loop = asyncio.get_running_loop()
        if step.seconds > SEEN_DEAD_S:
            loop.call_later(SEEN_DEAD_S, worker.wire.reconnect)
        loop.call_later(step.seconds, worker.process.go_on)

    def _send_away(self, server: Server, seconds: float) -> None:
        self.servers.away[server] += 1
        self.back_at = max(self.back_at, time.monotonic() + seconds + 1.0)
        self.idle_s += seconds
        self.deaths += server == "redis" and seconds > TERMS.heartbeat - TERMS.beat
        asyncio.get_running_loop().call_later(seconds, self._come_back, server)

    def _come_back(self, server: Server) -> None:
        self.servers.away[server] -= 1
        if server == "rabbitmq":
            for worker in self.workers:
                if not worker.dead:
                    worker.wire.reconnect()

    def _later(self, seconds: float | None, name: RoleName) -> None:
        if seconds is None:
            return

        async def start() -> None:
            await asyncio.sleep(seconds)
            await self.start(name, 0.0)

        self.starting.append(asyncio.get_running_loop().create_task(start(), context=Context()))

    def _worker(self, name: RoleName, nth: int) -> Worker | None:
        """The one that holds most is the first."""
        candidates = [worker for worker in self.workers if worker.role == name and worker.works]
        candidates.sort(key=lambda worker: -worker.wire.holds)
        return candidates[nth % len(candidates)] if candidates else None

    async def _again(self, request: Requested, other: bool) -> None:
        client = next((each for each in self.clients if request.request_id not in each.asked), None)
        if client is None:
            return
        first = request.asked[0]
        await self._send(request, client, first.wish, first.seed + other, PATIENT_S)

    async def _send(self, request: Requested, client: Client, wish: Wish, seed: int, deadline: float) -> None:
        async def submit() -> Stream[Any]:
            return await client.sdk.submit(
                wish.endpoint,
                wish.seeded(seed),
                request_id=request.request_id,
                delivery=wish.delivery,
                deadline=deadline,
            )

        until = time.time() + deadline
        stream = await _insist(submit)
        asked = client.asked[request.request_id] = Asked(request, wish, seed, stream, until)
        request.asked.append(asked)
        request.bodies.add((wish, seed))

    def _forget(self, request: Requested, what: Loss) -> None:
        request.lost = True
        run = self.home.shelf.find(request.run)
        if run is None:
            return
        if what == "all":
            self.home.shelf.forget(request.run)
        elif what == "log":
            run.log = None
        elif run.log is not None and len(run.log) > 1:
            lost = run.log[max(1, len(run.log) - TAIL) :]
            del run.log[-len(lost) :]
            run.chunks -= sum(entry.kind == "chunk" for entry in lost)
            run.ended = False

    async def _pass(self, seconds: float) -> None:
        if not all(any(worker.works for worker in self.workers if worker.role == name) for name in ROLES):
            self.idle_s += seconds
        await asyncio.sleep(seconds)
        for worker in self.workers:
            worker.look()

    # ------------------------------------------------------------------------------------------ the end

    async def finish(self) -> None:
        """Healthy workers bring everything to its end, while those that were hindered go on as they can."""
        await asyncio.sleep(max(0.0, self.back_at - time.monotonic()))
        await asyncio.gather(*self.starting)
        for name in ROLES:
            await self.start(name, 0.0)
        for lost, seconds in ((False, ENOUGH_S), (True, PATIENT_S + ENOUGH_S)):
            asked = [asked for request in self.requests if request.lost == lost for asked in request.asked]
            await self._answered(asked, seconds)
        await self._settled()
        await self._stop_all()

    async def _settled(self) -> None:
        """Nothing waits, and nothing came of what was still on its way."""
        until, quiet = time.monotonic() + ENOUGH_S, 0
        while quiet < QUIET_LOOKS:
            waiting = await self.waiting()
            quiet = 0 if waiting else quiet + 1
            await asyncio.sleep(0.5)
            assert time.monotonic() < until, f"not settled within {ENOUGH_S:g} s: {waiting}"

    async def _stop_all(self) -> None:
        for starting in self.starting:
            await end(starting)
        living = [worker for worker in self.workers if not worker.dead]
        for worker in living:
            worker.wire.arm(None)
            worker.stop.set()
        await asyncio.wait([worker.task for worker in living], timeout=ENOUGH_S)
        for worker in living:
            assert worker.task.done(), f"{worker.role} did not stop within {ENOUGH_S:g} s"
            worker.look()

    async def _answered(self, asked: Sequence[Asked], seconds: float) -> None:
        """Where an outcome was lost before it was heard, only the deadline ends the waiting for it."""
        until = time.monotonic() + seconds
        for each in asked:
            await asyncio.wait([each.reading], timeout=until - time.monotonic())
            waiting = await self.waiting()
            assert each.reading.done(), f"{each.request.request_id}: no answer within {seconds:g} s; {waiting}"
            await each.reading

    async def waiting(self) -> dict[str, int]:
        """How many jobs wait in each queue, are held, or wait to be tried again; and who may still send one."""
        queues = [queue for queue in self.home._queues._queues if queue != jobs.DEAD_QUEUE]
        depths = {queue: await self.home.broker.queues.depth(queue) for queue in queues}
        depths["held"] = sum(worker.wire.holds for worker in self.workers)
        depths["frozen"] = sum(each.process.stopped and not each.dead for each in self.workers)
        depths["retried"] = self.servers.retried_at >= time.monotonic()
        return {queue: depth for queue, depth in depths.items() if depth}

    async def stop_reading(self) -> None:
        for client in self.clients:
            for asked in client.asked.values():
                await end(asked.reading)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.process.bury()


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _insist(verb: Callable[[], Awaitable[T]]) -> T:
    """As a user does who is told that the servers are away: tries again, under the same request_id."""
    while True:
        try:
            return await verb()
        except errors.Unavailable:
            await asyncio.sleep(1.0)
