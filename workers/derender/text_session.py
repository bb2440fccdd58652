"""A live generate request that is answered with text (`output_mode="text"`)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.protocol import (
    GenerateRequest,
    GenerateTextChoice,
    GenerateTextResponse,
    PerRequestMetrics,
    UsageInfo,
    wire,
)
from headrace.workers.derender.choices import Choices
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.echo import PromptLogprobs


class TextSession:
    """One generate request's choices on their way to text. Not for several threads at once.

    Neither reasoning nor tool calls are looked for, whatever formats the model has. The text is cut at the request's
    stop strings, and a token that ended the output has none, unless `include_stop_str_in_output` is set. As for
    Session, a step is a pure function of the request and the chunks before it.
    """

    def __init__(
        self,
        derenderer: Derenderer,
        request: GenerateRequest,
        *,
        id: str,
        created: int,
        model: str,
        checkpoint: bytes | None = None,
    ) -> None:
        """Open a session. `id`, `created` (Unix seconds) and `model` go into every response as they are.

        `checkpoint` is one of an earlier session of the same request, to go on from; ValueError if it is none.
        """
        self._core = derenderer.core
        self._request, self._id, self._created, self._model = request, id, created, model
        self._options = self._core.text_options(request.sampling_params)
        self._choices = Choices(self._core, self._options, request.token_ids)
        if checkpoint is not None:
            self._choices.restore(checkpoint)

    def checkpoint(self) -> bytes:
        """Everything that later chunks depend on, as JSON."""
        return self._choices.checkpoint()

    @property
    def stopped(self) -> frozenset[int]:
        """Choices whose text has met a stop string: what the engine still generates for them is thrown away."""
        return self._choices.stopped

    def step(self, chunk: wire.TokenChunk) -> wire.TextChunk:
        """The chunk that the client sees: always one. Raises BadRequest where the output is too long for the model."""
        return wire.TextChunk(
            request_id=self._id,
            choices=[self._choice(choice) for choice in chunk.choices],
            usage=chunk.usage,
            prompt_token_ids=chunk.prompt_token_ids,
            mm_placeholders=chunk.mm_placeholders,
            metrics=chunk.metrics,
        )

    def final(
        self,
        choices: Iterable[wire.TokenChoice],
        *,
        usage: wire.Usage | None = None,
        metrics: wire.Metrics | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> GenerateTextResponse:
        """The whole response for the whole outputs: the sum of the chunks, whether or not any was stepped through."""
        outputs = list(choices)
        prompt = self._request.token_ids
        if usage is None:
            counted = sum(len(output.token_ids or ()) for output in outputs)
            usage = wire.Usage(len(prompt), len(prompt) + counted, counted)
        return GenerateTextResponse(
            request_id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._whole(output) for output in outputs],
            usage=UsageInfo.model_validate(msgspec.to_builtins(usage)),
            prompt_token_ids=list(prompt) if self._request.return_token_ids else None,
            prompt_logprobs=None if prompt_logprobs is None else [known and dict(known) for known in prompt_logprobs],
            metrics=metrics and PerRequestMetrics.model_validate(msgspec.to_builtins(metrics)),
        )

    def _choice(self, choice: wire.TokenChoice) -> wire.TextChoice:
        last = choice.finish_reason is not None
        return self._core.text(self._choices.progress(choice), self._options, choice, last=last)

    def _whole(self, output: wire.TokenChoice) -> GenerateTextChoice:
        progress = self._core.open(self._options, self._request.token_ids)
        self._core.check_length(progress, self._request.token_ids, output.token_ids or ())
        done = self._core.text(progress, self._options, output, last=True)
        return GenerateTextChoice.model_validate(msgspec.to_builtins(done))
