"""Every queue and exchange, as data, and how they come to be.

Work goes to quorum queues. What the broker gives up on by itself (delivered too often) lands in ``intake``, what fails
there in ``dead``. A retry waits in a rung: a queue of one fixed TTL, fed by a fanout exchange with the target queue as
routing key, so that what expires is dead-lettered under that key to where it came from.

Everything here is understood by RabbitMQ 3.10, 3.13 and 4.x. ``x-consumer-timeout`` per queue is not set: 3.10 does not
know it. A delivery must be settled within the broker's own timeout (30 minutes by default).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from aiormq.abc import AbstractChannel

from headrace.broker.ports import TopologyDrift
from headrace.protocol.jobs import CONTROL_QUEUE, DEAD_QUEUE, INTAKE_QUEUE

TOPIC_EXCHANGE: Final = "headrace.topics"
_RUNG: Final = "headrace.retry."
DEFAULT_EXCHANGE: Final = ""
RUNGS: Final = (1.0, 4.0, 15.0, 60.0, 240.0, 900.0)

Arguments: TypeAlias = Mapping[str, str | int]

DELIVERY_LIMIT: Final = 200
"""A backstop: requeues and cut connections count too, so our own ledger of attempts decides long before."""
_KEEP: Final = 1_000_000
"""No delivery limit to speak of, where nothing would catch the message. RabbitMQ 4 has 20 by default."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A durable quorum queue. A dead letter goes to the queue ``dead_letter``, or without one under its own key."""

    name: str
    arguments: Arguments
    exchange: str | None = None
    """A fanout exchange that feeds it."""


def _safe_dead_letters(key: str | None) -> dict[str, str | int]:
    """Dead letters that are confirmed by their next queue before they leave this one."""
    arguments: dict[str, str | int] = {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": DEFAULT_EXCHANGE,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    return arguments if key is None else arguments | {"x-dead-letter-routing-key": key}


@dataclass(frozen=True, slots=True)
class Topology:
    """What is declared. ``max_length`` bounds each work queue, ``rungs`` are the delays of retries in seconds."""

    max_length: int = 100_000
    rungs: tuple[float, ...] = RUNGS

    def __post_init__(self) -> None:
        if not self.rungs or list(self.rungs) != sorted(set(self.rungs)) or self.rungs[0] <= 0:
            raise ValueError(f"rungs: {self.rungs} is not a rising list of positive seconds")

    def work(self, name: str) -> Queue:
        limits: dict[str, str | int] = {"x-delivery-limit": DELIVERY_LIMIT, "x-max-length": self.max_length}
        return Queue(name, _safe_dead_letters(INTAKE_QUEUE) | limits)

    def shared(self) -> list[Queue]:
        """What stands around the work queues."""
        return [
            Queue(DEAD_QUEUE, {"x-queue-type": "quorum", "x-delivery-limit": _KEEP}),
            Queue(INTAKE_QUEUE, _safe_dead_letters(DEAD_QUEUE) | {"x-delivery-limit": DELIVERY_LIMIT}),
            self.work(CONTROL_QUEUE),
            *(self._rung(seconds) for seconds in self.rungs),
        ]

    def all(self, names: Iterable[str]) -> list[Queue]:
        """The work queues of these names and everything around them, each once."""
        queues = {queue.name: queue for queue in self.shared()}
        for name in names:
            queues.setdefault(name, self.work(name))
        return list(queues.values())

    def rung(self, delay: float, draw: float) -> str:
        """The exchange of the rung nearest to ``delay``, on a scale of ratios; now and then of a neighbour.

        ``draw``, from [0, 1), is the jitter: it moves the delay by up to three quarters of a rung either way, so that
        what failed together does not come back together.
        """
        place = _place(self.rungs, delay) + (draw - 0.5) * 1.5
        return rung_name(self.rungs[min(max(round(place), 0), len(self.rungs) - 1)])

    def _rung(self, seconds: float) -> Queue:
        name = rung_name(seconds)
        ttl = {"x-message-ttl": round(seconds * 1000), "x-delivery-limit": _KEEP}
        return Queue(name, _safe_dead_letters(None) | ttl, exchange=name)


DEFAULT_LAYOUT: Final = Topology()


def rung_name(seconds: float) -> str:
    """Name of a rung's queue and of its exchange. It says the TTL, so that other rungs are other queues."""
    return f"{_RUNG}{round(seconds * 1000)}"


def is_rung(queue: str) -> bool:
    """Whether retries wait in this queue."""
    return queue.startswith(_RUNG)


def _place(rungs: tuple[float, ...], delay: float) -> float:
    """Where a delay lies among the rungs: 0 is the first, 0.5 between the first two."""
    if delay <= rungs[0]:
        return 0.0
    if delay >= rungs[-1]:
        return len(rungs) - 1.0
    above = bisect.bisect_right(rungs, delay)
    low, high = rungs[above - 1], rungs[above]
    return above - 1 + math.log(delay / low) / math.log(high / low)


def named_subscription(limit: int) -> Arguments:
    """Arguments of a durable subscription's queue: the oldest message makes room for the newest."""
    return {
        "x-queue-type": "quorum",
        "x-max-length": limit,
        "x-overflow": "drop-head",
        "x-delivery-limit": _KEEP,
    }


def own_subscription(limit: int) -> Arguments:
    """Arguments of a process's own subscription. Exclusive queues are classic ones."""
    return {"x-queue-type": "classic", "x-max-length": limit, "x-overflow": "drop-head"}


async def declare(channel: AbstractChannel, queues: Iterable[Queue]) -> None:
    """Makes them exist, and the topic exchange. RabbitMQ closes the channel when one exists with other arguments."""
    await declare_topics(channel)
    for queue in queues:
        await declare_queue(channel, queue)


async def declare_topics(channel: AbstractChannel) -> None:
    await channel.exchange_declare(TOPIC_EXCHANGE, exchange_type="topic", durable=True)


async def declare_queue(channel: AbstractChannel, queue: Queue) -> None:
    await channel.queue_declare(queue.name, durable=True, arguments=dict(queue.arguments))
    if queue.exchange is not None:
        await channel.exchange_declare(queue.exchange, exchange_type="fanout", durable=True)
        await channel.queue_bind(queue.name, queue.exchange)


_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for (?P<kind>\w+) '(?P<name>[^']*)'.*?"
    r"received (?:the value )?(?P<ours>none|'[^']*').*?but current is (?:the value )?(?P<theirs>none|'[^']*')"
)


def drift(refusal: str, subject: str) -> TopologyDrift:
    """RabbitMQ's 406 as a sentence that says what differs."""
    found = _INEQUIVALENT.search(refusal)
    if found is None:
        return TopologyDrift(f"RabbitMQ refuses the declaration of {subject}: {refusal}")
    return TopologyDrift(
        "{kind} {name!r} exists with {argument} = {theirs}, ours is {ours}: "
        "use the same setting everywhere, or delete it once it is empty".format(**found.groupdict())
    )
