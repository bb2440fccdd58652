"""The hot path: one choice of one token chunk in, one choice of a chat or completion chunk out.

`Core` is the decode side of one model. It holds no stream: what a stream has come to is its Progress, which a
caller keeps alive (session.py) or carries as a DerenderStreamState (derenderer.py). No clock, no random ids: the
same tokens give the same chunks wherever they are derendered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from headrace.protocol import BadRequest, ChatCompletionRequest, wire
from headrace.workers.derender.detokenize import detokenizer
from headrace.workers.derender.formats import (
    CallPiece,
    Found,
    ReasoningFormat,
    ScanState,
    ToolFormat,
)
from headrace.workers.derender.logprobs import CONTEXT, LogprobText, to_completion
from headrace.workers.derender.options import Options
from headrace.workers.derender.progress import Progress, resumed
from headrace.workers.derender.vocabulary import Vocabulary

_FINISH_BY_CALL: Final = "tool_calls"


class Core:
    """Steps of one model's streams. Pure but for caches of decoded tokens; safe to share between threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.reasoning = reasoning
        self.tools = tools
        self._eos = vocabulary.eos
        self.detokenizer = detokenizer(vocabulary)
        self._max_model_len = max_model_len
        self._logprobs = LogprobText(vocabulary, self.detokenizer)
        self._reasoning_ids = None if reasoning is None else _ids_of(vocabulary, reasoning)

    @property
    def parsed(self) -> bool:
        """Whether a reasoning or tool format is configured."""
        return self.reasoning is not None or self.tools is not None

    def chat_options(self, request: ChatCompletionRequest | None) -> Options:
        """What this request asks of this model's formats."""
        return Options.of_chat(request, self.reasoning, self.tools, self._eos)

    def open(self, options: Options, prompt: Sequence[int] | None) -> Progress:
        """The progress of a choice that has no token yet. `prompt` may be its tail, unless a format needs it all."""
        window = self.detokenizer.open(prompt, skip_special=options.skip_special)
        if options.scanner is None:
            return Progress(window)
        thinking = options.reasoning is not None and self._opens_in_reasoning(options.reasoning, prompt)
        return Progress(window, ScanState(phase="reasoning" if thinking else "content"))

    def resume(self, options: Options, state: wire.StreamState, prompt: Sequence[int] | None) -> Progress:
        """The progress that a state carries, ours or another implementation's. Raises BadRequest, naming the field.

        A state that carries the output so far, to be replayed, is replayed here once.
        """
        progress = resumed(state, self.detokenizer)
        if options.scanner is None:
            progress.scan = None
        elif progress.scan is None and options.parsed:
            replayed = self.open(options, prompt)
            self.check_length(replayed, prompt, state.output_token_ids)
            self._read(replayed, options, state.output_token_ids, Found())
            replayed.role_sent, replayed.context = progress.role_sent, state.output_token_ids[-CONTEXT:]
            return replayed
        elif progress.scan is None:
            progress.scan = ScanState()
        elif progress.scan.section is not None and options.scanner.tools is None:
            raise BadRequest("scan is within a tool call, but the request allows none", param="stream_state.scan")
        return progress

    def check_length(self, progress: Progress, prompt: Sequence[int] | None, delta: Sequence[int]) -> None:
        """Refuse a chunk that no model of this length can have made; raises BadRequest."""
        limit = self._max_model_len
        before, known = len(prompt or ()), progress.scan.tokens if progress.scan else 0
        if limit is not None and before + known + len(delta) > limit:
            raise BadRequest(
                f"prompt_token_ids length ({before}) plus output_token_ids length ({known}) plus "
                f"delta ({len(delta)}) exceeds max_model_len ({limit})."
            )

    def chat(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, *, run: str, last: bool
    ) -> wire.ChatChoice:
        """Advance a chat's choice by one chunk. `run` names the request: tool-call ids derive from it.

        `last`: nothing follows, so text that was held back is given out now.
        """
        ids = choice.token_ids or []
        found, hidden = self._advance(progress, options, choice, last)
        delta = wire.Delta(
            role=None if progress.role_sent else "assistant",
            content="".join(found.content) or None,
            reasoning="".join(found.reasoning) or None if options.show_reasoning else None,
            tool_calls=_call_deltas(found.calls, options, run, choice.index) if found.calls else [],
        )
        progress.role_sent = True
        finish_reason, stop_reason = _finish(progress.scan, options, choice)
        return wire.ChatChoice(
            index=choice.index,
            delta=delta,
            logprobs=_without(self._resolved(progress, choice), hidden),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=ids if options.return_ids else None,
        )

    def completion(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, *, last: bool
    ) -> wire.CompletionChoice:
        """Advance a completion's choice by one chunk."""
        start = progress.offset
        found, _ = self._advance(progress, options, choice, last)
        progress.offset += found.length
        resolved = self._resolved(progress, choice)
        finish_reason, stop_reason = _finish(progress.scan, options, choice)
        return wire.CompletionChoice(
            index=choice.index,
            text="".join(found.content),
            logprobs=None if resolved is None else to_completion(resolved, start),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=choice.token_ids if options.return_ids else None,
        )

    def _advance(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, last: bool
    ) -> tuple[Found, list[bool]]:
        """What the chunk's tokens say, and which of them belong to reasoning that is not shown."""
        ids = choice.token_ids or []
        found, hidden = Found(), []
        if choice.logprobs is None or options.show_reasoning or options.reasoning is None:
            self._read(progress, options, ids, found)
        else:
            for token_id in ids:
                before = _thinking(progress)
                self._read(progress, options, (token_id,), found)
                hidden.append(before or _thinking(progress))
        if last and options.scanner is not None and progress.scan is not None:
            options.scanner.finish(progress.scan, found, options.declared)
        return found, hidden

    def _read(self, progress: Progress, options: Options, ids: Sequence[int], found: Found) -> None:
        stops = options.stop_ids
        spoken = ids if stops.isdisjoint(ids) else [i for i in ids if i not in stops]
        text = self.detokenizer.feed(progress.window, spoken, skip_special=options.skip_special)
        found.length += len(text)
        if options.scanner is None or progress.scan is None:
            found.content.append(text)
            return
        progress.scan.tokens += len(ids)
        if text:
            options.scanner.feed(progress.scan, text, found, options.declared)

    def _resolved(self, progress: Progress, choice: wire.TokenChoice) -> wire.ChatLogprobs | None:
        before = progress.context
        progress.context = [*before, *(choice.token_ids or ())][-CONTEXT:]
        return None if choice.logprobs is None else self._logprobs.resolve(choice.logprobs, before)

    def _opens_in_reasoning(self, reasoning: ReasoningFormat, prompt: Sequence[int] | None) -> bool:
        """The prompt's last reasoning marker decides; without one, the format does."""
        if self._reasoning_ids is not None:
            start, end = self._reasoning_ids
            last = next((i for i in reversed(prompt or ()) if i in (start, end)), None)
            return reasoning.open_at_start if last is None else last == start
        text = self.detokenizer.text(prompt or ())
        opened, closed = text.rfind(reasoning.start), text.rfind(reasoning.end)
        return opened > closed or (opened == closed and reasoning.open_at_start)


def tool_call_id(run: str, choice: int, index: int) -> str:
    """The id of a choice's call number `index`: the same whenever and wherever the run is derendered."""
    digest = hashlib.blake2b(f"{run}\0{choice}\0{index}".encode(), digest_size=8)
    return f"chatcmpl-tool-{digest.hexdigest()}"


def _ids_of(vocabulary: Vocabulary, reasoning: ReasoningFormat) -> tuple[int, int] | None:
    start, end = vocabulary.find(reasoning.start), vocabulary.find(reasoning.end)
    return None if start is None or end is None else (start, end)


def _thinking(progress: Progress) -> bool:
    return progress.scan is not None and progress.scan.phase == "reasoning"


def _call_deltas(pieces: list[CallPiece], options: Options, run: str, choice: int) -> list[wire.ToolCallDelta]:
    return [_call_delta(piece, run, choice) for piece in pieces if not (options.one_call and piece.index > 0)]


def _call_delta(piece: CallPiece, run: str, choice: int) -> wire.ToolCallDelta:
    function = wire.FunctionDelta(name=piece.name, arguments=piece.arguments)
    if piece.name is None:
        return wire.ToolCallDelta(index=piece.index, function=function)
    call_id = tool_call_id(run, choice, piece.index)
    return wire.ToolCallDelta(index=piece.index, id=call_id, type="function", function=function)


def _finish(scan: ScanState | None, options: Options, choice: wire.TokenChoice) -> tuple[str | None, int | str | None]:
    """Finish and stop reason. Calls change "stop" only: one that was cut by length says "length"."""
    if scan is None or choice.finish_reason is None:
        return choice.finish_reason, choice.stop_reason
    if scan.stopped is not None:
        return "stop", scan.stopped
    if choice.finish_reason == "stop" and scan.calls and not options.named:
        return _FINISH_BY_CALL, choice.stop_reason
    return choice.finish_reason, choice.stop_reason


def _without(logprobs: wire.ChatLogprobs | None, hidden: list[bool]) -> wire.ChatLogprobs | None:
    if not hidden or logprobs is None or logprobs.content is None:
        return logprobs
    shown = [entry for entry, hide in zip(logprobs.content, hidden, strict=False) if not hide]
    return wire.ChatLogprobs(content=shown)
