"""A run's chunks added up to the response that an engine would have given at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self, TypeVar

import msgspec
from msgspec import Raw, Struct

from headrace.protocol.wire import (
    Metrics,
    Placeholder,
    TokenChoice,
    TokenChunk,
    TokenLogprobEntry,
    TokenLogprobs,
    Usage,
    WeightVersion,
)

T = TypeVar("T")


class TokensResponse(Struct, omit_defaults=True, tag_field="output_mode", tag="tokens"):
    """Twin of GenerateTokensResponse, less the fields that travel ready-made (``End.extra``)."""

    request_id: str
    model: str
    created: int
    choices: list[TokenChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[Placeholder]] | None = None
    metrics: Metrics | None = None


class _Sum:
    """One choice so far."""

    __slots__ = ("experts", "finish_reason", "index", "logprobs", "mask", "stop_reason", "token_ids", "versions")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobEntry] | None = None
        self.mask: list[list[int]] | None = None
        self.versions: list[WeightVersion] | None = None
        self.experts: str | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, choice: TokenChoice) -> None:
        if choice.token_ids:
            self.token_ids += choice.token_ids
        if choice.logprobs is not None and choice.logprobs.content:
            self.logprobs = _longer(self.logprobs, choice.logprobs.content)
        if choice.sampling_mask is not None:
            self.mask = _longer(self.mask, choice.sampling_mask)
        if choice.weight_versions is not None:
            self.versions = _longer(self.versions, choice.weight_versions)
        if choice.routed_experts is not None:
            self.experts = choice.routed_experts  # of the whole output so far
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason

    def choice(self) -> TokenChoice:
        return TokenChoice(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=None if self.logprobs is None else TokenLogprobs(self.logprobs),
            routed_experts=self.experts,
            sampling_mask=self.mask,
            weight_versions=self.versions,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def _longer(so_far: list[T] | None, more: list[T]) -> list[T]:
    """The list itself, longer: a copy for each chunk would make the sum quadratic."""
    if so_far is None:
        return list(more)
    so_far += more
    return so_far


class Gathered:
    """The sum of a run's token chunks."""

    __slots__ = ("_placeholders", "_prompt", "_sums", "metrics")

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}
        self._prompt: list[int] | None = None
        self._placeholders: dict[str, list[Placeholder]] | None = None
        self.metrics: Metrics | None = None
        """What the engine measured, once it has said so."""

    @property
    def tokens(self) -> int:
        """How many output tokens there are, all choices together."""
        return sum(len(known.token_ids) for known in self._sums.values())

    @classmethod
    def of(cls, chunks: Iterable[TokenChunk]) -> Self:
        """The sum of these."""
        gathered = cls()
        for chunk in chunks:
            gathered.add(chunk)
        return gathered

    def add(self, chunk: TokenChunk) -> None:
        """Adds the next chunk."""
        for choice in chunk.choices:
            known = self._sums.get(choice.index)
            if known is None:
                known = self._sums[choice.index] = _Sum(choice.index)
            known.add(choice)
        if chunk.prompt_token_ids is not None:
            self._prompt, self._placeholders = chunk.prompt_token_ids, chunk.mm_placeholders
        if chunk.metrics is not None:
            self.metrics = chunk.metrics

    def choices(self) -> list[TokenChoice]:
        """The whole output of each choice, in order of index."""
        return [self._sums[index].choice() for index in sorted(self._sums)]

    def response(self, request_id: str, *, model: str, created: int, usage: Usage | None) -> TokensResponse:
        """The response as it stands."""
        return TokensResponse(
            request_id=request_id,
            model=model,
            created=created,
            choices=self.choices(),
            usage=usage,
            prompt_token_ids=self._prompt,
            mm_placeholders=self._placeholders,
            metrics=self.metrics,
        )


def with_fields(body: bytes, extra: dict[str, Raw]) -> bytes:
    """The JSON object with further fields that travel ready-made."""
    return body if not extra else msgspec.json.encode(msgspec.json.decode(body, type=dict[str, Raw]) | extra)
