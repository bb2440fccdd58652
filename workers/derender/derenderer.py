"""The derender endpoints without a server: requests and responses of the protocol, state carried by the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from headrace.protocol import (
    BadRequest,
    ChatCompletionLogProbs,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionStreamResponse,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderChatStreamResponse,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderCompletionStreamResponse,
    DerenderStreamState,
    GenerateLogProbs,
    GenerateTokensChoice,
    GenerateTokensStreamChoice,
    UsageInfo,
    wire,
)
from headrace.protocol.logprobs import in_integers
from headrace.workers.derender.core import Core
from headrace.workers.derender.formats import REASONING, TOOLS
from headrace.workers.derender.oneshot import chat_choice, completion_choice
from headrace.workers.derender.options import Options
from headrace.workers.derender.progress import Progress, carried
from headrace.workers.derender.vocabulary import Vocabulary

_Format = TypeVar("_Format")

NEEDS_REQUEST: Final = (
    "chat_request is required when a tool or reasoning parser is configured because plain detokenization would leak "
    "raw parser markup into content."
)
NEEDS_PROMPT: Final = (
    "prompt_token_ids is required when a tool or reasoning parser is configured. Without it parse_delta cannot tell "
    "whether the prompt left reasoning open (e.g. a chat template that pre-opens <think>) and would misclassify "
    "reasoning content as plain content."
)


class Derenderer:
    """One model's tokens to OpenAI responses. Pure and safe to share between threads.

    Every refusal is a HeadraceError, whose `error` is the body to answer with. `created` is what responses say;
    without it, what the engine's response said, or 0: there is no clock here.
    """

    def __init__(self, core: Core) -> None:
        self.core = core

    @classmethod
    def load(
        cls,
        path: str | Path,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_model_len: int | None = None,
    ) -> Derenderer:
        """Load the tokenizer in this folder (or this tokenizer.json) and set the formats of the model.

        `max_model_len` bounds prompt and output together, in tokens. Raises FileNotFoundError without a tokenizer
        and ValueError for a format that does not exist.
        """
        return cls(
            Core(
                Vocabulary.load(path),
                reasoning=_row(REASONING, reasoning_parser, "reasoning_parser"),
                tools=_row(TOOLS, tool_parser, "tool_parser"),
                max_model_len=max_model_len,
            )
        )

    def chat(self, request: DerenderChatRequest, *, created: int | None = None) -> ChatCompletionResponse:
        """A finished chat, all its choices at once."""
        response, chat_request = request.generate_response, request.chat_request
        if self.core.parsed and chat_request is None:
            raise BadRequest(NEEDS_REQUEST)
        options = self.core.chat_options(chat_request)
        prompt = _prompt(request.prompt_token_ids, response.prompt_token_ids)
        choices = [
            chat_choice(self.core, options, _token_choice(choice), prompt, run=response.request_id)
            for choice in response.choices
        ]
        return ChatCompletionResponse(
            id=response.request_id,
            created=_created(created, response.created),
            model=_model(request.model, response.model, chat_request),
            choices=choices,
            usage=_usage(request.prompt_tokens or 0, response.choices),
            prompt_logprobs=response.prompt_logprobs,
            kv_transfer_params=response.kv_transfer_params,
            ec_transfer_params=response.ec_transfer_params,
            metrics=response.metrics,
        )

    def chat_stream(
        self, request: DerenderChatStreamRequest, *, created: int | None = None
    ) -> DerenderChatStreamResponse:
        """One chunk of a chat and the state for the next. One state per choice index."""
        chunk, chat_request = request.generate_chunk, request.chat_request
        if len(chunk.choices) > 1:
            raise BadRequest(f"derender_chat_stream expects at most one choice per chunk (got {len(chunk.choices)}).")
        if self.core.parsed and chat_request is None:
            raise BadRequest(NEEDS_REQUEST)
        if self.core.parsed and request.prompt_token_ids is None:
            raise BadRequest(NEEDS_PROMPT)
        options = self.core.chat_options(chat_request)
        prompt = _prompt(request.prompt_token_ids, chunk.prompt_token_ids)
        progress = self._progress(options, request.stream_state, prompt)
        choices = []
        for choice in map(_token_choice, chunk.choices):
            self.core.check_length(progress, prompt, choice.token_ids or ())
            last = choice.finish_reason is not None
            choices.append(self.core.chat(progress, options, choice, run=chunk.request_id, last=last))
        out = wire.ChatChunk(
            id=chunk.request_id,
            created=created or 0,
            model=_model(request.model, None, chat_request),
            choices=choices,
        )
        done = ChatCompletionStreamResponse.model_validate(msgspec.to_builtins(out))
        done.usage, done.metrics = _chunk_usage(chunk.usage, request.prompt_tokens), chunk.metrics
        return DerenderChatStreamResponse(chunk=done, stream_state=_state(progress))

    def completion(self, request: DerenderCompletionRequest, *, created: int | None = None) -> CompletionResponse:
        """Finished completions, one response per prompt; choices are numbered through all of them."""
        responses = request.generate_responses
        if not responses:
            raise BadRequest("generate_responses must have at least 1 item.", param="generate_responses")
        options = Options.of_completion(request.completion_request)
        prompts = request.prompt_token_ids or [None] * len(responses)
        choices: list[CompletionResponseChoice] = []
        for response, given in zip(responses, prompts, strict=True):
            prompt = _prompt(given, response.prompt_token_ids)
            for choice in map(_token_choice, response.choices):
                done = completion_choice(self.core, options, choice, prompt, index=len(choices))
                done.prompt_logprobs = response.prompt_logprobs
                choices.append(done)
        first = responses[0]
        return CompletionResponse(
            id=first.request_id,
            created=_created(created, first.created),
            model=_model(request.model, first.model, request.completion_request),
            choices=choices,
            usage=_usage(sum(request.prompt_tokens or ()), [c for r in responses for c in r.choices]),
            kv_transfer_params=first.kv_transfer_params if len(responses) == 1 else None,
            ec_transfer_params=first.ec_transfer_params if len(responses) == 1 else None,
            metrics=first.metrics if len(responses) == 1 else None,
        )

    def completion_stream(
        self, request: DerenderCompletionStreamRequest, *, created: int | None = None
    ) -> DerenderCompletionStreamResponse:
        """One chunk of a completion and the state for the next. One state per choice index."""
        chunk, completion_request = request.generate_chunk, request.completion_request
        if len(chunk.choices) > 1:
            raise BadRequest("derender_completion_stream expects at most one choice per chunk")
        options = Options.of_completion(completion_request)
        prompt = _prompt(request.prompt_token_ids, chunk.prompt_token_ids)
        progress = self._progress(options, request.stream_state, prompt)
        choices = []
        for choice in map(_token_choice, chunk.choices):
            self.core.check_length(progress, prompt, choice.token_ids or ())
            last = choice.finish_reason is not None
            choices.append(self.core.completion(progress, options, choice, last=last))
        out = wire.CompletionChunk(
            id=chunk.request_id,
            created=created or 0,
            model=_model(request.model, None, completion_request),
            choices=choices,
        )
        done = CompletionStreamResponse.model_validate(msgspec.to_builtins(out))
        done.usage, done.metrics = _chunk_usage(chunk.usage, request.prompt_tokens), chunk.metrics
        return DerenderCompletionStreamResponse(chunk=done, stream_state=_state(progress))

    def _progress(self, options: Options, state: DerenderStreamState | None, prompt: Sequence[int] | None) -> Progress:
        if state is None:
            return self.core.open(options, prompt)
        return self.core.resume(options, msgspec.convert(state.model_dump(), wire.StreamState), prompt)


def _row(table: Mapping[str, _Format], name: str | None, parameter: str) -> _Format | None:
    if name is None:
        return None
    if name not in table:
        raise ValueError(f"{parameter} {name!r} does not exist; known are {', '.join(sorted(table))}")
    return table[name]


def _prompt(given: Sequence[int] | None, told: Sequence[int] | None) -> Sequence[int] | None:
    return told if given is None else given


def _model(asked: str | None, told: str | None, request: ChatCompletionRequest | CompletionRequest | None) -> str:
    return asked or told or (request.model if request is not None else None) or ""


def _created(given: int | None, told: int | None) -> int:
    return given if given is not None else told or 0


def _token_choice(choice: GenerateTokensChoice | GenerateTokensStreamChoice) -> wire.TokenChoice:
    return wire.TokenChoice(
        index=choice.index,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids,
        routed_experts=choice.routed_experts,
        logprobs=None if choice.logprobs is None else _integers(choice.logprobs),
    )


def _integers(logprobs: GenerateLogProbs | ChatCompletionLogProbs) -> wire.TokenLogprobs:
    try:
        return msgspec.convert(in_integers(logprobs).model_dump(), wire.TokenLogprobs)
    except ValueError as error:
        raise BadRequest(f"{error}.", param="logprobs") from None


def _usage(prompt_tokens: int, choices: Iterable[GenerateTokensChoice]) -> UsageInfo:
    output = sum(len(choice.token_ids or ()) for choice in choices)
    return UsageInfo(prompt_tokens=prompt_tokens, completion_tokens=output, total_tokens=prompt_tokens + output)


def _chunk_usage(usage: UsageInfo | None, prompt_tokens: int | None) -> UsageInfo | None:
    if usage is None:
        return None
    prompt = usage.prompt_tokens if prompt_tokens is None else prompt_tokens
    output = usage.completion_tokens or 0
    return usage.model_copy(
        update={"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    )


def _state(progress: Progress) -> DerenderStreamState:
    return DerenderStreamState.model_validate(msgspec.to_builtins(carried(progress)))
