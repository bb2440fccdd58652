"""The hot path: one choice of one token chunk in, one choice of a chat or completion chunk out.

`Core` is the decode side of one model. It holds no stream: what a stream has come to is its Progress, which a
caller keeps alive (session.py) or carries as a DerenderStreamState (derenderer.py). No clock, no random ids: the
same tokens give the same chunks wherever they are derendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from headrace.protocol import BadRequest, ChatCompletionRequest, CompletionRequest, SamplingParams, wire
from headrace.workers.derender.call_ids import tool_call_id
from headrace.workers.derender.detokenize import detokenizer
from headrace.workers.derender.echo import PromptLogprobs, completion_echo, prompt_logprobs
from headrace.workers.derender.formats import (
    CallPiece,
    Found,
    ReasoningFormat,
    ScanState,
    ToolFormat,
)
from headrace.workers.derender.logprobs import CONTEXT, LogprobText, to_completion
from headrace.workers.derender.opening import opening
from headrace.workers.derender.options import Options
from headrace.workers.derender.progress import Progress, resumed
from headrace.workers.derender.vocabulary import Vocabulary

_Item = TypeVar("_Item")
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
        self._silent = vocabulary.eos | _unwritten(vocabulary, reasoning, tools)
        self.detokenizer = detokenizer(vocabulary)
        self.max_model_len = max_model_len
        self._logprobs = LogprobText(vocabulary, self.detokenizer)
        self._opening = opening(vocabulary, self.detokenizer, reasoning, tools)

    @property
    def parsed(self) -> bool:
        """Whether a reasoning or tool format is configured."""
        return self.reasoning is not None or self.tools is not None

    def chat_options(self, request: ChatCompletionRequest | None) -> Options:
        """What this request asks of this model's formats."""
        return Options.of_chat(request, self.reasoning, self.tools, eos=self._eos, silent=self._silent)

    def completion_options(
        self, request: CompletionRequest | None, prompt: Sequence[int] | None, number: int = 0, count: int = 1
    ) -> Options:
        """What this request asks of its prompt `number`, of `count`."""
        if request is None:
            return Options()
        return Options.of_completion(request, completion_echo(request, prompt, number, count, self.detokenizer))

    def text_options(self, params: SamplingParams) -> Options:
        """What a generate request asks that is answered with text."""
        return Options.of_generate(params, self._eos)

    def open(self, options: Options, prompt: Sequence[int] | None) -> Progress:
        """The progress of a choice that has no token yet. `prompt` may be its tail, unless a format needs it all."""
        window = self.detokenizer.open(prompt, skip_special=options.skip_special)
        if options.scanner is None:
            return Progress(window)
        return Progress(window, self._first(options, prompt))

    def resume(
        self, options: Options, state: wire.StreamState, prompt: Sequence[int] | None, delta: Sequence[int] = ()
    ) -> Progress:
        """The progress that a state carries, ours or another implementation's, `delta` being the next ids.

        A state that carries the output so far, to be replayed, is replayed here, unless it has our own scan of all
        of it. Raises BadRequest, naming the field; where all is too long, before anything is replayed.
        """
        progress = resumed(state, self.detokenizer)
        known = len(state.output_token_ids)
        if options.scanner is None:
            progress.scan = None
        elif options.parsed and (progress.scan is None or known not in (0, progress.scan.tokens)):
            self._check_length(prompt, known, delta)
            self._replay(progress, options, state.output_token_ids, prompt)
        elif progress.scan is None:
            progress.scan = ScanState()
        elif not options.scanner.fits(progress.scan):
            raise BadRequest("scan is not in a format that the request allows", param="stream_state.scan")
        self.check_length(progress, prompt, delta)
        return progress

    def check_length(self, progress: Progress, prompt: Sequence[int] | None, delta: Sequence[int]) -> None:
        """Refuse a chunk that no model of this length can have made; raises BadRequest."""
        known, limit = progress.scan.tokens if progress.scan else 0, self.max_model_len
        if limit is not None and len(prompt or ()) + known + len(delta) > limit:
            self._check_length(prompt, known, delta)

    def _check_length(self, prompt: Sequence[int] | None, known: int, delta: Sequence[int]) -> None:
        limit, before = self.max_model_len, len(prompt or ())
        if limit is not None and before + known + len(delta) > limit:
            raise BadRequest(
                f"prompt_token_ids length ({before}) plus output_token_ids length ({known}) plus "
                f"delta ({len(delta)}) exceeds max_model_len ({limit})."
            )

    def _replay(
        self, progress: Progress, options: Options, output: Sequence[int], prompt: Sequence[int] | None
    ) -> None:
        """Go through the output of another implementation, which has given out what it says.

        Calls that are not among the ids which it has settled it has yet to begin: they are given out here.
        """
        fresh, found = self.open(options, prompt), Found()
        progress.window, progress.scan, progress.context = fresh.window, fresh.scan, list(output[-CONTEXT:])
        self._read(progress, options, output, found)
        progress.untold = [piece for piece in found.calls if piece.index >= len(progress.call_ids)]

    def chat(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, *, run: str, last: bool
    ) -> wire.ChatChoice:
        """Advance a chat's choice by one chunk. `run` names the request: tool-call ids derive from it.

        `last`: nothing follows, so text that was held back is given out now.
        """
        ids = choice.token_ids or []
        found, shown = self._advance(progress, options, choice, last)
        role = None
        if not progress.role_sent:
            role, progress.role_sent = "assistant", True
            found.content.insert(0, options.echo)
        if progress.untold:
            found.calls[:0], progress.untold = progress.untold, []
        delta = wire.Delta(
            role=role,
            content="".join(found.content) or None,
            reasoning="".join(found.reasoning) or None if options.show_reasoning else None,
            tool_calls=_call_deltas(found.calls, options, progress, run, choice.index) if found.calls else [],
        )
        finish_reason, stop_reason = choice.finish_reason, choice.stop_reason
        if finish_reason is not None:
            finish_reason, stop_reason = _finish(progress, options, choice)
        return wire.ChatChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._resolved(progress, options, choice, shown),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=_kept(ids, shown) if options.return_ids else None,
            routed_experts=choice.routed_experts,
        )

    def completion(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, *, last: bool
    ) -> wire.CompletionChoice:
        """Advance a completion's choice by one chunk."""
        echo = "" if progress.offset else options.echo
        if options.echo_only:
            choice = msgspec.structs.replace(choice, token_ids=[], logprobs=None)
        start = progress.offset + len(echo)
        found, shown = self._advance(progress, options, choice, last)
        progress.offset = start + found.length
        resolved = self._resolved(progress, options, choice, shown)
        finish_reason, stop_reason = _finish(progress, options, choice)
        return wire.CompletionChoice(
            index=choice.index,
            text=echo + "".join(found.content),
            logprobs=None if resolved is None else to_completion(resolved, start, by_id=options.name_by_id),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=_kept(choice.token_ids or [], shown) if options.return_ids else None,
            routed_experts=choice.routed_experts,
        )

    def text(self, progress: Progress, options: Options, choice: wire.TokenChoice, *, last: bool) -> wire.TextChoice:
        """Advance a choice whose text is all that is wanted. What comes behind a stop string is left out altogether."""
        found, shown = self._advance(progress, options, choice, last)
        finish_reason, stop_reason = _finish(progress, options, choice)
        return wire.TextChoice(
            index=choice.index,
            text="".join(found.content),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            token_ids=_kept(choice.token_ids or [], shown),
            routed_experts=choice.routed_experts,
            sampling_mask=choice.sampling_mask and _kept(choice.sampling_mask, shown),
            weight_versions=choice.weight_versions,
            logprobs=self._resolved(progress, options, choice, shown),
        )

    def _advance(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, last: bool
    ) -> tuple[Found, list[bool] | None]:
        """What the chunk's tokens say, and which of the tokens the client may see: None for all of them."""
        ids, found, shown = choice.token_ids or [], Found(), None
        if options.withholds and (choice.logprobs is not None or options.return_ids):
            shown = [self._read_to_show(progress, options, token_id, found) for token_id in ids]
        else:
            self._read(progress, options, ids, found)
        if last and options.scanner is not None and progress.scan is not None:
            options.scanner.finish(progress.scan, found, options.declared)
        return found, shown

    def _read_to_show(self, progress: Progress, options: Options, token_id: int, found: Found) -> bool:
        """Read one token; false where it belongs to hidden reasoning or comes behind a stop string."""
        scan, hides = progress.scan, not options.show_reasoning
        assert scan is not None, "whoever withholds something scans for it"
        withheld = scan.stopped is not None or (hides and scan.thinking)
        self._read(progress, options, (token_id,), found)
        return not (withheld or (hides and scan.thinking))

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

    def _resolved(
        self, progress: Progress, options: Options, choice: wire.TokenChoice, shown: list[bool] | None
    ) -> wire.ChatLogprobs | None:
        if choice.logprobs is None:
            progress.context += choice.token_ids or ()
            del progress.context[:-CONTEXT]
            return None
        before = progress.context
        progress.context = [*before, *(choice.token_ids or ())][-CONTEXT:]
        resolved = self._logprobs.resolve(choice.logprobs, before, by_id=options.name_by_id)
        return resolved if resolved.content is None else wire.ChatLogprobs(content=_kept(resolved.content, shown))

    def prompt_logprobs(
        self, options: Options, prompt: Sequence[int] | None, candidates: PromptLogprobs
    ) -> wire.CompletionLogprobs:
        """The log probabilities of an echoed prompt. Raises BadRequest where they are not as many as its tokens."""
        return prompt_logprobs(prompt, candidates, self._logprobs, by_id=options.name_by_id)

    def _first(self, options: Options, prompt: Sequence[int] | None) -> ScanState:
        """Where the scan of an output begins."""
        return self._opening.first(options.reasoning, prompt) if self._opening and options.parsed else ScanState()


def _unwritten(vocabulary: Vocabulary, *formats: ReasoningFormat | ToolFormat | None) -> frozenset[int]:
    """The control tokens that are no part of what these formats write."""
    written = "\n".join(marker for row in formats if row for marker in row.markers)
    return frozenset(token for token in vocabulary.control if (vocabulary.token(token) or "") not in written)


def _kept(items: list[_Item], shown: list[bool] | None) -> list[_Item]:
    return items if shown is None else [item for item, show in zip(items, shown, strict=False) if show]


def _call_deltas(
    pieces: list[CallPiece], options: Options, progress: Progress, run: str, choice: int
) -> list[wire.ToolCallDelta]:
    most = options.most_calls
    return [
        _call_delta(piece, options, progress, run, choice) for piece in pieces if most is None or piece.index < most
    ]


def _call_delta(piece: CallPiece, options: Options, progress: Progress, run: str, choice: int) -> wire.ToolCallDelta:
    if piece.name is None or piece.index < len(progress.call_ids):  # it has begun before
        return wire.ToolCallDelta(index=piece.index, function=wire.FunctionDelta(arguments=piece.arguments))
    function = wire.FunctionDelta(name=piece.name, arguments=piece.arguments)
    call_id = piece.id or tool_call_id(run, choice, piece.index, piece.name, options.call_ids)
    return wire.ToolCallDelta(index=piece.index, id=call_id, type="function", function=function)


def _finish(progress: Progress, options: Options, choice: wire.TokenChoice) -> tuple[str | None, int | str | None]:
    """Finish and stop reason. Calls change "stop" only: one that was cut by length says "length"."""
    scan = progress.scan
    if scan is None or choice.finish_reason is None:
        return choice.finish_reason, choice.stop_reason
    if scan.stopped is not None:
        return "stop", scan.stopped
    called = (scan.calls or progress.called) and options.most_calls != 0
    if choice.finish_reason == "stop" and called and not options.named:
        return _FINISH_BY_CALL, choice.stop_reason
    return choice.finish_reason, choice.stop_reason
