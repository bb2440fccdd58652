"""One choice's progress: the live value, and the DerenderStreamState that it is carried in."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from headrace.protocol import BadRequest, wire
from headrace.protocol.derender import MAX_PREV_TOKENS
from headrace.workers.derender.detokenize import Detokenizer, Window
from headrace.workers.derender.formats import ScanState
from headrace.workers.derender.logprobs import CONTEXT

MAX_TOKEN_TEXT: Final = 4096
"""Characters of one token of a carried window."""
MAX_OFFSET: Final = 1 << 40


class Progress(Struct):
    """Everything that the next chunk of this choice depends on, besides its request and prompt."""

    window: Window
    scan: ScanState | None = None
    role_sent: bool = False
    context: list[int] = []
    """The last sampled ids, for the log probabilities of split characters."""
    offset: int = 0
    """Characters of a completion given out so far."""


def carried(progress: Progress) -> wire.StreamState:
    """The state to carry to the next chunk."""
    window, scan = progress.window, progress.scan
    return wire.StreamState(
        prev_tokens=window.tokens,
        prefix_offset=window.prefix,
        read_offset=window.read,
        role_sent=progress.role_sent,
        logprob_context_token_ids=progress.context,
        logprob_text_offset=progress.offset,
        tools_streamed=scan is not None and scan.calls > 0,
        scan=None if scan is None else msgspec.to_builtins(scan),
    )


def resumed(state: wire.StreamState, detokenizer: Detokenizer) -> Progress:
    """The progress that a state carries, ours or another implementation's. Raises BadRequest, naming the field."""
    _check(state)
    return Progress(
        window=detokenizer.resume(list(state.prev_tokens), state.prefix_offset, state.read_offset),
        scan=None if state.scan is None else _scan(state.scan),
        role_sent=state.role_sent,
        context=list(state.logprob_context_token_ids),
        offset=state.logprob_text_offset,
    )


def _check(state: wire.StreamState) -> None:
    tokens = len(state.prev_tokens)
    longest = max(map(len, state.prev_tokens), default=0)
    lengths = sum(state.output_chunk_lens)
    ids = len(state.output_token_ids)
    for wrong, field, message in (
        (tokens > MAX_PREV_TOKENS, "prev_tokens", f"length ({tokens}) exceeds maximum ({MAX_PREV_TOKENS})"),
        (longest > MAX_TOKEN_TEXT, "prev_tokens", f"holds a token of {longest} characters, more than {MAX_TOKEN_TEXT}"),
        (not 0 <= state.read_offset <= tokens, "read_offset", f"({state.read_offset}) must be from 0 to {tokens}"),
        (
            not 0 <= state.prefix_offset <= state.read_offset,
            "prefix_offset",
            f"({state.prefix_offset}) must be from 0 to read_offset ({state.read_offset})",
        ),
        (
            len(state.logprob_context_token_ids) > CONTEXT,
            "logprob_context_token_ids",
            f"length ({len(state.logprob_context_token_ids)}) exceeds maximum ({CONTEXT})",
        ),
        (
            not 0 <= state.logprob_text_offset <= MAX_OFFSET,
            "logprob_text_offset",
            f"({state.logprob_text_offset}) must be from 0 to {MAX_OFFSET}",
        ),
        (
            lengths != ids or min(state.output_chunk_lens, default=1) < 1,
            "output_chunk_lens",
            f"must sum to len(output_token_ids) (got sum={lengths}, len(output_token_ids)={ids})",
        ),
    ):
        if wrong:
            raise BadRequest(f"{field} {message}", param=f"stream_state.{field}")


def _scan(carried: object) -> ScanState:
    try:
        scan = msgspec.convert(carried, ScanState)
    except msgspec.ValidationError as error:
        raise _bad_scan(str(error)) from None
    if (scan.phase == "call") != (scan.section is not None):
        raise _bad_scan("its phase and its section disagree")
    return scan


def _bad_scan(reason: str) -> BadRequest:
    return BadRequest(f"scan is not one of ours: {reason}", param="stream_state.scan")
