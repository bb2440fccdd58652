"""The null engine: no model, token ids by script at a set rate. For load and fault tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from headrace.protocol.generate import GenerateRequest
from headrace.workers.generate import noise
from headrace.workers.generate.blocks import BlockPool
from headrace.workers.generate.checks import NEEDS_MODEL, UNSERVED, Limits
from headrace.workers.generate.engine import Admission, Capacity, Output, ResumeClass
from headrace.workers.generate.row import Row
from headrace.workers.generate.runs import Runs
from headrace.workers.generate.scheduler import Scheduler
from headrace.workers.models import ModelSpec

MAX_CHOICES: Final = 128


@dataclass(frozen=True, slots=True)
class NullSettings:
    """``script``: the ids that every row makes, then ``eos``. Without one, ids follow from seed, choice and position.

    ``tokens_per_second`` is the rate of each row; None is as fast as it goes.
    """

    vocab_size: int = 1024
    max_model_len: int = 4096
    rows: int = 32
    script: tuple[int, ...] | None = None
    eos: int = 2
    tokens_per_second: float | None = None


def settings_of(spec: ModelSpec) -> NullSettings:
    """The vocabulary, end and length of the model that the engine stands in for."""
    config, default = spec.config(), NullSettings()
    vocabulary, eos = config.get("vocab_size"), config.get("eos_token_id")
    return NullSettings(
        vocab_size=vocabulary if isinstance(vocabulary, int) else default.vocab_size,
        eos=eos if isinstance(eos, int) else default.eos,
        max_model_len=spec.model_len(),
        rows=spec.max_rows,
    )


class NullEngine:
    """Each row makes one token a step. There is no distribution, so the parameters that shape one have no say."""

    def __init__(
        self,
        settings: NullSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings = settings or NullSettings()
        self._clock = clock
        self._sleep = sleep
        # A block holds a whole row and the budget takes every prompt at once: only the rows bound the work.
        self._blocks = BlockPool(settings.rows, settings.max_model_len)
        self._scheduler = Scheduler(
            rows=settings.rows, blocks=self._blocks, budget=settings.rows * settings.max_model_len
        )
        self._runs = Runs(self._scheduler, max_model_len=settings.max_model_len, eos=frozenset([settings.eos]))
        self._limits = Limits(
            engine="null",
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
            max_choices=MAX_CHOICES,
            unserved={**UNSERVED, **NEEDS_MODEL},
        )
        self._work = asyncio.Event()
        self._due = 0.0

    @property
    def resume(self) -> ResumeClass:
        """The script and the noise know positions only."""
        return "exact"

    async def start(self) -> None:
        """There is nothing to load."""

    def check(self, request: GenerateRequest) -> None:
        """Refuses, besides what no engine serves, what needs a model: logprobs, allowed_token_ids."""
        self._limits.check(request)

    def admit(self, admission: Admission) -> None:
        """Queues a run."""
        self._runs.open(admission)
        self._work.set()

    def cancel(self, run: str) -> None:
        """Forgets a run."""
        self._runs.close(run)

    async def step(self) -> list[Output]:
        """One token for each row that runs, at the set rate."""
        await self._work.wait()
        await self._pace()
        plan = self._scheduler.plan()
        self._scheduler.computed(plan)
        for piece in plan:
            self._runs.take(piece.row, self._token(piece.row))
        outputs = self._runs.collect()
        if not self._runs.busy:
            self._work.clear()
        return outputs

    async def _pace(self) -> None:
        rate = self._settings.tokens_per_second
        if rate is None:
            await asyncio.sleep(0)
            return
        wait = self._due - self._clock()
        if wait > 0:
            await self._sleep(wait)
        # A step that is a little late is made up for by the next ones, idle time is not.
        now, period = self._clock(), 1 / rate
        self._due = (self._due if now - self._due < period else now) + period

    def _token(self, row: Row) -> int:
        script, eos = self._settings.script, self._settings.eos
        if script is not None and row.made < len(script):
            return script[row.made]
        if script is not None and row.made + 1 >= row.ending.minimum:
            return eos
        token = noise.bits(row.sampling.noise, row.made) % (self._settings.vocab_size - 1)
        return token + (token >= eos)

    def capacity(self) -> Capacity:
        """Rows bound this engine; its tokens are what they could hold."""
        return self._scheduler.capacity(self._settings.max_model_len)

    async def stop(self) -> None:
        """Forgets every run."""
        self._runs.clear()
        self._work.clear()
