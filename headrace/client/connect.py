"""Where a client's broker comes from: given, the servers of the settings, or this process with workers in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.broker.ports import Broker
from headrace.settings import Settings, SettingsError
from headrace.workers.models import ModelSpec, served_name
from headrace.workers.runtime import Role

ROLES = ("render", "generate", "derender", "control")


@dataclass(frozen=True, slots=True)
class Backend:
    """A broker, the roles that this process must run for it, and the model asked for where a request names none."""

    broker: Broker
    roles: Sequence[Role]
    model: str


def role(name: str, broker: Broker, spec: ModelSpec, *, heartbeat: float) -> Role:
    """A worker of this role. Imports no more than the role needs."""
    match name:
        case "render":
            from headrace.workers.render.worker import RenderWorker

            return RenderWorker(broker, spec)
        case "generate":
            from headrace.workers.generate.worker import GenerateWorker

            return GenerateWorker(broker, spec, heartbeat=heartbeat)
        case "derender":
            from headrace.workers.derender.worker import DerenderWorker

            return DerenderWorker(broker, spec, heartbeat=heartbeat)
        case "control":
            from headrace.workers.control import ControlWorker

            return ControlWorker(broker)
    raise ValueError(f"role must be one of {', '.join(ROLES)}, got {name!r}")


@asynccontextmanager
async def servers(settings: Settings, *, name: str = "headrace") -> AsyncIterator[Broker]:
    """The broker on the servers that the settings name; ``name`` is what RabbitMQ shows of the connection.

    Raises BrokerUnavailable when a server does not answer, SettingsError when none is named.
    """
    from headrace.broker.rabbitmq import RabbitMQ, Timing
    from headrace.broker.redis import connect_redis

    settings.require_both_urls_or_none()
    if settings.amqp_url is None or settings.redis_url is None:
        raise SettingsError("HEADRACE_AMQP_URL and HEADRACE_REDIS_URL are not set: they name the servers.")
    async with (
        RabbitMQ.connect(
            settings.amqp_urls,
            max_body=settings.max_message_bytes,
            timing=Timing(heartbeat=max(2, round(settings.heartbeat))),  # RabbitMQ, too, must see a dead worker soon
            name=name,
        ) as rabbit,
        connect_redis(settings.redis_url, max_body=settings.max_message_bytes) as redis,
    ):
        yield Broker(rabbit.queues, rabbit.topics, redis.log, redis.runs, redis.topics)


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
        home = Embedded(max_body=settings.max_message_bytes)
        try:
            roles = [role(name, home.broker, spec, heartbeat=settings.heartbeat) for name in ROLES]
            yield Backend(home.broker, roles, spec.name)
        finally:
            home.close()
    else:
        async with servers(settings) as broker:
            yield Backend(broker, (), served_name(settings.model))
