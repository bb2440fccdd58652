"""What a batch has done so far, in counts and rates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw, Struct


class _Usage(Struct):
    completion_tokens: int | None = None


class _Choice(Struct):
    token_ids: list[int] | None = None


class _Response(Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = []


_read = msgspec.json.Decoder(_Response).decode


def output_tokens(response: Raw) -> int:
    """How many tokens a response holds: what its usage says, else its token ids."""
    said = _read(response)
    if said.usage is not None and said.usage.completion_tokens is not None:
        return said.usage.completion_tokens
    return sum(len(choice.token_ids or ()) for choice in said.choices)


@dataclass(slots=True)
class Tally:
    """Counts of one run; ``started`` and every ``now`` are seconds of one monotonic clock."""

    started: float
    done_before: int = 0
    failed_before: int = 0
    answered: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    size: int = 0
    """Bytes of the input whose lines have their rows."""

    @property
    def failed(self) -> int:
        return self.failures.total()

    def rates(self, now: float) -> tuple[float, float]:
        """Answered requests and output tokens, each per second."""
        elapsed = max(now - self.started, 1e-9)
        return self.answered / elapsed, self.tokens / elapsed

    def line(self, now: float) -> str:
        """One line of progress."""
        requests, tokens = self.rates(now)
        before = f", {self.failed_before:,} of them failed" if self.failed_before else ""
        return (
            f"{self.answered:,} answered, {self.failed:,} failed, {self.done_before:,} done before{before}; "
            f"{requests:,.1f} requests/s, {tokens:,.0f} output tokens/s"
        )

    def summary(self, now: float) -> str:
        """The lines at the end."""
        elapsed = now - self.started
        lines = [f"{self.line(now)}; {elapsed:,.1f} s"]
        lines += [f"  {count:,} x {code}" for code, count in self.failures.most_common()]
        return "\n".join(lines)
