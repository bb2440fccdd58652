"""What the broker refuses, in the words of the protocol."""

from __future__ import annotations

from headrace.broker.ports import BrokerError, MessageTooLarge, QueueFull, Unroutable
from headrace.protocol import errors
from headrace.protocol.errors import HeadraceError


def told(error: BrokerError, *, model: str | None = None) -> HeadraceError:
    """The error that a client gets; ``model`` is the one whose queue was sent to, None for the control queue."""
    match error:
        case Unroutable() if model is not None:
            return errors.NotFound(
                f"model: {model!r} is not served here; a model is served as its worker's --name.", param="model"
            )
        case Unroutable():
            return errors.Unavailable("No worker takes control messages here.")
        case QueueFull():
            return errors.QueueFull(str(error), retry_after=error.retry_after)
        case MessageTooLarge():
            return errors.TooLarge(str(error))
        case _:
            return errors.Unavailable(str(error))
