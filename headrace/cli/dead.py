"""``headrace dead``: requests that were given up."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import click

from headrace.cli.running import log_to_stderr, run, settings

if TYPE_CHECKING:
    from headrace.broker.ports import Broker
    from headrace.dead import DeadLetter, Wanted
    from headrace.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


@click.group()
def dead() -> None:
    """Requests that were given up: they failed, or took workers down, too often, or could not be read."""


def _which(command: Callable[P, T]) -> Callable[P, T]:
    """The options that say which dead letters are meant."""
    options = [
        click.option("--client", default=None, help="Those of this client."),
        click.option("--model", default=None, help="Those for this model."),
        click.option("--reason", default=None, metavar="TEXT", help="Those whose reason holds this text."),
        click.option("--older", type=float, default=None, metavar="SECONDS", help="Those given up longer ago."),
        click.option("--newer", type=float, default=None, metavar="SECONDS", help="Those given up since."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@dead.command("list")
@_which
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_(limit: int, as_json: bool, **which: Any) -> None:
    """Show dead letters, oldest first. They stay where they are."""
    config = _config()
    run(_list(config, _wanted((), **which), limit, as_json))


async def _list(config: Settings, wanted: Wanted, limit: int, as_json: bool) -> None:
    from headrace.dead import each

    async def show(letter: DeadLetter) -> None:
        if as_json:
            click.echo(json.dumps(letter.told()))
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(letter.at))
            click.echo(f"{when}  {_line(letter)}")

    async with _broker(config) as broker:
        count = await each(broker, wanted, show, limit=limit)
    if count == limit:
        click.echo(f"At most {limit} are shown: --limit.", err=True)
    if not count and not as_json:
        click.echo("No dead letters.")


@dead.command()
@click.argument("request_id")
@click.option("--client", default=None, help="The client whose request it is.")
@click.option("--body", is_flag=True, help="Print the request too: it may hold what only the client is to see.")
def show(request_id: str, client: str | None, body: bool) -> None:
    """Show all that is known of one: reason, history, envelope. Exit code 1 if there is none."""
    config = _config()
    run(_show(config, _wanted((request_id,), client=client), body))


async def _show(config: Settings, wanted: Wanted, body: bool) -> None:
    from headrace.dead import each

    async def tell(letter: DeadLetter) -> None:
        click.echo(json.dumps(letter.told(), indent=2))
        if body:
            click.echo(letter.delivery.body.decode(errors="replace"))

    async with _broker(config) as broker:
        if not await each(broker, wanted, tell):
            _none()


@dead.command()
@click.argument("request_ids", nargs=-1)
@_which
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--deadline", type=float, default=None, metavar="SECONDS", help="From now on.  [default: as it had]")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=None, help="So many a second at most.")
@click.option("--limit", type=click.IntRange(min=1), default=None, help="So many at most.")
@click.option("--dry-run", is_flag=True, help="Only show which.")
def redrive(
    request_ids: tuple[str, ...],
    everything: bool,
    deadline: float | None,
    rate: float | None,
    limit: int | None,
    dry_run: bool,
    **which: Any,
) -> None:
    """Send dead letters on their way again, with a clean history. Each gets one more outcome.

    Exit code 1 if one of them cannot be sent: it stays.
    """
    config, wanted = _config(), _chosen(request_ids, everything, **which)
    run(_redrive(config, wanted, deadline, rate, limit, dry_run))


async def _redrive(
    config: Settings, wanted: Wanted, deadline: float | None, rate: float | None, limit: int | None, dry_run: bool
) -> None:
    from headrace.dead import NotRedrivable, each
    from headrace.dead import redrive as send

    refused = 0

    async with _broker(config) as broker:

        async def act(letter: DeadLetter) -> None:
            nonlocal refused
            click.echo(_line(letter))
            if dry_run:
                return
            try:
                await send(broker, letter, deadline=deadline)
            except NotRedrivable as error:
                refused += 1
                click.echo(str(error), err=True)
            await asyncio.sleep(0 if rate is None else 1 / rate)

        count = await each(broker, wanted, act, limit=limit)
    click.echo(f"{count - refused} {'would be sent' if dry_run else 'sent'} again.")
    if wanted.request_ids and not count:
        _none()
    if refused:
        sys.exit(1)


@dead.command()
@click.argument("request_ids", nargs=-1)
@_which
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(request_ids: tuple[str, ...], everything: bool, yes: bool, **which: Any) -> None:
    """Throw dead letters away."""
    config, wanted = _config(), _chosen(request_ids, everything, **which)
    if not yes:
        click.confirm("Throw them away for good?", abort=True)
    run(_purge(config, wanted))


async def _purge(config: Settings, wanted: Wanted) -> None:
    from headrace.dead import each
    from headrace.dead import purge as throw_away

    async with _broker(config) as broker:
        count = await each(broker, wanted, lambda letter: throw_away(broker, letter))
    click.echo(f"{count} thrown away.")
    if wanted.request_ids and not count:
        _none()


def _line(letter: DeadLetter) -> str:
    failures = letter.header("failures") or 0
    said = f"{letter.client or '?'}  {letter.request_id or '?'}  {letter.queue}  {failures} failures  {letter.reason}"
    return "".join(each if each.isprintable() else "?" for each in said)  # a client's words do not move the cursor


def _none() -> NoReturn:
    click.echo("No such dead letter.", err=True)
    sys.exit(1)


def _config() -> Settings:
    config = settings()
    log_to_stderr(config, quiet=True)
    return config


def _wanted(request_ids: tuple[str, ...], **which: Any) -> Wanted:
    from headrace.dead import Wanted

    now = time.time()
    older, newer = which.pop("older", None), which.pop("newer", None)
    return Wanted(
        frozenset(request_ids),
        before=None if older is None else now - older,
        after=None if newer is None else now - newer,
        **which,
    )


def _chosen(request_ids: tuple[str, ...], everything: bool, **which: Any) -> Wanted:
    """As ``_wanted``; nothing given is not everything."""
    if not (request_ids or everything or any(value is not None for value in which.values())):
        raise click.UsageError("Name request ids, give a filter, or say --all.")
    return _wanted(request_ids, **which)


@asynccontextmanager
async def _broker(config: Settings) -> AsyncIterator[Broker]:
    from headrace.client.connect import servers
    from headrace.dead import MOST
    from headrace.protocol.jobs import DEAD_QUEUE

    async with servers(config, name="headrace dead") as broker:
        await broker.queues.declare([])
        if (count := await broker.queues.depth(DEAD_QUEUE)) > MOST:
            click.echo(f"There are {count} dead letters: only the {MOST} oldest are looked at.", err=True)
        yield broker
