"""For operators: ``headrace topology | doctor``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final

import click

from headrace.cli.running import log_to_stderr, run, settings

if TYPE_CHECKING:
    from headrace.settings import Settings


PATIENCE_S: Final = 5.0
"""How long the doctor waits for a server."""


@click.command()
@click.argument("models", nargs=-1, required=True)
def topology(models: tuple[str, ...]) -> None:
    """Declare the queues of MODELS with everything around them, and print how many messages wait in each."""
    config = settings()
    log_to_stderr(config, quiet=True)
    run(_topology(config, models))


async def _topology(config: Settings, models: tuple[str, ...]) -> None:
    from headrace.client.connect import servers
    from headrace.protocol.jobs import CONTROL_QUEUE, DEAD_QUEUE, INTAKE_QUEUE, queues_of

    names = [name for model in models for name in queues_of(model)]
    shared = [CONTROL_QUEUE, INTAKE_QUEUE, DEAD_QUEUE]
    async with servers(config, name="headrace topology") as broker:
        await broker.queues.declare([*names, *shared])
        for name in (*names, *shared):
            click.echo(f"{await broker.queues.depth(name):>8,}  {name}")


@click.command()
def doctor() -> None:
    """List every setting and try the servers. Exit code 1 if one of them cannot be used."""
    config = settings()
    log_to_stderr(config, quiet=True)
    for shown in config.shown():
        click.secho(f"{shown.variable} = {shown.value}", bold=shown.value != shown.default)
        click.echo(f"    {shown.description} (default: {shown.default})")
    click.echo()
    if config.embedded:
        click.echo("No server is named: everything runs in one process.")
    elif not run(_try_servers(config)):
        sys.exit(1)


async def _try_servers(config: Settings) -> bool:
    from headrace.broker.rabbitmq import RabbitMQ, Timing
    from headrace.broker.redis import connect_redis
    from headrace.settings import masked

    timing = Timing(connect=PATIENCE_S, call=PATIENCE_S)

    tls = config.tls()
    amqp, redis = config.amqp_url or "", config.redis_url or ""
    good = [
        await _try(
            masked(amqp), lambda: RabbitMQ.connect(config.amqp_urls, timing=timing, name="headrace doctor", tls=tls)
        ),
        await _try(masked(redis), lambda: connect_redis(redis, patience=PATIENCE_S, tls=tls)),
    ]
    return all(good) and await _try_topics(config)


async def _try_topics(config: Settings) -> bool:
    """Whether this client hears its own topics, and no others."""
    from headrace.broker.ports import BrokerError
    from headrace.broker.rabbitmq import RabbitMQ, Timing

    timing = Timing(connect=PATIENCE_S, call=PATIENCE_S)
    async with RabbitMQ.connect(config.amqp_urls, timing=timing, name="headrace doctor", tls=config.tls()) as rabbit:
        try:
            async with rabbit.topics.subscribe(f"{config.client}.#"):
                click.secho(f"topics of client {config.client}: can be heard", fg="green")
        except BrokerError as error:
            click.secho(f"topics of client {config.client}: {error}", fg="red")
            return False
        try:
            async with rabbit.topics.subscribe("#"):
                pass
        except BrokerError:
            click.secho("topics of other clients: cannot be heard", fg="green")
            return True
    color = "red" if config.verify_clients else "yellow"
    click.secho("topics of other clients: can be heard by this user, see docs/security.md", fg=color)
    return not config.verify_clients


async def _try(name: str, connect: Callable[[], AbstractAsyncContextManager[object]]) -> bool:
    from headrace.broker.ports import BrokerError

    try:
        async with connect():
            click.secho(f"{name}: ready", fg="green")
            return True
    except BrokerError as error:
        click.secho(f"{name}: {error}", fg="red")
        return False
