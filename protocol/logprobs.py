"""Log probabilities in the shapes that the wire knows.

Two dialects meet on the token path: integers (`GenerateLogProbs`, what we write) and strings of the form
`token_id:N` inside the chat shape (`ChatCompletionLogProbs`, what older servers write).
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Discriminator, Field, Tag

from headrace.protocol.base import WireModel

_PLACEHOLDER: Final = re.compile(r"token_id:([0-9]{1,19})")


class Logprob(WireModel):
    """One candidate for one prompt position; `rank` counts from 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, Logprob] | None]


class GenerateLogProb(WireModel):
    """One candidate by token id; `rank` counts from 1."""

    token_id: int
    logprob: float
    rank: int | None = None


class GenerateLogProbsContent(GenerateLogProb):
    """The sampled token of one position; `top_logprobs` holds it first, then the others by rank."""

    top_logprobs: list[GenerateLogProb] = Field(default_factory=list)


class GenerateLogProbs(WireModel):
    """Log probabilities of one choice, integer dialect: one entry per generated token."""

    content: list[GenerateLogProbsContent] | None = None


class ChatCompletionLogProb(WireModel):
    """One candidate as text; `bytes` is its UTF-8 form, -9999.0 stands for minus infinity."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    """The sampled token of one position with its candidates."""

    top_logprobs: list[ChatCompletionLogProb] = Field(default_factory=list)


class ChatCompletionLogProbs(WireModel):
    """Log probabilities of one choice as text: one entry per generated token."""

    content: list[ChatCompletionLogProbsContent] | None = None


class CompletionLogProbs(WireModel):
    """Log probabilities of one completion: parallel lists; `text_offset` counts characters."""

    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


def _dialect(value: object) -> str:
    """Strings only if the first entry spells its token; an empty list says nothing, so integers."""
    if isinstance(value, ChatCompletionLogProbs):
        return "(strings)"
    content = value.get("content") if isinstance(value, dict) else None
    first = content[0] if isinstance(content, list) and content else None
    return "(strings)" if isinstance(first, dict) and "token_id" not in first else "(integers)"


TokenLogProbs = Annotated[
    Annotated[GenerateLogProbs, Tag("(integers)")] | Annotated[ChatCompletionLogProbs, Tag("(strings)")],
    Discriminator(_dialect),
]


def in_integers(logprobs: GenerateLogProbs | ChatCompletionLogProbs) -> GenerateLogProbs:
    """The same log probabilities in the dialect that we write; strings know no rank.

    Raises ValueError where a token is not of the form `token_id:N`.
    """
    if isinstance(logprobs, GenerateLogProbs):
        return logprobs
    if logprobs.content is None:
        return GenerateLogProbs()
    return GenerateLogProbs(
        content=[
            GenerateLogProbsContent(
                token_id=_token_id(entry.token),
                logprob=entry.logprob,
                top_logprobs=[
                    GenerateLogProb(token_id=_token_id(top.token), logprob=top.logprob) for top in entry.top_logprobs
                ],
            )
            for entry in logprobs.content
        ]
    )


def _token_id(token: str) -> int:
    match = _PLACEHOLDER.fullmatch(token)
    if match is None:
        raise ValueError("logprobs of a token response must name tokens as token_id:N")
    return int(match[1])
