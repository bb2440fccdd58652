"""Every format that there is, over one small tokenizer, and text that is written with its markers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.workers.derender import Derenderer
from headrace.workers.derender.formats import REASONING, TOOLS
from headrace.workers.derender.formats.bodies import (
    GemmaBody,
    HarmonyBody,
    Header,
    JsonBody,
    NamedBody,
    PythonBody,
    XmlBody,
)
from tests.unit.derender_tokenizer import END, byte_level

TOOL_NAMES = sorted({row.name for row in TOOLS.values()})
REASONING_NAMES = sorted({row.name for row in REASONING.values()})
LENGTH = 1 << 20
"""Tokens that the models have room for: no output here is too long."""

DECLARED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"type": "object"},
                    "l": {"type": ["array", "null"]},
                },
            },
        },
    }
    for name in ("f", "get_weather")
]
_WORDS = (
    *('{"name": "f", "arguments": {"a": "b"}}', '{"name": "f", "parameters": {}}', '"arguments": ', '{"a": "b\\n'),
    *('{"f": {"n": 1}}', "f(a='b', n=1)", "get_weather(o={'x': [1, None]})", "functions.f:0", "f", "get_weather"),
    *("a", "n", "o", "l", "1", "-1.5e3", "true", "None", "null", "=", ",", ":", "'", '"', "\\", "\\u00e9", "\\ud83d"),
    *("{", "}", "[", "]", "(", ")", "<", ">", "/", "|", " ", "\n", "\n\n", "word ", "é", "鬱", "👩‍👧", END),
)


_KEYS = st.sampled_from(["a", "n", "o", "other", "a key"])
_VALUES = st.sampled_from(
    ["", "x", "1", "null", "[1, {}]", "</", "a\nb", "'", '"', "\\", "{", "鬱", "<think>", "]", ")"]
)


class Formats:
    """Derenderers of one tokenizer for any pair of formats, by name."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = byte_level(folder)
        self._folder = folder
        self.derenderer = cache(self._derenderer)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _derenderer(self, tools: str | None, reasoning: str | None) -> Derenderer:
        return Derenderer.load(self._folder, tools, reasoning, max_model_len=LENGTH)


def markers(tools: str | None, reasoning: str | None) -> tuple[str, ...]:
    """What the formats are written with."""
    rows = (TOOLS[tools] if tools else None, REASONING[reasoning] if reasoning else None)
    return tuple(marker for row in rows if row is not None for marker in row.markers if marker)


def written(tools: str, name: str, arguments: Mapping[str, str]) -> str:
    """A call as a model writes it in this format, from its first marker to its last."""
    row, given = TOOLS[tools], json.dumps(dict(arguments), ensure_ascii=False)
    start = row.starts[0] if row.starts else ""
    match row.body:
        case JsonBody(header=Header() as header):
            return f"{start}{name}{header.arguments}{given}"
        case JsonBody() as body:
            keys = min(body.name_keys), min(body.argument_keys)
            one = f'{{"{name}": {given}}}' if body.keyed else f'{{"{keys[0]}": "{name}", "{keys[1]}": {given}}}'
            return f"{start}[{one}]{body.ends[0] if body.ends else ''}"
        case NamedBody() as body:
            called = f"functions.{name}:0" if body.numbered else name
            head = f"{body.call}function{body.before_name}" if body.before_name else body.call
            return f"{start}{head}{called}{body.separator}{given}{body.end}{body.section_end}"
        case XmlBody() as body:
            quote = '"' if body.attributes else ""
            mark = f" {body.text_mark}" if body.text_mark else ""
            parameters = "".join(
                f"{body.param}{quote}{key}{quote}{mark}{body.key_end}{body.value}{value}{body.value_end}"
                for key, value in arguments.items()
            )
            head = f"{body.call}{quote}{name}{quote}{body.name_end}"
            return f"{'' if start == body.call else start}{head}{parameters}{body.call_end}{body.end}"
        case PythonBody() as body:
            called = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            return f"{start}[{called}]{body.end}" if body.listed else f"{start}{called}{body.end}"
        case GemmaBody() as body:
            pairs = ",".join(f"{key}:{body.quote}{value}{body.quote}" for key, value in arguments.items())
            return f"{start}call:{name}{{{pairs}}}{body.end}"
        case HarmonyBody():
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}<|call|>"


@st.composite
def calls(draw: st.DrawFn, tools: str) -> str:
    """A call in this format, or a beginning or a part of one."""
    text = written(tools, draw(st.sampled_from(["f", "g", ""])), draw(st.dictionaries(_KEYS, _VALUES, max_size=3)))
    start, end = (draw(st.integers(0, len(text))) if draw(st.booleans()) else edge for edge in (0, len(text)))
    return text[start:end]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str | None, str | None, str]:
    """A pair of formats, and a text of calls in them, of their markers and of words."""
    tools = draw(st.none() | st.sampled_from(TOOL_NAMES))
    reasoning = draw(st.none() | st.sampled_from(REASONING_NAMES))
    piece = st.sampled_from((*_WORDS, *markers(tools, reasoning)))
    if tools is not None:
        piece |= calls(tools)
    return tools, reasoning, "".join(draw(st.lists(piece, max_size=14)))
