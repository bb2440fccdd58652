"""The embedded engine: models of transformers on our own paged loop, on a CPU or a CUDA device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.protocol.generate import GenerateRequest
from headrace.workers.generate.engine import Admission, Capacity, EngineDead, Output, ResumeClass
from headrace.workers.generate.engines.loop import PagedLoop, TransformersSettings


class TransformersEngine:
    """Continuous batching: prompts in chunks beside decoding rows, one forward pass a step.

    Steps run in a thread of their own. What is asked for while one is under way is done right after it.
    """

    def __init__(self, settings: TransformersSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._loop: PagedLoop | None = None
        self._here: set[str] = set()
        self._work = asyncio.Event()
        self._step: asyncio.Future[None] | None = None
        self._later: list[Callable[[], None]] = []

    @property
    def resume(self) -> ResumeClass:
        """Draws depend on seed, choice and position, all else on the tokens."""
        return "exact"

    @property
    def loop(self) -> PagedLoop:
        """The loaded loop."""
        assert self._loop is not None, "the engine has not been started"
        return self._loop

    async def start(self) -> None:
        """Loads and proves the model, and lays out the memory for keys and values."""
        self._loop = await asyncio.get_running_loop().run_in_executor(self._thread, PagedLoop, self._settings)

    def check(self, request: GenerateRequest) -> None:
        """Raises BadRequest, by name: see checks.UNSERVED for what no request may ask for."""
        self.loop.limits.check(request)

    def admit(self, admission: Admission) -> None:
        """Queues a run; one that comes in the middle of a step joins the next."""
        if admission.run in self._here:
            raise ValueError(f"run {admission.run} was admitted already")
        self._here.add(admission.run)
        self._between_steps(lambda: self.loop.runs.open(admission))
        self._work.set()

    def cancel(self, run: str) -> None:
        """Frees the run's rows and blocks at once, or right after the step that is under way."""
        self._here.discard(run)
        self._between_steps(lambda: self.loop.runs.close(run))

    def _between_steps(self, change: Callable[[], None]) -> None:
        if self._step is None:
            change()
        else:
            self._later.append(change)

    async def step(self) -> list[Output]:
        """One step in the engine's thread. Raises EngineDead with the reason when a pass fails as a whole."""
        if self._step is None:
            await self._work.wait()
            self._step = asyncio.get_running_loop().run_in_executor(self._thread, self.loop.step)
        try:
            await asyncio.shield(self._step)
        except Exception as error:
            self._step = None
            raise EngineDead(f"a step failed: {type(error).__name__}: {error}") from error
        self._step = None
        later, self._later = self._later, []
        for change in later:
            change()
        outputs = self.loop.runs.collect()
        self._here.difference_update(output.run for output in outputs if output.end is not None)
        if not self.loop.runs.busy:
            self._work.clear()
        return outputs

    def capacity(self) -> Capacity:
        """What is free now."""
        return self.loop.scheduler.capacity(self.loop.limits.max_model_len)

    async def stop(self) -> None:
        """Waits for the step that is under way, then lets go of the model and its memory."""
        if self._step is not None:
            await asyncio.gather(self._step, return_exceptions=True)
        self._step = self._loop = None
        self._later.clear()
        self._here.clear()
        self._work.clear()
        self._thread.shutdown(wait=False)
