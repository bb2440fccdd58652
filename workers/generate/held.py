"""What a generate worker has in hand: requests that came, and the runs that it took."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.broker.ports import Delivery
from headrace.protocol.generate import GenerateRequest
from headrace.protocol.jobs import GenerateJob
from headrace.workers.generate.writer import Writing


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be served, and the delivery that stands for it, here ``since`` then (Unix seconds)."""

    job: GenerateJob
    request: GenerateRequest
    delivery: Delivery
    since: float

    @property
    def rows(self) -> int:
        """Rows of the engine that it takes."""
        return self.request.sampling_params.n


@dataclass(slots=True)
class Held:
    """A run that this worker generates, on so many of the engine's rows."""

    job: GenerateJob
    delivery: Delivery
    epoch: int
    writing: Writing
    rows: int
