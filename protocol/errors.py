"""Errors, grouped by what the caller can do about them, and the body that carries them on the wire."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.protocol.base import WireModel


class ErrorInfo(WireModel):
    """What went wrong: one sentence, a kind, the path of the field at fault, the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(WireModel):
    """The body of every error answer."""

    error: ErrorInfo


class HeadraceError(Exception):
    """An error that a caller is told about. `retryable`: the same request may succeed later."""

    type: ClassVar[str] = "InternalServerError"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait before the next try, where known."""
        self.error = ErrorResponse(error=ErrorInfo(message=message, type=self.type, param=param, code=self.status))

    @property
    def message(self) -> str:
        return self.error.error.message

    @property
    def param(self) -> str | None:
        return self.error.error.param


class BadRequest(HeadraceError):
    """Fix the input: `param` names the field."""

    type = "BadRequestError"
    status = 400


class NotFound(HeadraceError):
    """Name something that exists."""

    type = "NotFoundError"
    status = 404


class Conflict(HeadraceError):
    """The request id is taken by another body; use a new one."""

    type = "ConflictError"
    status = 409


class TooLarge(HeadraceError):
    """Send less."""

    type = "RequestTooLargeError"
    status = 413


class QueueFull(HeadraceError):
    """Try again after `retry_after` seconds."""

    type = "QueueFullError"
    status = 429
    retryable = True


class Cancelled(HeadraceError):
    """The client itself cancelled the request."""

    type = "CancelledError"
    status = 499


class InternalError(HeadraceError):
    """A defect on our side; report it."""


class Exhausted(HeadraceError):
    """Every try failed or took its worker down; the request stays under ``dead`` for an operator."""

    type = "ExhaustedError"


class Interrupted(HeadraceError):
    """The worker was lost after output had gone out and could not be continued; send the request again."""

    type = "InterruptedError"
    retryable = True


class StreamLost(HeadraceError):
    """Stored output was lost; send the request again."""

    type = "StreamLostError"
    retryable = True


class Unavailable(HeadraceError):
    """A part of the system is away; try again later."""

    type = "ServiceUnavailableError"
    status = 503
    retryable = True


class DeadlineExceeded(HeadraceError):
    """The request was not done by its deadline; give it more time."""

    type = "DeadlineExceededError"
    status = 504


_ALL: Final[tuple[type[HeadraceError], ...]] = (
    BadRequest,
    NotFound,
    Conflict,
    TooLarge,
    QueueFull,
    Cancelled,
    InternalError,
    Exhausted,
    Interrupted,
    StreamLost,
    Unavailable,
    DeadlineExceeded,
)
_BY_TYPE: Final = {kind.type: kind for kind in _ALL}
_BY_STATUS: Final = {kind.status: kind for kind in reversed(_ALL)}


def error_from_response(body: ErrorResponse, *, retry_after: float | None = None) -> HeadraceError:
    """The exception for an error body, ours or another server's; the body is kept as it came."""
    info = body.error
    kind = (
        _BY_TYPE.get(info.type)
        or _BY_STATUS.get(info.code)
        or (BadRequest if 400 <= info.code < 500 else InternalError)
    )
    error = kind(info.message, param=info.param, retry_after=retry_after)
    error.error = body
    return error


# pydantic's error types in our words; {field} is the path, the rest is the error's context.
_SENTENCES: Final = {
    "missing": "{field} is required.",
    "refused": "{message}",
    "shape": "{field} {msg}.",
    "extra_forbidden": "{field} is not a known field.",
    # Where we ask for a length at all, the least is 1.
    "too_short": "{field} must not be empty.",
    "string_too_short": "{field} must not be empty.",
    "too_long": "{field} must have at most {max_length} items, got {actual_length}.",
    "string_too_long": "{field} must have at most {max_length} characters.",
    "greater_than": "{field} must be greater than {gt}.",
    "greater_than_equal": "{field} must be at least {ge}.",
    "less_than": "{field} must be less than {lt}.",
    "less_than_equal": "{field} must be at most {le}.",
    "literal_error": "{field} must be {expected}.",
    "enum": "{field} must be {expected}.",
    "model_type": "{field} must be an object.",
    "model_attributes_type": "{field} must be an object.",
    "dict_type": "{field} must be an object.",
    "list_type": "{field} must be a list.",
    "string_type": "{field} must be a string.",
    "int_type": "{field} must be an integer.",
    "int_parsing": "{field} must be an integer.",
    "int_from_float": "{field} must be an integer.",
    "float_type": "{field} must be a number.",
    "float_parsing": "{field} must be a number.",
    "bool_type": "{field} must be true or false.",
    "bool_parsing": "{field} must be true or false.",
    "json_invalid": "The body is not JSON: {error}.",
}
# Parts of a location that are pydantic's branches and not fields: tags of ours stand in parentheses.
_BRANCH: Final = re.compile(r"\(.*\)|.*\[.*\].*|str|int|float|bool")


def bad_request(error: ValidationError) -> BadRequest:
    """The first thing wrong with a client's input, by the path of its field. Never repeats what was sent."""
    details = error.errors(include_url=False, include_input=False)[0]
    path = _path(details)
    field = path or "The body"
    words = {**details.get("ctx", {}), "field": field, "msg": details["msg"]}
    template = _SENTENCES.get(details["type"], "{field}: {msg}.")
    return BadRequest(template.format_map(words), param=path or None)


def _path(details: ErrorDetails) -> str:
    parts = [str(part) for part in details["loc"] if isinstance(part, int) or not _BRANCH.fullmatch(part)]
    inner = details.get("ctx", {}).get("field")
    if inner is not None:
        parts.append(str(inner))
    return ".".join(parts)
