"""What an operator can tell a worker: how long things may take, how much it may take on, whom it trusts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from headrace.broker.ports import Allowance

BEATS_PER_LIFE: Final = 3
"""How often within a heartbeat a worker shows itself; also how often a run of a dead one is looked for."""


NO_LIMIT: Final = Allowance()


@dataclass(frozen=True, slots=True)
class Terms:
    """Spans are in seconds.

    heartbeat: a worker that has not shown itself for so long is taken for dead.
    max_attempts, max_rescues: failures, and deaths of its worker, after which a run is given up.
    consumer_timeout: what the broker allows a delivery to be held; it is renewed after half of that.
    memory_limit: share of the run store's memory above which no run is begun.
    lag_limit: how far derendering may be behind before no run is begun.
    weights: the shares of clients that wait at the same time; 1 for those that are not named.
    allowance: what one client may have under way.
    verify_clients: whether a job's client must be the broker's user that published it; ``trusted`` users may publish
    for any client, as workers do.
    """

    heartbeat: float = 6.0
    max_attempts: int = 5
    max_rescues: int = 3
    consumer_timeout: float = 1800.0
    memory_limit: float = 0.85
    lag_limit: float = 5.0
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    allowance: Allowance = NO_LIMIT
    verify_clients: bool = False
    trusted: frozenset[str] = frozenset()

    @property
    def beat(self) -> float:
        """Between two signs of life."""
        return self.heartbeat / BEATS_PER_LIFE


DEFAULT_TERMS: Final = Terms()
