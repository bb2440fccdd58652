"""What stands behind a start of tool calls: the ways to write calls, each read by one scanner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Header:
    """The function's name stands before the arguments, maybe with an id: `name<id>...<arguments>{...}`."""

    id: str
    arguments: str


@dataclass(frozen=True, slots=True)
class JsonBody:
    """Calls are JSON objects, one or several or in a list, up to one of `ends`; without one, one object or list.

    An object's members are named by the `_keys`. `keyed`: an object is arguments by the function's name instead.
    `header`: what stands before the arguments, if they stand alone.
    """

    ends: tuple[str, ...] = ()
    name_keys: frozenset[str] = frozenset({"name"})
    argument_keys: frozenset[str] = frozenset({"arguments", "parameters"})
    id_keys: frozenset[str] = frozenset()
    keyed: bool = False
    header: Header | None = None


@dataclass(frozen=True, slots=True)
class NamedBody:
    """A section of calls up to `section_end`: each is `call`, a name, `separator` and arguments up to `end`.

    `before_name`: what may stand between `call` and the name ends with this. `numbered`: the name is written as
    `functions.<name>:<number>`, which is the call's id as well.
    """

    call: str
    separator: str
    end: str = ""
    section_end: str = ""
    before_name: str = ""
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class XmlBody:
    """A section of calls up to `end`, each of them tags, with its parameters' values as untyped text:

    `call` NAME `name_end`, for each parameter `param` KEY `key_end` `value` VALUE `value_end`, and `call_end`. The
    name also ends at the first parameter; without `end` a section is one call. `attributes`: a head is a name, in
    quotes or not, and attributes; with `text_mark` among them, a value is a string, and without it JSON.
    `around`: what may stand in front of a value and behind it and is no part of it.
    """

    call: str
    param: str
    key_end: str
    value_end: str
    call_end: str
    name_end: str = ""
    value: str = ""
    end: str = ""
    attributes: bool = False
    text_mark: str = ""
    around: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class PythonBody:
    """Calls are written in Python, with keyword arguments, up to `end`; where they are `listed`, within brackets."""

    end: str = ""
    listed: bool = True


@dataclass(frozen=True, slots=True)
class GemmaBody:
    """Calls are `call:f{key:value}` up to `end`, with strings between two of `quote`.

    `typed`: whatever stands between them is of the type that the tool's schema declares.
    """

    end: str
    quote: str
    typed: bool = False


HARMONY: Final = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True, slots=True)
class HarmonyBody:
    """Calls are messages to functions, among others: the whole output is made of Harmony's messages."""


Body = JsonBody | NamedBody | XmlBody | PythonBody | GemmaBody | HarmonyBody
