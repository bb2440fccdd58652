"""What an engine refuses at the door, by name: a parameter is served or refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import msgspec

from headrace.protocol.errors import BadRequest
from headrace.protocol.generate import GenerateRequest
from headrace.protocol.sampling import RepetitionDetectionParams, SamplingParams

Asks = Callable[[object], bool]


def _given(value: object) -> bool:
    return value is not None


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _detects(value: object) -> bool:
    return isinstance(value, RepetitionDetectionParams) and value.max_pattern_size > 0


UNSERVED: Final[Mapping[str, Asks]] = {
    "features": _given,
    "content_parts": bool,
    "kv_transfer_params": _given,
    "ec_transfer_params": _given,
    "sampling_params.stop": bool,
    "sampling_params.bad_words": bool,
    "sampling_params.structured_outputs": _given,
    "sampling_params.prompt_logprobs": _given,
    "sampling_params.prompt_logprob_token_ids": _given,
    "sampling_params.prompt_logprob_start": _given,
    "sampling_params.logprob_token_ids": _given,
    "sampling_params.truncate_prompt_tokens": _given,
    "sampling_params.stream_interval": _more_than_one,
    "sampling_params.watermarking": bool,
    "sampling_params.extra_args": bool,
    "sampling_params.thinking_token_budget": _given,
    "sampling_params.repetition_detection": _detects,
    "sampling_params.routed_experts_prompt_start": bool,
    "sampling_params.trace_decode_token_ids": _given,
}
"""Fields that no engine here serves yet, by path, and whether a value asks for something."""

NEEDS_MODEL: Final[Mapping[str, Asks]] = {
    "sampling_params.logprobs": _given,
    "sampling_params.allowed_token_ids": _given,
}
"""Fields that an engine without a model cannot keep to."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can serve: ids and lengths in tokens, and the fields of ``unserved`` not at all."""

    engine: str
    vocab_size: int
    max_model_len: int
    max_choices: int
    max_logprobs: int = 0
    unserved: Mapping[str, Asks] = field(default_factory=lambda: UNSERVED)

    def check(self, request: GenerateRequest) -> None:
        """Raises BadRequest for the first thing that cannot be served."""
        self._check_fields(request)
        self._check_ids(request)
        self._check_lengths(request)
        self._check_counts(request.sampling_params)

    def _check_fields(self, request: GenerateRequest) -> None:
        for path, asks in self.unserved.items():
            if asks(attrgetter(path)(request)):
                raise BadRequest(f"{path} is not served by the {self.engine} engine.", param=path)
        for name, value in (request.sampling_params.model_extra or {}).items():
            if value is not None:
                path = f"sampling_params.{name}"
                raise BadRequest(f"{path} is not known to the {self.engine} engine.", param=path)

    def _check_ids(self, request: GenerateRequest) -> None:
        params = request.sampling_params
        self._in_vocabulary("token_ids", request.token_ids)
        self._in_vocabulary("sampling_params.stop_token_ids", params.stop_token_ids)
        self._in_vocabulary("sampling_params.allowed_token_ids", params.allowed_token_ids or ())
        self._in_vocabulary("sampling_params.logit_bias", params.logit_bias or {})

    def _in_vocabulary(self, path: str, ids: Collection[int]) -> None:
        if max(ids, default=0) < self.vocab_size:
            return
        place, token = next((i, token) for i, token in enumerate(ids) if token >= self.vocab_size)
        path = f"{path}.{token if isinstance(ids, Mapping) else place}"
        raise BadRequest(f"{path}: {token} is outside the vocabulary of {self.vocab_size}.", param=path)

    def _check_lengths(self, request: GenerateRequest) -> None:
        prompt, params = len(request.token_ids), request.sampling_params
        room = self.max_model_len - prompt
        if room < 1:
            raise BadRequest(
                f"token_ids must leave room for output in the model's length of {self.max_model_len} tokens, "
                f"got {prompt}.",
                param="token_ids",
            )
        for name, wanted in (("max_tokens", params.max_tokens or 1), ("min_tokens", params.min_tokens)):
            if wanted > room:
                path = f"sampling_params.{name}"
                raise BadRequest(
                    f"{path} must be at most {room} after a prompt of {prompt} tokens, since the model's length is "
                    f"{self.max_model_len}, got {wanted}.",
                    param=path,
                )

    def _check_counts(self, params: SamplingParams) -> None:
        if params.n > self.max_choices:
            raise BadRequest(
                f"sampling_params.n must be at most {self.max_choices}, got {params.n}.", param="sampling_params.n"
            )
        if params.logprobs is not None and not 0 <= params.logprobs <= self.max_logprobs:
            path = "sampling_params.logprobs"
            raise BadRequest(f"{path} must be from 0 to {self.max_logprobs}, got {params.logprobs}.", param=path)


_CHAT_NAMES: Final = {
    "structured_outputs": ("response_format",),
    "max_tokens": ("max_completion_tokens",),
    "logprobs": ("top_logprobs",),
}
"""Sampling parameters that a chat or completion request may have asked for under another name."""


def in_words_of_chat(error: BadRequest, source: bytes) -> BadRequest:
    """What the engine says of a sampling parameter, by the name that the client used."""
    prefix = "sampling_params."
    if error.param is None or not error.param.startswith(prefix):
        return error
    name = error.param.removeprefix(prefix)
    sent = msgspec.json.decode(source, type=dict[str, msgspec.Raw])
    used = next((other for other in _CHAT_NAMES.get(name, ()) if other in sent), name)
    return BadRequest(error.message.replace(prefix + name, used), param=used)
