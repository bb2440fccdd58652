"""The derender endpoints without a server: requests and responses of the protocol, state carried by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from headrace.protocol import (
    BadRequest,
    ChatCompletionLogProbs,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
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
    GenerateTokensStreamResponse,
    wire,
)
from headrace.protocol.logprobs import in_integers
from headrace.workers.derender import refusals
from headrace.workers.derender.core import Core
from headrace.workers.derender.fitting import fitted
from headrace.workers.derender.formats import AUTO, About, Formats
from headrace.workers.derender.model_files import about
from headrace.workers.derender.oneshot import chat_choice, completion_choice
from headrace.workers.derender.options import Options
from headrace.workers.derender.passing import agreed, counted, model_name, pass_chunk, pass_unknown
from headrace.workers.derender.progress import History, Progress, carried
from headrace.workers.derender.vocabulary import load_vocabulary

_Value = TypeVar("_Value")

StateMode = Literal["compact", "replay"]


class Derenderer:
    """One model's tokens to OpenAI responses. Pure and safe to share between threads.

    Every refusal is a HeadraceError, whose `error` is the body to answer with. `created` is what responses say;
    without it, what the engine's response said, or 0: there is no clock here.

    `state_mode` is the form of the states that chat streams give out where a format is configured; states of either
    form are taken in, whatever it is. "compact": some hundred bytes, of use to Headrace alone. "replay": the whole
    output so far is carried along, so that an implementation that replays it can go on from any chunk, as long as
    some servers of a fleet still run one. Text that is held back at such a change of hands is the other's to decide:
    within a tool call it may be told twice or not at all. A stream that began compact stays so.
    """

    def __init__(self, core: Core, *, state_mode: StateMode = "compact") -> None:
        self.core = core
        self.state_mode = state_mode

    @classmethod
    def load(
        cls,
        path: str | Path,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_model_len: int | None = None,
        state_mode: StateMode = "compact",
        formats: str | Path | None = None,
    ) -> Derenderer:
        """Load the tokenizer in this folder, or in this file of any kind, and set the formats of the model.

        A format is named, or "auto": the one that the model's chat template asks for. `formats`: a TOML file with
        more of them. `max_model_len` bounds prompt and output together, in tokens. Raises FileNotFoundError without a
        tokenizer and FormatError, a ValueError, for a format that does not exist.
        """
        known, told = Formats(formats), about(path) if AUTO in (tool_parser, reasoning_parser) else About()
        reasoning, tools = known.reasoning(reasoning_parser, told), known.tools(tool_parser, told)
        vocabulary = load_vocabulary(path)
        core = Core(
            vocabulary,
            reasoning=None if reasoning is None else fitted(reasoning, vocabulary),
            tools=None if tools is None else fitted(tools, vocabulary),
            max_model_len=max_model_len,
        )
        return cls(core, state_mode=state_mode)

    def chat(self, request: DerenderChatRequest, *, created: int | None = None) -> ChatCompletionResponse:
        """A finished chat, all its choices at once."""
        response, asked, limit = request.generate_response, request.chat_request, self.core.max_model_len
        refusals.check_responses([response], limit)
        refusals.check_prompt(request.prompt_token_ids, limit)
        if self.core.parsed:
            refusals.need_request(asked)
        options = self.core.chat_options(asked)
        prompt = _first(request.prompt_token_ids, response.prompt_token_ids)
        choices = []
        for choice in response.choices:
            done = chat_choice(self.core, options, _token_choice(choice), prompt, run=response.request_id)
            if options.show_reasoning:
                pass_unknown(choice, done)
            choices.append(done)
        whole = ChatCompletionResponse(
            id=response.request_id,
            created=_first(created, response.created) or 0,
            model=model_name(request.model, response.model, asked),
            choices=choices,
            usage=counted(request.prompt_tokens or 0, response.choices),
            prompt_logprobs=response.prompt_logprobs,
            prompt_token_ids=response.prompt_token_ids if asked is not None and asked.return_token_ids else None,
            kv_transfer_params=response.kv_transfer_params,
            ec_transfer_params=response.ec_transfer_params,
            metrics=response.metrics,
        )
        pass_unknown(response, whole)
        return whole

    def chat_stream(
        self, request: DerenderChatStreamRequest, *, created: int | None = None
    ) -> DerenderChatStreamResponse:
        """One chunk of a chat and the state for the next. One state per choice index."""
        chunk, asked = request.generate_chunk, request.chat_request
        if self.core.parsed:
            refusals.need_request(asked)
            refusals.need_prompt(request.prompt_token_ids)
        refusals.check_chat_chunk(chunk)
        options = self.core.chat_options(asked)
        prompt = _first(request.prompt_token_ids, chunk.prompt_token_ids)
        progress = self._progress(options, request.stream_state, prompt, chunk)
        choices = []
        for choice in map(_token_choice, chunk.choices):
            last = choice.finish_reason is not None
            done = self.core.chat(progress, options, choice, run=chunk.request_id, last=last)
            if progress.history is not None:
                progress.history.add(choice.token_ids or ())
                progress.settle(done.delta.tool_calls)
            choices.append(done)
        out = wire.ChatChunk(
            id=chunk.request_id,
            created=created or 0,
            model=model_name(request.model, None, asked),
            choices=choices,
            prompt_token_ids=chunk.prompt_token_ids if asked is not None and asked.return_token_ids else None,
        )
        told = ChatCompletionStreamResponse.model_validate(msgspec.to_builtins(out))
        pass_chunk(chunk, told, request.prompt_tokens, unknown_of_choices=options.show_reasoning)
        same = request.stream_state if progress.untold else None  # no choice came to tell it with
        return DerenderChatStreamResponse(chunk=told, stream_state=same or _state(progress))

    def completion(self, request: DerenderCompletionRequest, *, created: int | None = None) -> CompletionResponse:
        """Finished completions, one response per prompt; choices are numbered through all of them."""
        responses, asked, limit = request.generate_responses, request.completion_request, self.core.max_model_len
        refusals.check_responses(responses, limit)
        prompts = request.prompt_token_ids or [None] * len(responses)
        for given in prompts:
            refusals.check_prompt(given, limit)
        choices: list[CompletionResponseChoice] = []
        for number, (response, given) in enumerate(zip(responses, prompts, strict=True)):
            prompt = _first(given, response.prompt_token_ids)
            options = self.core.completion_options(asked, prompt, number, len(responses))
            for choice in response.choices:
                done = completion_choice(
                    self.core, options, _token_choice(choice), prompt, len(choices), response.prompt_logprobs
                )
                done.prompt_token_ids = response.prompt_token_ids if options.return_ids else None
                pass_unknown(choice, done)
                choices.append(done)
        first = responses[0]
        whole = CompletionResponse(
            id=first.request_id,
            created=_first(created, first.created) or 0,
            model=model_name(request.model, first.model, asked),
            choices=choices,
            usage=counted(sum(request.prompt_tokens or ()), [c for r in responses for c in r.choices]),
            kv_transfer_params=agreed([response.kv_transfer_params for response in responses]),
            ec_transfer_params=agreed([response.ec_transfer_params for response in responses]),
            metrics=first.metrics if len(responses) == 1 else None,
        )
        if len(responses) == 1:
            pass_unknown(first, whole)
        return whole

    def completion_stream(
        self, request: DerenderCompletionStreamRequest, *, created: int | None = None
    ) -> DerenderCompletionStreamResponse:
        """One chunk of a completion and the state for the next. One state per choice index."""
        chunk, asked = request.generate_chunk, request.completion_request
        refusals.check_prompt(request.prompt_token_ids, self.core.max_model_len)
        refusals.check_completion_chunk(chunk)
        prompt = _first(request.prompt_token_ids, chunk.prompt_token_ids)
        options = self.core.completion_options(asked, prompt)
        progress = self._progress(options, request.stream_state, prompt, chunk)
        choices = []
        for choice in map(_token_choice, chunk.choices):
            last = choice.finish_reason is not None
            choices.append(self.core.completion(progress, options, choice, last=last))
        out = wire.CompletionChunk(
            id=chunk.request_id,
            created=created or 0,
            model=model_name(request.model, None, asked),
            choices=choices,
        )
        told = CompletionStreamResponse.model_validate(msgspec.to_builtins(out))
        for shown in told.choices if options.return_ids else ():
            shown.prompt_token_ids = chunk.prompt_token_ids
        pass_chunk(chunk, told, request.prompt_tokens)
        return DerenderCompletionStreamResponse(chunk=told, stream_state=_state(progress))

    def _progress(
        self,
        options: Options,
        state: DerenderStreamState | None,
        prompt: Sequence[int] | None,
        chunk: GenerateTokensStreamResponse,
    ) -> Progress:
        ids = [token_id for choice in chunk.choices for token_id in choice.token_ids or ()]
        if state is None:
            before, progress = wire.StreamState(), self.core.open(options, prompt)
            self.core.check_length(progress, prompt, ids)
        else:
            before = msgspec.convert(state, wire.StreamState, from_attributes=True)
            progress = self.core.resume(options, before, prompt, ids)
        if self.state_mode == "replay" and options.parsed and _all_told(progress, before):
            progress.history = History(before.output_token_ids, before.output_chunk_lens)
        return progress


def _first(*values: _Value | None) -> _Value | None:
    return next((value for value in values if value is not None), None)


def _token_choice(choice: GenerateTokensChoice | GenerateTokensStreamChoice) -> wire.TokenChoice:
    return wire.TokenChoice(
        index=choice.index,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids,
        routed_experts=choice.routed_experts,
        logprobs=None if choice.logprobs is None else _integers(choice.logprobs, choice.token_ids),
    )


def _integers(logprobs: GenerateLogProbs | ChatCompletionLogProbs, ids: Sequence[int] | None) -> wire.TokenLogprobs:
    refusals.check_logprobs(logprobs.content, ids)
    try:
        return msgspec.convert(in_integers(logprobs).model_dump(), wire.TokenLogprobs)
    except ValueError as error:
        raise BadRequest(f"{error}.", param="logprobs") from None


def _all_told(progress: Progress, state: wire.StreamState) -> bool:
    return progress.scan is not None and progress.scan.tokens == len(state.output_token_ids)


def _state(progress: Progress) -> DerenderStreamState:
    return DerenderStreamState.model_validate_json(msgspec.json.encode(carried(progress)))
