"""What a soak looks at while it runs: memory of the workers that live on, of Redis, keys, depths."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import redis

MIB: Final = float(1 << 20)
PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory in MiB, ``rss`` by role; ``depth`` is of all work queues together."""

    second: float
    done: int
    in_flight: int
    depth: int
    redis_memory: float
    keys: int
    rss: Mapping[str, float]


def rss_of(pid: int) -> float:
    """MiB that a process has in memory (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB


def store_of(store: redis.Redis) -> tuple[float, int]:
    """Redis' memory in MiB, and its keys in this database."""
    return int(store.info("memory")["used_memory"]) / MIB, int(store.dbsize())


@dataclass(slots=True)
class Gauges:
    """All samples of a run."""

    samples: list[Sample] = field(default_factory=list)

    def grown(self) -> list[str]:
        """What was not flat: the last quarter beside the second one, when everything had warmed up."""
        count = len(self.samples)
        if count < 8:
            return []
        under_load = self.samples
        second, last = under_load[count // 4 : count // 2], under_load[-count // 4 :]
        of: dict[str, Callable[[Sample], float]] = {
            "Redis memory, MiB": lambda sample: sample.redis_memory,
            "keys": lambda sample: sample.keys,
        }
        of |= {
            f"{role}, MiB": (lambda sample, role=role: sample.rss[role])  # type: ignore[misc]
            for role in last[-1].rss
        }
        medians = {name: (_median(second, get), _median(last, get)) for name, get in of.items()}
        return [
            f"{name}: {before:.1f} in the second quarter, {after:.1f} in the last"
            for name, (before, after) in medians.items()
            if after > 1.3 * before + 8
        ]

    def table(self, rows: int = 12) -> str:
        """About so many of the samples."""
        roles = list(self.samples[-1].rss)
        head = ["s", "done", "in flight", "waiting", "Redis MiB", "keys", *(f"{role} MiB" for role in roles)]
        step = max(1, len(self.samples) // rows)
        shown = self.samples[::step]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for each in shown if shown[-1] is self.samples[-1] else [*shown, self.samples[-1]]:
            figures = f"{each.second:.0f}", each.done, each.in_flight, each.depth, f"{each.redis_memory:.1f}", each.keys
            lines.append("| " + " | ".join(map(str, [*figures, *(f"{each.rss[role]:.0f}" for role in roles)])) + " |")
        return "\n".join(lines)


def _median(samples: Sequence[Sample], get: Callable[[Sample], float]) -> float:
    return statistics.median(get(sample) for sample in samples)
