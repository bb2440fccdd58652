"""From a parameter's text to its JSON value, by the schema that the tool declares for it.

Formats of untyped parameters write every value as text. What the text is follows from the JSON types that the schema
allows; JSON is passed on as it was written. A schema without a hint at a type is taken for a string's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from json.encoder import encode_basestring as quoted
from typing import Final, NoReturn

from headrace.workers.derender.formats.declared import Schema

Kinds = frozenset[str]
"""JSON types that a value may have. None of them known: any JSON, else text."""

TEXT: Final[Kinds] = frozenset({"string"})
ANY: Final[Kinds] = frozenset()

_NAMED: Final = {
    **{name: name for name in ("null", "boolean", "integer", "number", "string", "array", "object")},
    "bool": "boolean",
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "sequence"), "array"),
}
_IMPLIED: Final = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_OF_VALUES: Final[dict[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def kinds_of(schema: object, root: Schema) -> Kinds:
    """The types that a schema allows; `root` is the one that its `$ref`s point into."""
    kinds: set[str] = set()
    parts, followed = [schema], set[str]()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping):
            kinds.add("string")
            continue
        hints, choices, reference = set(_hints(part)), list(_choices(part)), part.get("$ref")
        if isinstance(reference, str):
            choices += [] if reference in followed else [_target(reference, root)]
            followed.add(reference)
        elif not hints and not choices:
            hints.add("string")
        kinds |= hints
        parts += choices
    return frozenset(kinds - {"any"})


def json_of(text: str, kinds: Kinds) -> str:
    """The JSON text of the value that this text writes.

    What is of none of the types is a string where that is one of them, else any JSON, else a string all the same.
    """
    bare = text.strip()
    for kind, reader in _READERS.items():
        if kind in kinds and (value := reader(bare)) is not None:
            return value
    value = None if "string" in kinds else _json(bare)
    return quoted(text) if value is None else value


def json_begun(text: str, kinds: Kinds) -> str:
    """What a value that was cut can say for itself: as much of its JSON text as was written."""
    bare = text.strip()
    if "string" not in kinds or (bare[:1] in ("{", "[") and kinds & {"object", "array"}):
        return bare
    return quoted(text)[:-1]


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _choices(schema: Schema) -> Iterator[object]:
    for name in ("anyOf", "oneOf", "allOf"):
        yield from _listed(schema.get(name))


def _target(reference: str, root: Schema) -> object:
    """Where a reference within the document points; None where it points nowhere."""
    start, *path = reference.split("/")
    place: object = root if start == "#" else None
    for step in path:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def _hints(schema: Schema) -> Iterator[str]:
    """The types that a schema names or implies by itself, its alternatives aside."""
    named = schema.get("type")
    for name in [named] if isinstance(named, str) else _listed(named):
        yield _NAMED.get(str(name).strip().lower(), "any")
    for value in [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield _OF_VALUES.get(type(value), "any")
    if named is None:
        yield from (kind for name, kind in _IMPLIED.items() if name in schema)


def _null(text: str) -> str | None:
    return "null" if text.lower() == "null" else None


def _integer(text: str) -> str | None:
    try:
        return str(int(text))
    except ValueError:
        return None


def _number(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return (_json(text) or repr(value)) if math.isfinite(value) else None


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())


def _object(text: str) -> str | None:
    return _json(text) if text.startswith("{") else None


def _array(text: str) -> str | None:
    return _json(text) if text.startswith("[") else None


_READERS: Final[dict[str, Callable[[str], str | None]]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _object,
    "array": _array,
}
"""By the order in which they are tried."""


def _json(text: str) -> str | None:
    """The text, where it is JSON; mended where only its strings have bare line breaks and the like."""
    try:
        _strict.decode(text)
    except (ValueError, RecursionError):
        return _mended(text)
    return text


def _mended(text: str) -> str | None:
    try:
        return json.dumps(_lenient.decode(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number} is no number in JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


_strict: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
_lenient: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse, strict=False)
