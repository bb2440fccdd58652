"""One choice's progress: the live value, and the DerenderStreamState that it is carried in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from headrace.protocol import BadRequest, wire
from headrace.protocol.derender import MAX_PREV_TOKENS
from headrace.workers.derender.detokenize import Detokenizer, Window
from headrace.workers.derender.formats import CallPiece, ScanState
from headrace.workers.derender.logprobs import CONTEXT

MAX_TOKEN_TEXT: Final = 4096
"""Characters of one token of a carried window."""
MAX_OFFSET: Final = 1 << 40
MAX_CALL_IDS: Final = 1 << 14
MAX_CALL_ID: Final = 2048
"""Characters of one id of a carried state."""


class History(Struct):
    """The whole output so far, chunk by chunk: what an implementation that replays it goes on from."""

    token_ids: list[int] = []
    lengths: list[int] = []
    """Tokens of each chunk; never 0."""

    def add(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            self.token_ids += token_ids
            self.lengths.append(len(token_ids))


class Progress(Struct):
    """Everything that the next chunk of this choice depends on, besides its request and prompt."""

    window: Window
    scan: ScanState | None = None
    role_sent: bool = False
    context: list[int] = []
    """The last sampled ids, for the log probabilities of split characters."""
    offset: int = 0
    """Characters of a completion given out so far."""
    called: bool = False
    """A call was given out before, by whoever made the state that this goes on from."""
    call_ids: list[str] = []
    """Ids of calls by index, as far as whoever kept count has told them: those calls have begun for the client."""
    untold: list[CallPiece] = []
    """What is to be given out with the next chunk: calls that had come before, and were not told."""
    history: History | None = None
    """Kept only where the state is to be replayed."""

    def settle(self, calls: Iterable[wire.ToolCallDelta]) -> None:
        """Remember the ids of calls that were given out."""
        for call in calls:
            if call.id is not None and call.index == len(self.call_ids):
                self.call_ids.append(call.id)


def carried(progress: Progress) -> wire.StreamState:
    """The state to carry to the next chunk."""
    window, scan, history = progress.window, progress.scan, progress.history
    calls = 0 if scan is None else scan.calls
    return wire.StreamState(
        prev_tokens=window.tokens,
        prefix_offset=window.prefix,
        read_offset=window.read,
        role_sent=progress.role_sent,
        logprob_context_token_ids=progress.context,
        logprob_text_offset=progress.offset,
        output_token_ids=[] if history is None else history.token_ids,
        output_chunk_lens=[] if history is None else history.lengths,
        tools_streamed=progress.called or calls > 0,
        last_tool_call_ids=progress.call_ids if history is not None or len(progress.call_ids) > calls else [],
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
        called=state.tools_streamed,
        call_ids=list(state.last_tool_call_ids),
    )


def _check(state: wire.StreamState) -> None:
    for field, message in _out_of_bounds(state):
        raise BadRequest(f"{field} {message}", param=f"stream_state.{field}")


def _out_of_bounds(state: wire.StreamState) -> Iterator[tuple[str, str]]:
    tokens, context, calls = len(state.prev_tokens), len(state.logprob_context_token_ids), len(state.last_tool_call_ids)
    longest = max(map(len, state.prev_tokens), default=0)
    if tokens > MAX_PREV_TOKENS:
        yield "prev_tokens", f"length ({tokens}) exceeds maximum ({MAX_PREV_TOKENS})"
    if longest > MAX_TOKEN_TEXT:
        yield "prev_tokens", f"holds a token of {longest} characters, more than {MAX_TOKEN_TEXT}"
    if not 0 <= state.read_offset <= tokens:
        yield "read_offset", f"({state.read_offset}) must be from 0 to {tokens}"
    if not 0 <= state.prefix_offset <= state.read_offset:
        yield "prefix_offset", f"({state.prefix_offset}) must be from 0 to read_offset ({state.read_offset})"
    if context > CONTEXT:
        yield "logprob_context_token_ids", f"length ({context}) exceeds maximum ({CONTEXT})"
    if not 0 <= state.logprob_text_offset <= MAX_OFFSET:
        yield "logprob_text_offset", f"({state.logprob_text_offset}) must be from 0 to {MAX_OFFSET}"
    total, ids = sum(state.output_chunk_lens), len(state.output_token_ids)
    if total != ids or min(state.output_chunk_lens, default=1) < 1:
        yield "output_chunk_lens", f"must sum to len(output_token_ids) (got sum={total}, len(output_token_ids)={ids})"
    if calls > MAX_CALL_IDS:
        yield "last_tool_call_ids", f"length ({calls}) exceeds maximum ({MAX_CALL_IDS})"
    longest = max(map(len, state.last_tool_call_ids), default=0)
    if longest > MAX_CALL_ID:
        yield "last_tool_call_ids", f"holds an id of {longest} characters, more than {MAX_CALL_ID}"


def _scan(carried: object) -> ScanState:
    try:
        scan = msgspec.convert(carried, ScanState)
    except msgspec.ValidationError as error:
        raise _bad_scan(str(error)) from None
    if (scan.phase == "call") != (scan.section is not None):
        raise _bad_scan("its phase and its section disagree")
    if scan.section is not None and (scan.section.done or scan.section.refused):
        raise _bad_scan("its section is over")
    return scan


def _bad_scan(reason: str) -> BadRequest:
    return BadRequest(f"scan is not one of ours: {reason}", param="stream_state.scan")
