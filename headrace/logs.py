"""Log events: structured, under the standard logger ``headrace``, so that a program that uses us decides what shows."""

from __future__ import annotations

import logging
import sys
from typing import Final, cast

import structlog

NAME: Final = "headrace"
_SILENT: Final = logging.NullHandler()

_SHARED: Final[list[structlog.typing.Processor]] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def get_logger() -> structlog.stdlib.BoundLogger:
    """The logger of a module. An event has a stable name and the ids it is about, no prose."""
    processors = [structlog.stdlib.filter_by_level, *_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter]
    wrapped = structlog.wrap_logger(
        logging.getLogger(NAME), wrapper_class=structlog.stdlib.BoundLogger, processors=processors
    )
    return cast("structlog.stdlib.BoundLogger", wrapped)


def to_stderr(level: str, *, as_json: bool) -> None:
    """Writes the events of this process to stderr, one a line: what the command line does."""
    if sys.stderr is None:  # closed by whoever started us
        return
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[drop, renderer]))
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # What it says of lost connections, with tracebacks and in a form of its own, we say ourselves (amqp_lost).
    logging.getLogger("aiormq").addHandler(_SILENT)
