"""Whole outputs at once: the stream's own step with everything in one chunk, so that it is the sum of the chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionResponseChoice,
    ChatMessage,
    CompletionLogProbs,
    CompletionResponseChoice,
    FunctionCall,
    ToolCall,
    wire,
)
from headrace.workers.derender.core import Core
from headrace.workers.derender.echo import PromptLogprobs, joined
from headrace.workers.derender.options import Options


def chat_choice(
    core: Core, options: Options, choice: wire.TokenChoice, prompt: Sequence[int] | None, *, run: str
) -> ChatCompletionResponseChoice:
    """The finished chat choice of a whole output. Raises BadRequest where it is longer than the model allows."""
    progress = core.open(options, prompt)
    core.check_length(progress, prompt, choice.token_ids or ())
    done = core.chat(progress, options, choice, run=run, last=True)
    nothing = "" if options.forced or not core.parsed else None
    logprobs = done.logprobs and ChatCompletionLogProbs.model_validate(msgspec.to_builtins(done.logprobs))
    return ChatCompletionResponseChoice(
        index=done.index,
        message=ChatMessage(
            role="assistant",
            content=done.delta.content or nothing,
            reasoning=done.delta.reasoning,
            tool_calls=[_whole_call(delta) for delta in done.delta.tool_calls],
        ),
        logprobs=logprobs,
        finish_reason=done.finish_reason,
        stop_reason=done.stop_reason,
        token_ids=done.token_ids,
        routed_experts=choice.routed_experts,
    )


def completion_choice(
    core: Core,
    options: Options,
    choice: wire.TokenChoice,
    prompt: Sequence[int] | None,
    index: int,
    prompt_logprobs: PromptLogprobs | None = None,
) -> CompletionResponseChoice:
    """The finished completion choice of a whole output, numbered `index`.

    Raises BadRequest as `chat_choice`, and for `prompt_logprobs` that are to be echoed and do not fit the prompt.
    """
    progress = core.open(options, prompt)
    core.check_length(progress, prompt, choice.token_ids or ())
    done = core.completion(progress, options, choice, last=True)
    logprobs = done.logprobs
    if options.echo_logprobs and prompt_logprobs is not None:
        logprobs = joined(core.prompt_logprobs(options, prompt, prompt_logprobs), logprobs or wire.CompletionLogprobs())
    return CompletionResponseChoice(
        index=index,
        text=done.text,
        logprobs=logprobs and CompletionLogProbs.model_validate(msgspec.to_builtins(logprobs)),
        finish_reason=done.finish_reason,
        stop_reason=done.stop_reason,
        token_ids=done.token_ids,
        prompt_logprobs=prompt_logprobs,
        routed_experts=choice.routed_experts,
    )


def _whole_call(delta: wire.ToolCallDelta) -> ToolCall:
    function = delta.function or wire.FunctionDelta()
    return ToolCall(
        id=delta.id or "",
        function=FunctionCall(name=function.name or "", arguments=function.arguments or ""),
    )
