"""``headrace batch run``: OpenAI batch lines in, OpenAI batch lines out."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.running import log_to_stderr, model_options, run, settings, signals, spec_of

if TYPE_CHECKING:
    from headrace.cli.progress import Shown
    from headrace.settings import Settings
    from headrace.workers.models import ModelSpec

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def batch() -> None:
    """Many requests from a file."""


@batch.command("run")
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--out", required=True, type=_FILE, help="File of the results, appended to.")
@click.option("--errors", type=_FILE, default=None, help="File of the failed lines.  [default: OUT.errors.jsonl]")
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=None,
    help="Requests under way at a time.  [default: HEADRACE_BATCH_IN_FLIGHT]",
)
@click.option("--strict", is_flag=True, help="Exit with 1 if any line of IN failed.")
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
@model_options
def run_command(
    source: Path,
    out: Path,
    errors: Path | None,
    max_in_flight: int | None,
    strict: bool,
    quiet: bool,
    model: str | None,
    **given: Any,
) -> None:
    """Run every line of IN.jsonl once.

    Lines are in OpenAI's batch form, for /v1/chat/completions, /v1/completions or /inference/v1/generate. Each gets one
    line in OUT, or in the error file. The exit code is 0 once all have theirs, whatever it says.

    Killed or stopped, the same command goes on where it was: lines that have their result or error are left alone,
    lines under way are picked up. To try failed lines again, delete the error file.

    Over servers, --model and --name say which model to ask for where a line names none; the options after them are for
    the model in this process.
    """
    from headrace.cli.progress import shown_progress

    config = settings()
    log_to_stderr(config, quiet=True)
    errors = errors or out.with_name(out.name + ".errors.jsonl")
    if len({file.resolve() for file in (source, out, errors)}) < 3:
        raise click.UsageError("IN, OUT and the error file must be three files.")
    spec = None
    if config.embedded:
        spec = spec_of(config, model, **given)
    elif model is not None:
        from headrace.workers.models import served_name

        config = config.model_copy(update={"model": given["name"] or served_name(model)})
    with shown_progress(source.stat().st_size, quiet=quiet) as shown:
        caught = run(_run(config, spec, source, out, errors, max_in_flight or config.batch_in_flight, shown))
    if caught:
        click.echo("Stopped before the end. Run the same command again to go on.", err=True)
        sys.exit(128 + caught)
    failed = errors.exists()  # those of earlier runs count too
    if failed and not quiet:
        click.echo(f"Failed lines: {errors}", err=True)
    if strict and failed:
        sys.exit(1)


async def _run(
    config: Settings, spec: ModelSpec | None, source: Path, out: Path, errors: Path, max_in_flight: int, shown: Shown
) -> int:
    """Returns the signal that stopped the batch before its end, else 0."""
    from headrace.batch.ledger import Ledger
    from headrace.batch.run import Batch
    from headrace.client import Headrace

    stop = asyncio.Event()
    caught = 0

    def ask(number: int) -> None:
        nonlocal caught
        caught = number
        stop.set()

    with signals(ask), Ledger.opened(out, errors) as ledger:
        shown.tally.done_before, shown.tally.failed_before = ledger.done_before, ledger.failed_before
        batch = Batch(source, ledger, config, shown.tally, max_in_flight, shown.told)
        async with Headrace.connect(config, spec=spec, topic=ledger.batch) as hr:
            shown.tally.started = time.monotonic()  # a model that had to be loaded does not count
            finished = await batch.run(hr, stop)
    return 0 if finished else caught
