"""A live request: the hot path of a derender worker. No pydantic and no JSON per chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headrace.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    PerRequestMetrics,
    UsageInfo,
    wire,
)
from headrace.workers.derender.choices import Choices
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.echo import PromptLogprobs
from headrace.workers.derender.oneshot import chat_choice, completion_choice
from headrace.workers.derender.refusals import need_prompt


class Session:
    """One request's choices on their way to text. Not for several threads at once.

    A step is a pure function of the request and the chunks before it: a session that was restored from a
    checkpoint gives the chunks that the first one would have given.
    """

    def __init__(
        self,
        derenderer: Derenderer,
        request: ChatCompletionRequest | CompletionRequest,
        *,
        run: str,
        id: str,
        created: int,
        model: str,
        prompt_token_ids: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        checkpoint: bytes | None = None,
    ) -> None:
        """Open a session. Its responses are those of a chat or of a completion, as `request` is one.

        `run` names the request for good: tool-call ids derive from it, the choice and the call's index alone. `id`,
        `created` (Unix seconds) and `model` go into every response as they are. `prompt_token_ids` is the whole
        prompt where a reasoning or tool format is configured, else its tail is enough and the first chunk may bring
        it. `prompt_tokens` is the prompt's length in `usage`; without it the chunks' own number stands. `checkpoint`
        is one of an earlier session of the same request, to go on from. Raises BadRequest for a chat without the
        prompt that its format needs, ValueError for bytes that are no checkpoint.
        """
        core = self._core = derenderer.core
        self._chat = isinstance(request, ChatCompletionRequest)
        if isinstance(request, ChatCompletionRequest):
            self._options = core.chat_options(request)
        else:
            self._options = core.completion_options(request, prompt_token_ids)
        if self._chat and core.parsed:
            need_prompt(prompt_token_ids)
        self._run, self._id, self._created, self._model = run, id, created, model
        self._prompt_tokens = prompt_tokens
        self._tells_prompt = bool(request.return_token_ids)
        self._choices = Choices(core, self._options, prompt_token_ids)
        if checkpoint is not None:
            self._choices.restore(checkpoint)

    def checkpoint(self) -> bytes:
        """Everything that later chunks depend on, as JSON: bounded, but for text that is held back."""
        return self._choices.checkpoint()

    @property
    def stopped(self) -> frozenset[int]:
        """Choices whose text has met a stop string: what the engine still generates for them is thrown away."""
        return self._choices.stopped

    def step(self, chunk: wire.TokenChunk) -> wire.ChatChunk | wire.CompletionChunk:
        """The chunk that the client sees: always one, if need be with an empty delta or with no choices.

        A usage-only chunk and one that only brings the prompt go through too. Raises BadRequest where the output is
        longer than the model allows; the session is then as it was before.
        """
        told = chunk.prompt_token_ids
        if told is not None:
            self._choices.hear(told)
        usage = None if chunk.usage is None else self._usage(chunk.usage)
        prompt = told if self._tells_prompt else None
        if self._chat:
            return wire.ChatChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._chat_choice(choice) for choice in chunk.choices],
                usage=usage,
                prompt_token_ids=prompt,
                metrics=chunk.metrics,
            )
        return wire.CompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._completion_choice(choice, prompt) for choice in chunk.choices],
            usage=usage,
            metrics=chunk.metrics,
        )

    def final(
        self,
        choices: Iterable[wire.TokenChoice],
        *,
        usage: wire.Usage | None = None,
        metrics: wire.Metrics | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> ChatCompletionResponse | CompletionResponse:
        """The whole response for the whole outputs: the sum of the chunks, whether or not any was stepped through.

        `usage` and `metrics` are what the stream said at its end; without `usage` tokens are counted here.
        """
        outputs = list(choices)
        total = self._total(outputs, usage)
        taken = metrics and PerRequestMetrics.model_validate(msgspec.to_builtins(metrics))
        prompt = self._choices.prompt
        told = list(prompt) if prompt is not None and self._tells_prompt else None
        logprobs = None if prompt_logprobs is None else [known and dict(known) for known in prompt_logprobs]
        if self._chat:
            return ChatCompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[chat_choice(self._core, self._options, output, prompt, run=self._run) for output in outputs],
                usage=total,
                prompt_token_ids=told,
                prompt_logprobs=logprobs,
                metrics=taken,
            )
        done = [
            completion_choice(self._core, self._options, output, prompt, output.index, logprobs) for output in outputs
        ]
        for choice in done:
            choice.prompt_token_ids = told
        return CompletionResponse(
            id=self._id, created=self._created, model=self._model, choices=done, usage=total, metrics=taken
        )

    def _chat_choice(self, choice: wire.TokenChoice) -> wire.ChatChoice:
        last = choice.finish_reason is not None
        return self._core.chat(self._choices.progress(choice), self._options, choice, run=self._run, last=last)

    def _completion_choice(self, choice: wire.TokenChoice, prompt: list[int] | None) -> wire.CompletionChoice:
        last = choice.finish_reason is not None
        done = self._core.completion(self._choices.progress(choice), self._options, choice, last=last)
        return done if prompt is None else msgspec.structs.replace(done, prompt_token_ids=prompt)

    def _usage(self, usage: wire.Usage) -> wire.Usage:
        prompt = usage.prompt_tokens if self._prompt_tokens is None else self._prompt_tokens
        output = usage.completion_tokens or 0
        return msgspec.structs.replace(
            usage, prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output
        )

    def _total(self, outputs: Sequence[wire.TokenChoice], usage: wire.Usage | None) -> UsageInfo:
        if usage is None:
            counted = sum(len(output.token_ids or ()) for output in outputs)
            usage = wire.Usage(prompt_tokens=len(self._choices.prompt or ()), completion_tokens=counted)
        return UsageInfo.model_validate(msgspec.to_builtins(self._usage(usage)))
