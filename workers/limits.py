"""What one client may have under way: a request is counted before it is served, until its outcome."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from headrace.broker.ports import Allowance, Broker
from headrace.protocol.errors import QueueFull, TooLarge
from headrace.protocol.generate import GenerateRequest
from headrace.protocol.jobs import GenerateJob

RETRY_AFTER_S: Final = 5.0

J = TypeVar("J", bound=GenerateJob)


def tokens_of(request: GenerateRequest, max_model_len: int) -> int:
    """Tokens that a request may come to: its prompt, and for each choice what it allows or the model does."""
    params, prompt = request.sampling_params, len(request.token_ids)
    room = max(0, max_model_len - prompt)
    return prompt + params.n * (room if params.max_tokens is None else min(room, params.max_tokens))


async def count(broker: Broker, job: J, tokens: int, allowance: Allowance) -> J:
    """The job, counted among what its client has under way.

    Raises QueueFull where the client has too much under way, TooLarge where the request alone is too much.
    """
    if not (allowance.requests or allowance.tokens):
        return job
    if 0 < allowance.tokens < tokens:
        raise TooLarge(f"the request may come to {tokens} tokens, a client may have {allowance.tokens} under way")
    why = await broker.runs.enter(job.client, job.run, tokens, job.deadline or 0.0, allowance)
    if why is not None:
        raise QueueFull(why, retry_after=RETRY_AFTER_S)
    return msgspec.structs.replace(job, counted=True)


async def uncount(broker: Broker, job: GenerateJob) -> None:
    """The job is not under way, if it was counted: it was over before, or is refused."""
    if job.counted:
        await broker.runs.leave(job.client, job.run)
