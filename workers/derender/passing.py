"""What goes through derendering as it came: names, counts, and fields that we do not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from headrace.protocol import (
    ChatCompletionRequest,
    ChatCompletionStreamResponse,
    CompletionRequest,
    CompletionStreamResponse,
    GenerateTokensChoice,
    GenerateTokensStreamResponse,
    UsageInfo,
)
from headrace.protocol.base import WireModel

_T = TypeVar("_T")


def model_name(asked: str | None, told: str | None, request: ChatCompletionRequest | CompletionRequest | None) -> str:
    """The model to answer with: the one asked for, or what the engine said, or what was first requested."""
    return asked or told or (request.model if request is not None else None) or ""


def counted(prompt_tokens: int, choices: Iterable[GenerateTokensChoice]) -> UsageInfo:
    """The usage of whole outputs."""
    output = sum(len(choice.token_ids or ()) for choice in choices)
    return UsageInfo(prompt_tokens=prompt_tokens, completion_tokens=output, total_tokens=prompt_tokens + output)


def chunk_usage(usage: UsageInfo, prompt_tokens: int | None) -> UsageInfo:
    """The usage that a chunk brought, with the prompt's length where the caller knows better."""
    prompt = usage.prompt_tokens if prompt_tokens is None else prompt_tokens
    output = usage.completion_tokens or 0
    return usage.model_copy(
        update={"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    )


def pass_chunk(
    chunk: GenerateTokensStreamResponse,
    told: ChatCompletionStreamResponse | CompletionStreamResponse,
    prompt_tokens: int | None,
    *,
    unknown_of_choices: bool = True,
) -> None:
    """Give a derendered chunk what its token chunk had besides the tokens."""
    if chunk.usage is not None:
        told.usage = chunk_usage(chunk.usage, prompt_tokens)
    if chunk.metrics is not None:
        told.metrics = chunk.metrics
    pass_unknown(chunk, told)
    if unknown_of_choices:
        for choice, shown in zip(chunk.choices, told.choices, strict=True):
            pass_unknown(choice, shown)


def agreed(values: Sequence[_T | None]) -> _T | None:
    """The value that all responses have; None where they differ."""
    first = values[0]
    return first if all(value == first for value in values) else None


def pass_unknown(source: WireModel, target: WireModel) -> None:
    """Give the target the fields of the source that neither of them knows."""
    unknown, extra = source.model_extra, target.model_extra
    if not unknown:
        return
    assert extra is not None, "wire models keep unknown fields"
    known = type(target).model_fields
    extra.update({name: value for name, value in unknown.items() if name not in known})
