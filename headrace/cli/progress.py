"""Progress of a batch: a bar on a terminal, else a line every few seconds; the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headrace.batch.tally import Tally

LINE_EVERY_S = 5.0


@dataclass(slots=True)
class Shown:
    """A tally that a person can see."""

    tally: Tally
    quiet: bool
    _bar: Progress | None
    _task: TaskID
    _said_at: float

    def told(self) -> None:
        """A line has its row."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.tally.size, said=self.tally.line(now))
        elif not self.quiet and now - self._said_at >= LINE_EVERY_S:
            self._said_at = now
            click.echo(self.tally.line(now), err=True)


@contextmanager
def shown_progress(size: int, *, quiet: bool) -> Iterator[Shown]:
    """Shows the progress over an input of ``size`` bytes, and the summary when the block ends."""
    console = Console(stderr=True)
    now = time.monotonic()
    if quiet or not console.is_terminal:
        shown = Shown(Tally(now), quiet, None, TaskID(0), now)
        yield shown
    else:
        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.fields[said]}"))
        with Progress(*columns, console=console) as bar:
            shown = Shown(Tally(now), quiet, bar, bar.add_task("", total=size, said=""), now)
            yield shown
    if not quiet:
        click.echo(shown.tally.summary(time.monotonic()), err=True)
