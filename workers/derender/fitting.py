"""A format as one checkpoint's vocabulary spells it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

from headrace.workers.derender.formats import ReasoningFormat, ToolFormat
from headrace.workers.derender.vocabulary import Vocabulary

_SUFFIXED: Final = re.compile(r"<think(:[^\s<>]+)>")
_TAG: Final = re.compile(r"(</?[^\s<>]+)>")

Row = TypeVar("Row", ToolFormat, ReasoningFormat)


def fitted(row: Row, vocabulary: Vocabulary) -> Row:
    """The row with the suffix that this vocabulary has in its markers, and without markers that it has others for.

    Where some of a reasoning format's starts are tokens, only those are written by the model; so with its ends.
    """
    if row.suffixed:
        suffix = _suffix(vocabulary)
        row = _respelled(row, lambda text: _TAG.sub(rf"\1{suffix}>", text))
    if isinstance(row, ReasoningFormat):
        row = replace(row, starts=_tokens(row.starts, vocabulary), ends=_tokens(row.ends, vocabulary))
    return row


def _suffix(vocabulary: Vocabulary) -> str:
    spellings = (vocabulary.token(token_id) or "" for token_id in range(len(vocabulary.tokens)))
    return next((found[1] for spelling in spellings if (found := _SUFFIXED.fullmatch(spelling))), "")


def _tokens(markers: tuple[str, ...], vocabulary: Vocabulary) -> tuple[str, ...]:
    return tuple(marker for marker in markers if vocabulary.find(marker) is not None) or markers


def _respelled(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all its strings changed, however deep."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_respelled(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _respelled(getattr(value, field.name), change) for field in fields(value)})
    return value
