"""How every command runs: its event loop, its log, its signals, and errors as one sentence."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import click

from headrace import logs

if TYPE_CHECKING:
    from headrace.settings import Settings
    from headrace.workers.models import ModelSpec

P = ParamSpec("P")
T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run(main: Coroutine[object, object, T]) -> T:
    """Runs a command to its end; what may go wrong in the world becomes one sentence and exit code 1."""
    from headrace.batch.ledger import LedgerError
    from headrace.broker.ports import BrokerError
    from headrace.client import Broken
    from headrace.demo.acts import DemoError
    from headrace.protocol.errors import HeadraceError
    from headrace.settings import SettingsError
    from headrace.workers.derender.formats import FormatError
    from headrace.workers.generate.engine import EngineDead, ModelRefused
    from headrace.workers.models import ModelNotFound

    refused = FormatError, ModelNotFound, ModelRefused, SettingsError
    expected = BrokerError, HeadraceError, LedgerError, DemoError, OSError, *refused
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(main)
    except BaseException as error:
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, (KeyboardInterrupt, asyncio.CancelledError)):
            raise click.Abort from None
        if isinstance(first, Broken) and isinstance(first.__cause__, expected):
            first = first.__cause__  # it says what stands in the way
        if not isinstance(first, (*expected, Broken, EngineDead)):
            raise
        raise click.ClickException(str(first)) from error
    finally:
        main.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def settings() -> Settings:
    """The settings of the environment, refused as a whole if they do not fit together."""
    from headrace.settings import Settings, SettingsError

    try:
        config = Settings.load()
        config.require_both_urls_or_none()
        return config
    except SettingsError as error:
        raise click.ClickException(str(error)) from error


def log_to_stderr(settings: Settings, *, quiet: bool) -> None:
    """Structured events on stderr; ``quiet`` keeps those below warning back, unless a level was set."""
    level = "warning" if quiet and "log_level" not in settings.model_fields_set else settings.log_level
    logs.to_stderr(level, as_json=settings.log_format == "json" and not quiet)


@contextmanager
def signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Calls ``ask`` with the number of the first SIGINT or SIGTERM; the second cancels the task that entered this.

    Any further one does what it always does.
    """
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None, "a command runs in a task"

    def handle(with_: Callable[[int], object]) -> None:
        for number in SIGNALS:
            loop.add_signal_handler(number, with_, number)

    def first(number: int) -> None:
        handle(second)
        ask(number)

    def second(number: int) -> None:
        restore()
        main.cancel()

    def restore() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    handle(first)
    try:
        yield
    finally:
        restore()


def model_options(command: Callable[P, T]) -> Callable[P, T]:
    """The options that say which model is served in this process, and how."""
    options = [
        click.option("--model", default=None, help="demo, a folder, or a hub name.  [default: HEADRACE_MODEL]"),
        click.option(
            "--name", default=None, help="Name of the model on the queues and in requests.  [default: the folder's]"
        ),
        click.option(
            "--engine",
            type=click.Choice(["transformers", "null"]),
            default=None,
            help="null makes up tokens without a model, for load tests.  [default: transformers]",
        ),
        click.option(
            "--reasoning-parser",
            default=None,
            help="Format of the model's thoughts, or auto, by its template; docs/formats.md lists them.",
        ),
        click.option(
            "--tool-parser",
            default=None,
            help="Format of the model's tool calls, or auto, by its template; docs/formats.md lists them.",
        ),
        click.option(
            "--formats",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            default=None,
            help="TOML file with more formats; docs/formats.md says how.",
        ),
        click.option(
            "--max-model-len",
            type=click.IntRange(min=1),
            default=None,
            help="Tokens, prompt and output.  [default: the model's]",
        ),
        click.option(
            "--max-rows", type=click.IntRange(min=1), default=None, help="Sequences generated at a time.  [default: 32]"
        ),
        click.option(
            "--dtype", default=None, help="auto, float32, bfloat16 or float16.  [default: auto, the files' own]"
        ),
        click.option("--device", default=None, help="auto, cpu, cuda, ...  [default: auto]"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def spec_of(settings: Settings, model: str | None, *, weights: bool = True, **given: Any) -> ModelSpec:
    """The model that the options name; what was not given is left to it."""
    from headrace.workers.models import ModelNotFound, ModelSpec

    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return ModelSpec.of(model or settings.model, weights=weights, **chosen)
    except ModelNotFound as error:
        raise click.ClickException(str(error)) from error
