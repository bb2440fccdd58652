"""The Engine port: what the generate worker asks of whatever makes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from headrace.protocol.errors import HeadraceError
from headrace.protocol.generate import GenerateRequest
from headrace.protocol.wire import TokenChunk, Usage

ResumeClass = Literal["exact", "continue", "refuse"]
"""How an engine goes on from tokens that another worker made durable.

exact: the same tokens that the undisturbed run would have made. continue: plausible ones, from the prompt and the
tokens so far. refuse: not at all; a run that already has chunks ends with ``interrupted``.
"""


class EngineDead(Exception):
    """The engine cannot go on: its worker hands its runs over and exits."""


class ModelRefused(Exception):
    """The engine cannot serve this model: the message names the model and what stands in the way."""


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What one choice has in the log already. A choice that has nothing there need not be told."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A run for the engine. ``resume`` is empty for a fresh run."""

    run: str
    request: GenerateRequest
    resume: tuple[ChoiceSoFar, ...] = ()
    client: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The run is over. Without ``error`` every choice has told its finish reason, and ``usage`` counts them all."""

    usage: Usage | None = None
    error: HeadraceError | None = None
    extra: dict[str, object] = field(default_factory=dict)
    """Further fields of the GenerateTokensResponse: kv_transfer_params, metrics, ..."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step made of one run: chunks in order, each with one choice; ``end`` comes with the last of them."""

    run: str
    chunks: Sequence[TokenChunk]
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine can hold.

    ``rows`` sequences are worked on at a time; one that waits for its turn counts as taken. ``tokens`` are the places
    for keys and values of all rows together; ``max_model_len`` bounds prompt and output of one row, in tokens.
    """

    rows: int
    free_rows: int
    tokens: int
    free_tokens: int
    max_model_len: int


class Engine(Protocol):
    """Makes tokens for many runs at a time. One owner task calls it; only ``start``, ``step`` and ``stop`` may wait.

    A run yields its outputs from ``step``: one chunk for each step and choice, the last one with the ``end``. A run
    that fails ends with an error and leaves the others alone.
    """

    @property
    def resume(self) -> ResumeClass:
        """What this engine promises for an admission with ``resume``."""

    async def start(self) -> None:
        """Loads what there is to load. Raises ModelRefused."""

    def check(self, request: GenerateRequest) -> None:
        """Raises BadRequest for what this engine cannot serve: names the field and the bound. Never ignores one."""

    def admit(self, admission: Admission) -> None:
        """Queues a run that passed ``check``, by its priority. Its rows start when there is room.

        Raises ValueError if the run is here already.
        """

    def cancel(self, run: str) -> None:
        """Frees the run's rows before the next step. The engine says no more about it; unknown runs are fine."""

    async def step(self) -> list[Output]:
        """Waits until there is work, does one step, returns what came of it (at times nothing). Raises EngineDead.

        Cancelling the wait loses nothing: the next call returns what the step made.
        """

    def capacity(self) -> Capacity:
        """What is free now."""

    async def stop(self) -> None:
        """Frees everything. Runs that are not ended are forgotten."""
