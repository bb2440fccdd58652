"""The strings that a format is written with, wherever its row and its body hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass


def strings(value: object) -> Iterator[str]:
    """Every string of a row's field: of tuples, and of what a body is made of. Sets hold keys, which are no markup."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from strings(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from strings(getattr(value, field.name))
