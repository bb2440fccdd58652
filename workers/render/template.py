"""Chat templates: messages in, the model's prompt text out.

The environment is the one that model authors write for (Hugging Face chat templates): a sandbox with loop controls,
``tojson`` without HTML escapes, ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.protocol.errors import BadRequest


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled chat template. ``now`` is the clock that ``strftime_now`` reads."""

    def __init__(self, source: str, *, specials: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = environment.from_string(source)
        self._specials = dict(specials)
        self.reads_parts = self._reads_parts()
        """Whether it writes a content that is a list of text parts itself; else it must be given their text."""

    def _reads_parts(self) -> bool:
        def written(content: object) -> str:
            return self.render(
                [{"role": "user", "content": content}],
                tools=None,
                documents=None,
                add_generation_prompt=False,
                continue_final_message=False,
                extra={},
            )

        try:
            return written([{"type": "text", "text": "a b"}]) == written("a b")
        except BadRequest:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises BadRequest with the template's own words when it refuses the messages."""
        try:
            text = self._template.render(
                **{
                    **self._specials,
                    **extra,
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "documents": list(documents) if documents else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: the chat template refused them: {error}", param="messages") from None
        return _cut_after_last(text, messages) if continue_final_message else text


def _cut_after_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to the end of the last message's text, so that the model goes on within it."""
    last = messages[-1].get("content")
    wanted = last if isinstance(last, str) else next((p["text"] for p in reversed(last or []) if "text" in p), "")
    place = text.rfind(wanted.strip()) if wanted.strip() else -1
    if place < 0:
        message = "continue_final_message: the chat template does not write the last message as it was sent"
        raise BadRequest(message, param="continue_final_message")
    end = place + len(wanted.strip())
    kept = wanted.rstrip()
    trailing = wanted[len(kept) :]
    return text[:end] + (trailing if text[end:].startswith(trailing) else "")
