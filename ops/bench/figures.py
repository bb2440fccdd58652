"""CPU time of processes, and tables of it."""

from __future__ import annotations

import statistics
from pathlib import Path

Figures = dict[str, list[float]]


class Cost:
    """CPU microseconds of processes within a block, by name. Threads that end within it are not counted."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self.us: dict[str, float] = {}

    def __enter__(self) -> Cost:
        self._before = {name: cpu_us(pid) for name, pid in self._pids.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self.us = {name: cpu_us(pid) - self._before[name] for name, pid in self._pids.items()}


def cpu_us(pid: int) -> float:
    """CPU time of a process so far, as the scheduler counts it (Linux)."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


def add(figures: Figures, prefix: str, us: dict[str, float], count: int) -> None:
    for name, spent in us.items():
        figures.setdefault(f"{prefix}: {name}", []).append(spent / count)


def show(title: str, unit: str, figures: Figures, yardstick: str | None = None) -> None:
    """The table of a section; with a yardstick each figure also in terms of that one."""
    print(f"\n## {title}\n\n| | {unit}, median [least - most] | of the yardstick |\n|---|---|---|")
    base = statistics.median(figures[yardstick]) if yardstick else 0.0
    for name, all_of_them in figures.items():
        median = statistics.median(all_of_them)
        ratio = "" if not base or not median else f"1/{base / median:.1f}" if median < base else f"{median / base:.2f}"
        print(f"| {name} | {median:.2f} [{min(all_of_them):.2f} - {max(all_of_them):.2f}] | {ratio} |")
