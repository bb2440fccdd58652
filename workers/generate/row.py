"""A row: one choice of one run on its way through the engine. Pure values, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]


class Finish(NamedTuple):
    """Why a row is over; ``stop_reason`` is the stop token id, None for an end-of-sequence token and for length."""

    reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """When a row is over: ``limit`` and ``minimum`` count output tokens; no id stops before the minimum."""

    limit: int
    minimum: int = 0
    eos: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()

    @property
    def barred(self) -> frozenset[int]:
        """Ids that may not be sampled before the minimum is reached."""
        return self.eos | self.stops

    def reached(self, made: int, last: int) -> Finish | None:
        """Whether ``made`` output tokens, of which ``last`` is the newest, are the end."""
        if made >= self.minimum:
            if last in self.eos:
                return Finish("stop")
            if last in self.stops:
                return Finish("stop", last)
        return Finish("length") if made >= self.limit else None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are chosen. Temperature 0 is greedy; top_k 0 is no limit; ``logprobs`` None is none.

    ``noise`` is where the row's draws start (noise.stream).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    logprobs: int | None = None
    noise: int = 0

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far have a say."""
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0


@dataclass(eq=False, slots=True)
class Row:
    """One choice of one run: its tokens, prompt first, and where their keys and values lie.

    ``computed`` of the tokens have keys and values in ``blocks``. ``leader`` is the row of the same prompt whose full
    blocks this one may share. ``arrival`` is given by the scheduler.
    """

    run: str
    index: int
    tokens: list[int]
    prompt: int
    ending: Ending
    sampling: Sampling = Sampling()
    priority: int = 0
    leader: Row | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    arrival: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Earlier is served first."""
        return self.priority, self.arrival

    @property
    def made(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 for a row that decodes."""
        return len(self.tokens) - self.computed

    def take(self, token: int) -> Finish | None:
        """Appends a sampled token; says whether the row is over."""
        self.tokens.append(token)
        return self.ending.reached(self.made, token)
