"""A worker dies, stands still or is told to leave, at each point where that could hurt: nobody notices."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from headrace.workers.probe import POINTS
from tests.chaos.stage import ROLES, Stage, Strike, stage
from tests.servers import RabbitMQ, Redis

SIGNALS = ("KILL", "STOP", "TERM")
ROLE_OF = {"intake": "control", "outcome": "derender", "job": "control"}
"""Whose victim comes to points that are not named after a role."""
OFTEN = ("render", "generate", "derender.taken", "derender.claimed", "derender.chunks")
"""Points that are passed for many requests: the third time is in the thick of it."""


def _strike(point: str, signal: str) -> Strike:
    role = point.partition(".")[0]
    return Strike(ROLE_OF.get(role, role), point, signal, 3 if point.startswith(OFTEN) else 1)


def _chosen() -> list[tuple[Strike, ...]]:
    """Each point once, signals in turn, a victim of each role at a time."""
    by_role: dict[str, list[Strike]] = {role: [] for role in ROLES}
    for number, point in enumerate(POINTS):
        strike = _strike(point, SIGNALS[number % len(SIGNALS)])
        by_role[strike.role].append(strike)
    together = max(len(strikes) for strikes in by_role.values())
    return [tuple(strikes[n] for strikes in by_role.values() if n < len(strikes)) for n in range(together)]


def _all() -> list[tuple[Strike, ...]]:
    """Each point with each signal, alone."""
    return [(_strike(point, signal),) for point in POINTS for signal in SIGNALS]


CASES = _all() if "HEADRACE_CHAOS" in os.environ else _chosen()


@pytest.fixture(scope="module")
def lasting(rabbitmq: RabbitMQ, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with (
        rabbitmq.fresh_vhost() as vhost,
        redis_server.fresh_database() as database,
        stage(vhost, database, tmp_path_factory.mktemp("workers")) as opened,
    ):
        yield opened


@pytest.mark.servers
@pytest.mark.parametrize("strikes", [(), *CASES], ids=lambda strikes: " ".join(map(str, strikes)) or "undisturbed")
def test_nobody_notices(strikes: tuple[Strike, ...], lasting: Stage) -> None:
    asyncio.run(lasting.suffer(strikes))


@pytest.mark.servers
def test_nothing_is_held_when_all_have_left(lasting: Stage) -> None:
    asyncio.run(lasting.leave())
