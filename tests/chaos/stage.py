"""The stage: standing servers and healthy workers, and victims with a trap in them, one process each."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from headrace.broker.rabbitmq.topology import RUNGS, rung_name
from headrace.protocol import jobs
from headrace.protocol.jobs import Event
from headrace.settings import Settings
from headrace.workers.probe import VARIABLE
from tests.chaos.asks import BURIED, MODEL
from tests.chaos.driver import Driver, Round
from tests.integration.fleet import NULL_MODEL, Fleet, fleet, wait_until
from tests.servers import RabbitMQ, Redis

HEARTBEAT_S = 1.0
ROLES = ("render", "generate", "derender", "control")
QUEUES = (
    *(jobs.queue_of("render", MODEL, lane) for lane in jobs.LANES),
    *(jobs.queue_of("generate", MODEL, lane) for lane in jobs.LANES),
    *jobs.backlogs_of("generate", MODEL),
    jobs.queue_of("derender", MODEL),
    jobs.replays_of(MODEL),
    jobs.CONTROL_QUEUE,
    jobs.INTAKE_QUEUE,
    *(rung_name(seconds) for seconds in RUNGS),
)


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls a victim: a signal at the time that it comes to a point for so many times."""

    role: str
    point: str
    signal: str
    time: int = 1

    def __str__(self) -> str:
        return f"{self.role}:{self.point}={self.signal}@{self.time}"


@dataclass(slots=True)
class Victim:
    strike: Strike
    process: subprocess.Popen[bytes]
    said: Path

    @property
    def struck(self) -> bool:
        if self.strike.signal == "STOP":
            return _state(self.process.pid) == "T"
        return self.process.poll() is not None

    def finish(self) -> None:
        """Lets it go on if it stands still, and end in order if it lives."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        code = self.process.wait(timeout=30)
        wanted = -signal.SIGKILL if self.strike.signal == "KILL" else 0
        assert code == wanted, f"{self.strike}: exit code {code}, not {wanted}:\n{self.said.read_text()[-3000:]}"


@dataclass(slots=True)
class Stage:
    """Servers with healthy workers. ``heard`` is all that was ever told on them."""

    fleet: Fleet
    settings: Settings
    heard: dict[tuple[str, str], list[Event]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)

    def victims(self, strikes: Sequence[Strike]) -> list[Victim]:
        """A worker for each strike, all of them ready."""
        victims = []
        for strike in strikes:
            trap = {VARIABLE: f"{strike.point}={strike.signal}@{strike.time}"}
            armed = Fleet(self.fleet.env | trap, self.fleet.folder, self.fleet.processes)
            process, said = armed.headrace("worker", strike.role, *NULL_MODEL)
            victims.append(Victim(strike, process, said))
        for victim in victims:
            wait_until(lambda victim=victim: _ready(victim) or victim.struck, "a victim gets ready")  # type: ignore[misc]
        return victims

    def next_round(self) -> Round:
        round_ = Round(f"r{len(self.rounds)}")
        self.rounds.append(round_)
        return round_

    async def suffer(self, strikes: Sequence[Strike], *, rounds: int = 3) -> None:
        """Requests while the strikes fall; then everything must be as if they had not. Asserts that all fell."""
        victims = await asyncio.to_thread(self.victims, strikes)
        async with Driver.at_work(self.settings, self.heard) as driver:
            sent: list[Round] = []
            while not sent or (len(sent) < rounds and not all(victim.struck for victim in victims)):
                sent.append(self.next_round())
                await driver.send(sent[-1])
                await driver.settled(sent[-1])
            missed = [str(victim.strike) for victim in victims if not victim.struck]
            for victim in victims:
                if victim.struck or not missed:
                    await asyncio.to_thread(victim.finish)
            assert not missed, f"they never came to their points: {missed}"
            await driver.emptied(QUEUES)
            broken = [what for round_ in sent for what in await driver.audit(round_)]
            broken += await self._buried(driver)
        broken += self.keys_for_ever()
        assert not broken, "\n".join(broken)

    async def leave(self) -> None:
        """All workers leave in order: what one of them still held would wait in its queue now. Looks at everything
        that was heard once more: nothing came late that should not have."""
        await asyncio.to_thread(self.fleet.close)
        async with Driver.at_work(self.settings, self.heard) as driver:
            await driver.emptied(QUEUES)
            broken = [what for round_ in self.rounds for what in await driver.audit(round_)]
        assert not broken, "\n".join(broken)

    async def _buried(self, driver: Driver) -> list[str]:
        found = await driver.buried()
        return [f"dead: {sorted(found)} lie there, not {sorted(BURIED)}"] if found.keys() != BURIED else []

    def keys_for_ever(self) -> list[str]:
        """Keys in the store without a time to live."""
        with redis.Redis.from_url(self.settings.redis_url or "") as store:
            return [
                f"redis: {key!r} has no time to live" for key in store.scan_iter(count=1000) if store.ttl(key) == -1
            ]


def _ready(victim: Victim) -> bool:
    return b"worker.ready" in victim.said.read_bytes() or victim.process.poll() is not None


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@contextmanager
def stage(rabbitmq: RabbitMQ, redis_server: Redis, folder: Path, **settings: str) -> Iterator[Stage]:
    """Healthy workers, one process of each role, on these servers."""
    own = {"HEARTBEAT": f"{HEARTBEAT_S:g}", "GRACE": "3"} | settings
    with fleet(rabbitmq, redis_server, folder, **own) as healthy:
        healthy.workers(*((role,) for role in ROLES))
        client = Settings(amqp_url=rabbitmq.url, redis_url=redis_server.url, heartbeat=6.0, silence=1.0)
        yield Stage(healthy, client)
