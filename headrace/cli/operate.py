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
    from headrace.protocol.jobs import CONTROL_QUEUE, queue_of

    names = [queue_of(role, model) for model in models for role in ("render", "generate", "derender")]
    async with servers(config, name="headrace topology") as broker:
        await broker.queues.declare([*names, CONTROL_QUEUE])
        for name in (*names, CONTROL_QUEUE):
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

    amqp, redis = config.amqp_url or "", config.redis_url or ""
    good = [
        await _try(masked(amqp), lambda: RabbitMQ.connect(config.amqp_urls, timing=timing, name="headrace doctor")),
        await _try(masked(redis), lambda: connect_redis(redis, patience=PATIENCE_S)),
    ]
    return all(good)


async def _try(name: str, connect: Callable[[], AbstractAsyncContextManager[object]]) -> bool:
    from headrace.broker.ports import BrokerError

    try:
        async with connect():
            click.secho(f"{name}: ready", fg="green")
            return True
    except BrokerError as error:
        click.secho(f"{name}: {error}", fg="red")
        return False
