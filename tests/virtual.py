"""An event loop whose clock is virtual: where nothing is ready it jumps to the next timer, so that nobody waits.

Everything runs on the one thread, in an order that depends on nothing outside: the same test takes the same steps.
Tasks can belong to a ``Process``, which is stopped, goes on and is killed as one of the operating system would be.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, Final, ParamSpec, TypeVar, TypeVarTuple, Unpack
from unittest.mock import patch

EPOCH: Final = 1_700_000_000.0
"""Unix seconds at which every virtual clock starts; a monotonic clock starts at 0."""
MOST_TURNS: Final = 100_000
"""Turns of the loop without a wait after which somebody is taken to be waiting busily."""

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


class Stuck(AssertionError):
    """Everybody waits, and there is no timer that could end it."""


class Busy(AssertionError):
    """Somebody goes round and round without waiting for anything."""


class _Jumps(selectors.DefaultSelector):
    """Where a loop would wait for its sockets, this sets the clock on; there are no sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > MOST_TURNS:
            self._turns = 0
            raise Busy(f"{MOST_TURNS} turns of the loop at second {self.now:g}, and nobody waits")
        self.now += max(0.0, timeout)
        return []


_process: ContextVar[Process | None] = ContextVar("process", default=None)


class _Task(asyncio.Task[T]):
    """A task that knows its process, and lies in a set at the same place in every run."""

    def __init__(self, coro: Coroutine[Any, Any, T], *, loop: VirtualLoop, context: Context | None = None) -> None:
        self.number = loop.number()
        self.process = _process.get() if context is None else context.get(_process)
        super().__init__(coro, loop=loop, context=context)
        if self.process is not None:
            self.process.tasks.append(self)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. What would be done on another thread is done at once, on this one."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        self._numbers = itertools.count()
        super().__init__(self._jumps)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumps.now

    def wall(self) -> float:
        """Unix seconds."""
        return EPOCH + self._jumps.now

    def number(self) -> int:
        """The next number of a task."""
        return next(self._numbers)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As ever, but a step of a task is taken by its process, which may stand still by then."""
        task = getattr(callback, "__self__", None)
        if isinstance(task, _Task) and task.process is not None:
            return super().call_soon(task.process.step, self, context, callback, args, context=context)
        return super().call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Calls it now."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    return _Task(coro, loop=loop, context=options.get("context"))


class Process:
    """Tasks that stop, go on and die together."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.stopped = False
        self._due: list[tuple[VirtualLoop, Context | None, Callable[..., object], tuple[Any, ...]]] = []

    def start(self, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process; the tasks that it makes are the process's too."""
        token = _process.set(self)
        try:
            return asyncio.get_running_loop().create_task(coro)
        finally:
            _process.reset(token)

    def step(
        self, loop: VirtualLoop, context: Context | None, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        """A step of one of its tasks is due: taken now, or when the process goes on."""
        if self.stopped:
            self._due.append((loop, context, callback, args))
        else:
            callback(*args)

    def stop(self) -> None:
        """From now on none of its tasks runs, as after SIGSTOP; timers go off and are seen when it goes on."""
        self.stopped = True

    def go_on(self) -> None:
        """As after SIGCONT: all that became due meanwhile runs, in order."""
        self.stopped = False
        due, self._due = self._due, []
        for loop, context, callback, args in due:
            loop.call_soon(callback, *args, context=context)

    async def bury(self) -> None:
        """Ends what is left of a process that is dead, so that the loop can be closed."""
        self.go_on()
        left = [task for task in self.tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def run(main: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a coroutine function on a loop of its own; ``time.time`` and ``time.monotonic`` are the loop's meanwhile.

    A clock that was bound before, as a default argument, must be passed in. Raises Stuck and Busy.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        with patch.object(time, "time", loop.wall), patch.object(time, "monotonic", loop.time):
            return runner.run(main(*args, **kwargs))
