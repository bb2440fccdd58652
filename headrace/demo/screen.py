"""How the demo looks: a row for each request while it runs, a bar, and the summary; plain lines without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.demo.acts import Act, State, Summary

_MARKS: Final[dict[State, tuple[str, str]]] = {
    "waiting": ("·", "dim"),
    "running": ("▸", "yellow"),
    "answered": ("✓", "green"),
    "failed": ("✗", "red"),
}
_ASKED_WIDTH: Final = 34
_AROUND: Final = 8
"""Lines of the screen that are no answers."""


def said(act: Act) -> Text:
    """What came back: thought, text, calls, error."""
    text = Text()
    if act.reasoning:
        text.append(_one_line(act.reasoning) + " ", style="dim italic")
    text.append(_one_line(act.text))
    for call in act.calls.values():
        text.append(f" {call} ", style="bold cyan")
    if act.error:
        text.append(act.error, style="red")
    return text


def scene(acts: Sequence[Act], width: int, height: int | None, summary: Summary | None = None) -> RenderableType:
    """The whole picture for a terminal of this size; without a height every answer is shown in full."""
    table = Table(box=None, padding=(0, 1), expand=True, show_header=False)
    table.add_column(width=1)
    table.add_column(width=_ASKED_WIDTH, no_wrap=True, overflow="ellipsis", style="bold")
    table.add_column(ratio=1)
    table.add_column(width=5, justify="right", style="dim")
    room = None if height is None else max(1, (height - _AROUND) // len(acts)) * max(20, width - _ASKED_WIDTH - 14)
    for act in acts:
        mark, style = _MARKS[act.state]
        table.add_row(Text(mark, style), _one_line(act.asked), _tail(said(act), room), f"{act.tokens or ''}")
    ended = sum(act.ended_at is not None for act in acts)
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    tokens = sum(act.tokens for act in acts)
    bar.add_row(ProgressBar(total=len(acts), completed=ended), f"{ended}/{len(acts)} requests, {tokens:,} tokens")
    parts: list[RenderableType] = [table, bar]
    if summary is not None:
        parts += [Text(line, style="bold") for line in summary.lines()]
    return Group(*parts)


def plain(act: Act) -> str:
    """One request at its end, for a pipe or a log."""
    parts = [f"[{act.name}] {_one_line(act.asked)}"]
    if act.reasoning:
        parts.append(f"  thought: {_one_line(act.reasoning)}")
    if act.text:
        parts.append(f"  answer: {_one_line(act.text)}")
    parts += [f"  call: {call}" for call in act.calls.values()]
    if act.error:
        parts.append(f"  error: {act.error}")
    return "\n".join(parts)


def _one_line(text: str) -> str:
    """On one line, and with nothing in it that would steer a terminal."""
    return "".join(char if char.isprintable() else "�" for char in " ".join(text.split()))


def _tail(text: Text, room: int | None) -> Text:
    """The end of a text that is longer than its room: what is being written now."""
    if room is None or len(text) <= room:
        return text
    return Text("…") + text[len(text) - room + 1 :]
