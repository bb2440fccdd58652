"""Where a client's broker comes from: given, the servers of the settings, or this process with workers in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.broker.ports import Allowance, Broker
from headrace.settings import Settings, SettingsError
from headrace.workers.models import ModelSpec, served_name
from headrace.workers.runtime import Role
from headrace.workers.terms import Terms

if TYPE_CHECKING:
    from headrace.broker.rabbitmq import RabbitMQ
    from headrace.broker.redis import RedisStores

ROLES = ("render", "generate", "derender", "control")


@dataclass(frozen=True, slots=True)
class Backend:
    """A broker, the roles that this process must run for it, and the model asked for where a request names none."""

    broker: Broker
    roles: Sequence[Role]
    model: str


def role(name: str, broker: Broker, spec: ModelSpec, *, terms: Terms) -> Role:
    """A worker of this role. Imports no more than the role needs."""
    match name:
        case "render":
            from headrace.workers.render.worker import RenderWorker

            return RenderWorker(broker, spec, terms=terms)
        case "generate":
            from headrace.workers.generate.worker import GenerateWorker

            return GenerateWorker(broker, spec, terms=terms)
        case "derender":
            from headrace.workers.derender.worker import DerenderWorker

            return DerenderWorker(broker, spec, terms=terms)
        case "control":
            from headrace.workers.control import ControlWorker

            return ControlWorker(broker, terms=terms)
    raise ValueError(f"role must be one of {', '.join(ROLES)}, got {name!r}")


def terms_of(settings: Settings) -> Terms:
    """What the settings tell a worker."""
    return Terms(
        heartbeat=settings.heartbeat,
        max_attempts=settings.max_attempts,
        max_rescues=settings.max_rescues,
        consumer_timeout=settings.consumer_timeout,
        memory_limit=settings.memory_limit,
        lag_limit=settings.lag_limit,
        weights=settings.client_weights,
        allowance=Allowance(settings.client_requests, settings.client_tokens),
        verify_clients=settings.verify_clients,
        trusted=frozenset(settings.trusted_users),
    )


@asynccontextmanager
async def servers(settings: Settings, *, name: str = "headrace") -> AsyncIterator[Broker]:
    """The broker on the servers that the settings name; ``name`` is what RabbitMQ shows of the connection.

    Raises BrokerUnavailable when a server does not answer, SettingsError when none is named.
    """
    from headrace.broker.claim_check import ClaimCheck
    from headrace.broker.rabbitmq import RabbitMQ, Timing, Topology
    from headrace.broker.redis import connect_redis

    settings.require_both_urls_or_none()
    if settings.amqp_url is None or settings.redis_url is None:
        raise SettingsError("HEADRACE_AMQP_URL and HEADRACE_REDIS_URL are not set: they name the servers.")
    tls = settings.tls()
    async with (
        RabbitMQ.connect(
            settings.amqp_urls,
            layout=Topology(max_length=settings.queue_limit),
            max_body=settings.max_message_bytes,
            timing=Timing(heartbeat=max(2, round(settings.heartbeat))),  # RabbitMQ, too, must see a dead worker soon
            name=name,
            tls=tls,
        ) as rabbit,
        connect_redis(settings.redis_url, max_body=settings.max_message_bytes, tls=tls) as redis,
    ):
        inline = min(settings.inline_bytes, settings.max_message_bytes)
        queues = ClaimCheck(rabbit.queues, redis.runs, inline=inline, most=settings.max_request_bytes)
        yield Broker(
            queues, rabbit.topics, redis.log, redis.runs, redis.topics, troubles=lambda: _troubles(rabbit, redis)
        )


def _troubles(rabbit: RabbitMQ, redis: RedisStores) -> list[str]:
    health = rabbit.health()
    states = {"publishing": health.publishing, "consuming": health.consuming}
    away = [f"RabbitMQ ({what}): the connection is {state}" for what, state in states.items() if state != "up"]
    return away + ([] if redis.connected else ["Redis: the connection is down"])


@asynccontextmanager
async def opened(settings: Settings, given: Broker | None, spec: ModelSpec | None) -> AsyncIterator[Backend]:
    """The broker given, else that of the settings, else an embedded one with its roles still to be run.

    ``spec`` is the model of the embedded roles; that of the settings unless given.
    """
    if given is not None:
        yield Backend(given, (), settings.model)
    elif settings.embedded:
        from headrace.broker.embedded import Embedded

        spec = spec or ModelSpec.of(settings.model)
        home = Embedded(max_length=settings.queue_limit, max_body=settings.max_request_bytes)
        # In one process nobody vouches for anybody, nor has to.
        terms = replace(terms_of(settings), verify_clients=False)
        try:
            roles = [role(name, home.broker, spec, terms=terms) for name in ROLES]
            yield Backend(home.broker, roles, spec.name)
        finally:
            home.close()
    else:
        async with servers(settings) as broker:
            yield Backend(broker, (), served_name(settings.model))
