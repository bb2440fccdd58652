"""``headrace worker``: one process that takes one or more roles."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from headrace.cli.running import log_to_stderr, model_options, run, settings, signals, spec_of
from headrace.logs import get_logger

if TYPE_CHECKING:
    from headrace.settings import Settings
    from headrace.workers.models import ModelSpec

ROLES = ("render", "generate", "derender", "control")

COLLECT_AFTER: Final = (20_000, 20, 50)
"""Objects between two collections, and collections between two of the next generation."""


@click.command()
@click.argument("roles", nargs=-1, required=True, type=click.Choice([*ROLES, "all"]))
@model_options
def worker(roles: tuple[str, ...], model: str | None, **given: Any) -> None:
    """Serve ROLES for a model: render, generate, derender, control, or all.

    Takes jobs until SIGTERM or SIGINT, then finishes or hands over what it holds. A second signal ends it at once.
    """
    config = settings()
    log_to_stderr(config, quiet=False)
    chosen = ROLES if "all" in roles else tuple(dict.fromkeys(roles))
    spec = spec_of(config, model, weights="generate" in chosen, **given)
    run(_work(config, chosen, spec))


async def _work(config: Settings, roles: tuple[str, ...], spec: ModelSpec) -> None:
    from headrace.client.connect import role, servers, terms_of
    from headrace.workers.runtime import serve

    stop, ready = asyncio.Event(), asyncio.Event()
    with signals(lambda number: stop.set()):
        async with servers(config, name=f"headrace {' '.join(roles)} {spec.name}") as broker:
            announcing = asyncio.create_task(_announce(ready, roles, spec.name))
            try:
                workers = [role(name, broker, spec, terms=terms_of(config)) for name in roles]
                async with _health(config, lambda: [*([] if ready.is_set() else ["starting"]), *broker.troubles()]):
                    await serve(workers, stop=stop, ready=ready, grace=config.grace)
            finally:
                announcing.cancel()


@asynccontextmanager
async def _health(config: Settings, troubles: Callable[[], Sequence[str]]) -> AsyncIterator[None]:
    if config.health_port is None:
        yield
        return
    from headrace.workers.health import health_served

    async with health_served(config.health_host, config.health_port, troubles) as port:
        get_logger().info("worker.health", host=config.health_host, port=port)
        yield


async def _announce(ready: asyncio.Event, roles: tuple[str, ...], model: str) -> None:
    await ready.wait()
    spare_the_collector()
    get_logger().info("worker.ready", roles=roles, model=model)


def spare_the_collector() -> None:
    """What was loaded stays until the end: looking through it for garbage would hold every stream up for nothing.

    The rest comes in bursts, a read's entries at a time, and is freed without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
