"""LLM inference through queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.client import Headrace

__all__ = ["Headrace"]


def __getattr__(name: str) -> object:
    """The client comes with its whole transport: it is imported when it is asked for."""
    if name == "Headrace":
        from headrace.client import Headrace

        return Headrace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
