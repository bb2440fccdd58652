"""A live request: the hot path of a derender worker. No pydantic and no JSON per chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from headrace.protocol import (
    BadRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    UsageInfo,
    wire,
)
from headrace.workers.derender.derenderer import NEEDS_PROMPT, Derenderer
from headrace.workers.derender.oneshot import chat_choice, completion_choice
from headrace.workers.derender.options import Options
from headrace.workers.derender.progress import Progress, carried


class Checkpoint(Struct, omit_defaults=True):
    """What a session needs besides its request to go on: each choice's state, and a prompt that came in a chunk."""

    choices: dict[int, wire.StreamState]
    v: Literal[1] = 1
    prompt: list[int] | None = None


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
        core = derenderer.core
        self._core = core
        self._chat = isinstance(request, ChatCompletionRequest)
        self._options = (
            core.chat_options(request) if isinstance(request, ChatCompletionRequest) else Options.of_completion(request)
        )
        if self._chat and core.parsed and prompt_token_ids is None:
            raise BadRequest(NEEDS_PROMPT)
        self._run, self._id, self._created, self._model = run, id, created, model
        self._given_prompt = prompt_token_ids
        self._told_prompt: list[int] | None = None
        self._prompt_tokens = prompt_tokens
        self._choices: dict[int, Progress] = {}
        if checkpoint is not None:
            self._restore(checkpoint)

    def checkpoint(self) -> bytes:
        """Everything that later chunks depend on, as JSON: bounded, but for text that is held back."""
        choices = {index: carried(progress) for index, progress in self._choices.items()}
        return msgspec.json.encode(Checkpoint(choices=choices, prompt=self._told_prompt))

    @property
    def stopped(self) -> frozenset[int]:
        """Choices whose text has met a stop string: what the engine still generates for them is thrown away."""
        met = (index for index, p in self._choices.items() if p.scan is not None and p.scan.stopped is not None)
        return frozenset(met)

    def step(self, chunk: wire.TokenChunk) -> wire.ChatChunk | wire.CompletionChunk:
        """The chunk that the client sees: always one, if need be with an empty delta or with no choices.

        A usage-only chunk and one that only brings the prompt go through too. Raises BadRequest where the output is
        longer than the model allows; the session is then as it was before.
        """
        if chunk.prompt_token_ids is not None and self._given_prompt is None and self._told_prompt is None:
            self._told_prompt = chunk.prompt_token_ids
        usage = None if chunk.usage is None else self._usage(chunk.usage)
        if self._chat:
            return wire.ChatChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._chat_choice(choice) for choice in chunk.choices],
                usage=usage,
                metrics=chunk.metrics,
            )
        return wire.CompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._completion_choice(choice) for choice in chunk.choices],
            usage=usage,
            metrics=chunk.metrics,
        )

    def final(
        self, choices: Iterable[wire.TokenChoice], *, usage: wire.Usage | None = None
    ) -> ChatCompletionResponse | CompletionResponse:
        """The whole response for the whole outputs: the sum of the chunks, whether or not any was stepped through.

        `usage` is what the stream said at its end; without it tokens are counted here.
        """
        outputs = list(choices)
        total = self._total(outputs, usage)
        if self._chat:
            return ChatCompletionResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[
                    chat_choice(self._core, self._options, output, self._prompt, run=self._run) for output in outputs
                ],
                usage=total,
            )
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                completion_choice(self._core, self._options, output, self._prompt, index=output.index)
                for output in outputs
            ],
            usage=total,
        )

    def _restore(self, checkpoint: bytes) -> None:
        try:
            saved = msgspec.json.decode(checkpoint, type=Checkpoint)
        except msgspec.MsgspecError as error:
            raise ValueError(f"these bytes are no checkpoint of a derender session: {error}") from error
        self._told_prompt = saved.prompt
        for index, state in saved.choices.items():
            self._choices[index] = self._core.resume(self._options, state, self._prompt)

    @property
    def _prompt(self) -> Sequence[int] | None:
        return self._told_prompt if self._given_prompt is None else self._given_prompt

    def _progress(self, choice: wire.TokenChoice) -> Progress:
        progress = self._choices.get(choice.index)
        if progress is None:
            progress = self._choices[choice.index] = self._core.open(self._options, self._prompt)
        self._core.check_length(progress, self._prompt, choice.token_ids or ())
        return progress

    def _chat_choice(self, choice: wire.TokenChoice) -> wire.ChatChoice:
        last = choice.finish_reason is not None
        return self._core.chat(self._progress(choice), self._options, choice, run=self._run, last=last)

    def _completion_choice(self, choice: wire.TokenChoice) -> wire.CompletionChoice:
        last = choice.finish_reason is not None
        return self._core.completion(self._progress(choice), self._options, choice, last=last)

    def _usage(self, usage: wire.Usage) -> wire.Usage:
        prompt = usage.prompt_tokens if self._prompt_tokens is None else self._prompt_tokens
        output = usage.completion_tokens or 0
        return msgspec.structs.replace(
            usage, prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output
        )

    def _total(self, outputs: Sequence[wire.TokenChoice], usage: wire.Usage | None) -> UsageInfo:
        if usage is None:
            counted = sum(len(output.token_ids or ()) for output in outputs)
            usage = wire.Usage(prompt_tokens=len(self._prompt or ()), completion_tokens=counted)
        return UsageInfo.model_validate(msgspec.to_builtins(self._usage(usage)))
