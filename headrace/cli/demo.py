"""``headrace demo``: the whole line in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from headrace.cli.running import log_to_stderr, model_options, run, settings, spec_of

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--requests",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="File of batch lines.  [default: the shipped one]",
)
@click.option("--svg", type=_FILE, default=None, help="Also write the last screen as a picture.")
@model_options
def demo(requests: Path | None, svg: Path | None, model: str | None, **given: Any) -> None:
    """Show live streams of several requests, with no server: render, generate and derender in this process.

    Exit code 1 if a request has no answer.
    """
    from rich.console import Console

    from headrace.demo.run import REQUESTS, picture, play

    config = settings()
    log_to_stderr(config, quiet=True)
    spec = spec_of(config, model or "demo", **given)
    acts, summary = run(play(config, spec, requests or REQUESTS, Console()))
    if svg is not None:
        picture(acts, summary, svg)
    if summary.answered < summary.requests:
        sys.exit(1)
