"""Whether a new run may begin: not while the log's store is nearly full, nor while nobody tells what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.broker.ports import Broker, BrokerError
from headrace.workers.terms import Terms

REOPEN: Final = 0.95
"""A gate that closed over the memory opens again at this share of the limit: it must not flutter."""


class Vitals(msgspec.Struct, frozen=True):
    """What a worker says of itself: ``behind`` is how far derendering is, in seconds; ``gate`` why no run may begin."""

    role: str
    behind: float = 0.0
    held: int = 0
    waiting: int = 0
    rows: int = 0
    free_rows: int = 0
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen: the share of memory in use, how far each derender worker is behind, the runs none has taken."""

    memory: float
    behind: Sequence[float]
    untold: int


def closed(facts: Facts, terms: Terms, *, most_untold: int, was_closed: bool) -> str | None:
    """Why no run may begin; None if one may."""
    limit = terms.memory_limit * (REOPEN if was_closed else 1.0)
    if facts.memory > limit:
        return f"the run store uses {facts.memory:.0%} of its memory, the limit is {terms.memory_limit:.0%}"
    if facts.behind and min(facts.behind) > terms.lag_limit:
        return f"derendering is {min(facts.behind):.1f} s behind, the limit is {terms.lag_limit:g} s"
    if facts.untold > most_untold:
        return f"{facts.untold} runs wait for a derender worker, the limit is {most_untold}"
    return None


async def look(broker: Broker, model: str, queue: str) -> Facts:
    """Asks the store and the broker; ``queue`` is the derender workers'. Raises BrokerError."""
    reports = await broker.runs.reports(model)
    behind = [vitals.behind for said in reports.values() if (vitals := _read(said)).role == "derender"]
    return Facts(await broker.runs.memory(), behind, await broker.queues.depth(queue))


async def reason(
    broker: Broker, model: str, queue: str, terms: Terms, *, most_untold: int, last: str | None
) -> str | None:
    """Why no run may begin at this moment; what cannot be looked at keeps the gate closed."""
    try:
        facts = await look(broker, model, queue)
    except BrokerError as away:
        return f"it cannot be seen whether there is room: {away}"
    return closed(facts, terms, most_untold=most_untold, was_closed=last is not None)


def _read(said: bytes) -> Vitals:
    try:
        return msgspec.json.decode(said, type=Vitals)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Vitals("")
