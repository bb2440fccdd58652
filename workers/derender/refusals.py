"""What the derender endpoints refuse before any token is read, in the words that the reference has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.protocol import (
    BadRequest,
    ChatCompletionRequest,
    GenerateTokensResponse,
    GenerateTokensStreamResponse,
)

MAX_CHOICES: Final = 16384
"""Choices of a response, and responses of a request."""

_NEEDS_REQUEST: Final = (
    "chat_request is required when a tool or reasoning parser is configured because plain detokenization would leak "
    "raw parser markup into content."
)
_NEEDS_PROMPT: Final = (
    "prompt_token_ids is required when a tool or reasoning parser is configured. Without it parse_delta cannot tell "
    "whether the prompt left reasoning open (e.g. a chat template that pre-opens <think>) and would misclassify "
    "reasoning content as plain content."
)


def need_request(request: ChatCompletionRequest | None) -> None:
    """Where a format is configured: the request says how it is used."""
    if request is None:
        raise BadRequest(_NEEDS_REQUEST)


def need_prompt(prompt: Sequence[int] | None) -> None:
    """Where a format is configured, and chunks come one by one: the prompt may have opened the reasoning."""
    if prompt is None:
        raise BadRequest(_NEEDS_PROMPT)


def check_chat_chunk(chunk: GenerateTokensStreamResponse) -> None:
    """A state is one choice's."""
    if (count := len(chunk.choices)) > 1:
        raise BadRequest(f"derender_chat_stream expects at most one choice per chunk (got {count}).")


def check_completion_chunk(chunk: GenerateTokensStreamResponse) -> None:
    """A state is one choice's."""
    if len(chunk.choices) > 1:
        raise BadRequest("derender_completion_stream expects at most one choice per chunk")


def check_responses(responses: Sequence[GenerateTokensResponse], limit: int | None) -> None:
    """Bounds on whole outputs; `limit` is the model's length in tokens, None where it is not known."""
    if not responses:
        raise BadRequest("generate_responses must not be empty")
    if len(responses) > MAX_CHOICES:
        raise BadRequest(f"generate_responses count ({len(responses)}) exceeds server maximum ({MAX_CHOICES}).")
    for response in responses:
        if (count := len(response.choices)) > MAX_CHOICES:
            raise BadRequest(
                f"choices count ({count}) in response '{response.request_id}' exceeds server maximum ({MAX_CHOICES})."
            )
        for choice in response.choices:
            where = f" in choice {choice.index}"
            _check(choice.token_ids, "token_ids", where, limit)
            _check(None if choice.logprobs is None else choice.logprobs.content, "logprobs.content", where, limit)
        _check(response.prompt_logprobs, "prompt_logprobs", f" in response '{response.request_id}'", limit)


def check_prompt(prompt: Sequence[int] | None, limit: int | None) -> None:
    """A prompt is no longer than its model allows."""
    _check(prompt, "prompt_token_ids", "", limit)


def check_logprobs(logprobs: Sequence[object] | None, token_ids: Sequence[int] | None) -> None:
    """There is one entry for each token."""
    entries, tokens = len(logprobs or ()), len(token_ids or ())
    if logprobs is not None and entries != tokens:
        raise BadRequest(
            f"logprobs.content length ({entries}) must equal token_ids length ({tokens}).", param="logprobs"
        )


def _check(items: Sequence[object] | None, what: str, where: str, limit: int | None) -> None:
    if items is not None and limit is not None and len(items) > limit:
        raise BadRequest(f"{what} length ({len(items)}){where} exceeds max_model_len ({limit}).")
