"""The prompt in front of the output, for requests that ask for it with `echo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.protocol import BadRequest, ChatCompletionRequest, CompletionRequest, Logprob, wire
from headrace.workers.derender.detokenize import Detokenizer
from headrace.workers.derender.logprobs import LOWEST, LogprobText, to_completion

PromptLogprobs = Sequence[Mapping[int, Logprob] | None]


def chat_echo(request: ChatCompletionRequest) -> str:
    """The text of the message that the output goes on with; empty where the output is a message of its own."""
    last = request.messages[-1]
    role = "assistant" if request.add_generation_prompt else last["role"]
    content = last.get("content")
    if not request.echo or role != last["role"] or content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in content)


def completion_echo(
    request: CompletionRequest, prompt: Sequence[int] | None, number: int, count: int, detokenizer: Detokenizer
) -> str:
    """The text of prompt `number` of `count`, as the request has it, else that of its ids."""
    if not request.echo:
        return ""
    prompts = request.prompts()
    asked = prompts[number] if len(prompts) == count else prompt
    return asked if isinstance(asked, str) else detokenizer.text(asked or ())


def prompt_logprobs(
    prompt: Sequence[int] | None, candidates: PromptLogprobs, text: LogprobText, *, by_id: bool
) -> wire.CompletionLogprobs:
    """The log probabilities of the prompt's tokens; those of the output go on behind them.

    `candidates` are by token id for each token of the whole prompt, the token itself among them; the first has none.
    Raises BadRequest where the lengths differ.
    """
    ids = prompt or ()
    if len(ids) != len(candidates):
        raise BadRequest(
            f"prompt_logprobs length ({len(candidates)}) must equal prompt_token_ids length ({len(ids)}) in an echo.",
            param="prompt_logprobs",
        )
    entries = [_entry(token_id, known or {}) for token_id, known in zip(ids, candidates, strict=True)]
    done = to_completion(text.resolve(wire.TokenLogprobs(entries), (), by_id=by_id), 0, by_id=by_id)
    told = [None if known is None else value for known, value in zip(candidates, done.token_logprobs, strict=True)]
    return msgspec.structs.replace(done, token_logprobs=told)


def joined(one: wire.CompletionLogprobs, other: wire.CompletionLogprobs) -> wire.CompletionLogprobs:
    """Both, one behind the other."""
    return wire.CompletionLogprobs(
        text_offset=one.text_offset + other.text_offset,
        token_logprobs=one.token_logprobs + other.token_logprobs,
        tokens=one.tokens + other.tokens,
        top_logprobs=one.top_logprobs + other.top_logprobs,
    )


def _entry(token_id: int, known: Mapping[int, Logprob]) -> wire.TokenLogprobEntry:
    own = known.get(token_id)
    return wire.TokenLogprobEntry(
        token_id=token_id,
        logprob=LOWEST if own is None else own.logprob,
        top_logprobs=[wire.TokenLogprob(token_id=other, logprob=logprob.logprob) for other, logprob in known.items()],
    )
