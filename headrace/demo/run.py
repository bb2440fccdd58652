"""Plays the demo: every request at once, embedded, shown live."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live

from headrace import demo_model
from headrace.client import Headrace
from headrace.demo.acts import Act, Summary, read_acts
from headrace.demo.screen import plain, scene
from headrace.settings import Settings
from headrace.workers.models import ModelSpec

REQUESTS: Final = demo_model.PATH / "demo.jsonl"
_FRAMES_S: Final = 1 / 12
_PICTURE_WIDTH: Final = 120
# Fonts that rich would have the reader's browser fetch: without them the picture loads nothing.
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


async def play(settings: Settings, spec: ModelSpec, requests: Path, console: Console) -> tuple[list[Act], Summary]:
    """Plays a file of requests in one process and shows it on the console; returns what came of them."""
    acts = read_acts(requests, spec.name)
    console.print(f"Loading {spec.name} ...", style="dim")
    alone = settings.model_copy(update={"amqp_url": None, "redis_url": None})
    async with Headrace.connect(alone, spec=spec) as hr:
        started = time.monotonic()
        show = _live if console.is_terminal else _told
        await show(hr, acts, console)
        summary = Summary.of(acts, time.monotonic() - started)
    if console.is_terminal:
        console.print(scene(acts, console.width, None, summary))
    else:
        console.print("\n".join(summary.lines()), markup=False, highlight=False, soft_wrap=True)
    return acts, summary


def picture(acts: Sequence[Act], summary: Summary, file: Path) -> None:
    """Writes the final screen as an SVG."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=_PICTURE_WIDTH, file=nowhere, force_terminal=True)
        console.print(scene(acts, _PICTURE_WIDTH, None, summary))
        file.write_text(_FONTS.sub("", console.export_svg(title="headrace demo")))


async def _live(hr: Headrace, acts: Sequence[Act], console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as screen:

        async def draw() -> None:
            while True:
                screen.update(scene(acts, console.width, console.height), refresh=True)
                await asyncio.sleep(_FRAMES_S)

        async with asyncio.TaskGroup() as drawing:
            frames = drawing.create_task(draw())
            async with asyncio.TaskGroup() as playing:
                for act in acts:
                    playing.create_task(act.play(hr))
            frames.cancel()


async def _told(hr: Headrace, acts: Sequence[Act], console: Console) -> None:
    async def tell(act: Act) -> None:
        await act.play(hr)
        console.print(plain(act), markup=False, highlight=False, soft_wrap=True)

    async with asyncio.TaskGroup() as playing:
        for act in acts:
            playing.create_task(tell(act))
