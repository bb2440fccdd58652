"""What the derender benches let a model write, ours and the reference's alike. Imports nothing of either."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Protocol

PROMPT_IDS = 397
TEXT = "The quick brown fox jumps over the lazy dog, 你好，世界！ then 🧑🏿‍🚀 rests (and x < 2). "  # fits a JSON string
CALL = '<tool_call>\n{"name": "write_file", "arguments": {"path": "notes.md", "content": "'
CHAT = {
    "model": "bench",
    "messages": [{"role": "user", "content": "Write the notes."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool",
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
            },
        }
        for name in ("write_file", "read_file", "search", "ping")
    ],
    "stream": True,
}
# The paths of the comparison: what is configured, and what the model writes until the tokens are used up.
PATHS = {
    "plain": ((None, None), "", TEXT),
    "qwen3+hermes, long content": (("hermes", "qwen3"), f"<think>\n{TEXT}\n</think>\n\n", TEXT),
    "qwen3+hermes, long argument": (("hermes", "qwen3"), f"<think>\n{TEXT}\n</think>\n\n{CALL}", TEXT),
}


class Encoder(Protocol):
    """A tokenizer, as far as it is needed."""

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""


def output(encode: Encoder, start: str, text: str, count: int) -> list[int]:
    """`count` ids: the start, then the text over and over."""

    def endless() -> Iterator[int]:
        yield from encode(start)
        yield from cycle(encode(text))

    return list(islice(endless(), count))
