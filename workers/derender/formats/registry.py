"""The formats by name: those built in, those that a file adds, and the one that a model's own files ask for."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from headrace.workers.derender.formats.bodies import Body
from headrace.workers.derender.formats.reasoning import REASONING, ReasoningFormat
from headrace.workers.derender.formats.tools import TOOLS, ToolFormat

AUTO: Final = "auto"
MAX_STRING: Final = 128
"""Characters of one string of a format: the start of what may become a marker is held back, so it has a bound."""

BODIES: Final = {kind.__name__.removesuffix("Body").lower(): kind for kind in get_args(Body)}
"""The ways to write calls behind a start marker, by the name that a file uses."""

_UNFIT: Final = (False, 0)

Format = TypeVar("Format", ToolFormat, ReasoningFormat)


class FormatError(ValueError):
    """A format cannot be had: it does not exist, no file asks for it, or a file does not describe one."""


@dataclass(frozen=True, slots=True)
class About:
    """What a model's files say of its formats: the source of its chat template, and its model_type."""

    template: str | None = None
    model_type: str | None = None

    def fit(self, row: ToolFormat | ReasoningFormat) -> tuple[bool, int]:
        """How well a format fits: whether it is for this type, and how much of it the template contains."""
        typed = self.model_type in row.model_types
        if self.template is None or (row.model_types and self.model_type is not None and not typed):
            return typed, 0
        hints = row.hints or _solid(row)
        return (typed, sum(map(len, hints))) if all(hint in self.template for hint in hints) else _UNFIT


def _solid(row: ToolFormat | ReasoningFormat) -> tuple[str, ...]:
    """The markers that tell a format from others: not those that other text has too."""
    if isinstance(row, ToolFormat) and row.tentative:
        return ()
    return tuple(dict.fromkeys(filter(None, map(str.strip, row.markers))))


class Formats:
    """The formats that a model may be set to."""

    def __init__(self, file: str | Path | None = None) -> None:
        """The built-in formats and those of a TOML file. Raises FormatError, and OSError if it cannot be read.

        The file's tables are [[tool]] and [[reasoning]]; their keys are the fields of ToolFormat and ReasoningFormat.
        """
        self._tools: Mapping[str, ToolFormat] = TOOLS
        self._reasoning: Mapping[str, ReasoningFormat] = REASONING
        if file is not None:
            tables = _tables(Path(file))
            self._tools = _added(TOOLS, ToolFormat, tables.pop("tool", []), f"{file}: [[tool]]")
            self._reasoning = _added(REASONING, ReasoningFormat, tables.pop("reasoning", []), f"{file}: [[reasoning]]")
            if tables:
                raise FormatError(f"{file}: {next(iter(tables))} is neither [[tool]] nor [[reasoning]]")

    def tools(self, name: str | None, about: About) -> ToolFormat | None:
        """The tool format of this name or alias; "auto" is the one that the model's files ask for. None for none.

        Raises FormatError: there is none of that name, no template to choose by, or one with tools that none fits.
        """
        if name != AUTO:
            return _named(self._tools, name, "tool_parser")
        found = _fitting(self._tools, about, "tool_parser")
        if found is None and about.template is not None and "tools" in about.template:
            raise FormatError("tool_parser auto: the chat template has tools, but none of the formats fits; name one")
        return found

    def reasoning(self, name: str | None, about: About) -> ReasoningFormat | None:
        """The reasoning format of this name or alias; "auto" is the one that the model's files ask for. None for none.

        Raises FormatError: there is none of that name, or no template to choose by.
        """
        if name != AUTO:
            return _named(self._reasoning, name, "reasoning_parser")
        return _fitting(self._reasoning, about, "reasoning_parser")


def _named(rows: Mapping[str, Format], name: str | None, parameter: str) -> Format | None:
    if name is None:
        return None
    if name not in rows:
        raise FormatError(f"{parameter} {name!r} does not exist; known are {AUTO}, {', '.join(sorted(rows))}")
    return rows[name]


def _fitting(rows: Mapping[str, Format], about: About, parameter: str) -> Format | None:
    """The format that fits best; of equals, the one that stands first."""
    best = max(rows.values(), key=about.fit)
    if about.fit(best) != _UNFIT:
        return best
    if about.template is None:
        raise FormatError(f"{parameter} auto: no chat template, and no format for model_type {about.model_type!r}")
    return None


def _tables(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{file}: {error}") from error


def _added(known: Mapping[str, Format], kind: type[Format], tables: object, where: str) -> Mapping[str, Format]:
    """The formats and those of these tables, which are named by `where` and their number."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise FormatError(f"{where} must be a list of tables")
    named = dict(known)
    for number, table in enumerate(tables, 1):
        row: Format = _row(kind, table, f"{where} {number}")
        for name in (row.name, *row.aliases):
            if not name or name == AUTO or name in named:
                raise FormatError(f"{where} {number}: the name {name!r} is taken")
            named[name] = row
    return named


def _row(kind: type[Any], table: dict[str, Any], at: str) -> Any:
    """A row, or the body of one, from its table."""
    types, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    for key in table:
        if key not in known:
            raise FormatError(f"{at}: {key} is not known; known are {', '.join(known)}")
    for key, field in known.items():
        if field.default is MISSING and table.get(key, "") == "":
            raise FormatError(f"{at}: {key} is missing")
    return kind(**{key: _value(types[key], value, f"{at}: {key}") for key, value in table.items()})


def _value(kind: Any, value: object, at: str) -> Any:
    if kind == Body:
        return _body(value, at)
    nested = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and is_dataclass(part)]
    if nested and isinstance(value, dict):
        return _row(nested[0], value, at)
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{at}: {error}") from None
    members = converted if isinstance(converted, tuple | frozenset) else ()
    if "" in members:
        raise FormatError(f"{at} holds an empty string")
    if any(isinstance(text, str) and len(text) > MAX_STRING for text in (converted, *members)):
        raise FormatError(f"{at} holds a string of more than {MAX_STRING} characters")
    return converted


def _body(value: object, at: str) -> Body:
    if not isinstance(value, dict) or value.get("kind") not in BODIES:
        raise FormatError(f"{at} must be a table whose kind is one of {', '.join(sorted(BODIES))}")
    body: Body = _row(BODIES[value["kind"]], {key: rest for key, rest in value.items() if key != "kind"}, at)
    return body
