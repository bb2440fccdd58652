"""What a request asks of derendering."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from headrace.protocol import ChatCompletionRequest, CompletionRequest
from headrace.protocol.tools import ChatCompletionNamedToolChoiceParam
from headrace.workers.derender.formats import NONE, Declared, MessageScanner, ReasoningFormat, ToolFormat

_scanner: Final = lru_cache(maxsize=256)(MessageScanner)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one request, the same for all its choices. The defaults are those of an absent request."""

    scanner: MessageScanner | None = None
    """None: the text is the content."""
    parsed: bool = False
    """A format is configured, whether or not this request turns it on."""
    declared: Declared = NONE
    """The tools whose calls are looked for."""
    reasoning: ReasoningFormat | None = None
    skip_special: bool = True
    show_reasoning: bool = True
    one_call: bool = False
    named: bool = False
    """One function was demanded by name: its call does not change the finish reason."""
    forced: bool = False
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output; they have no text."""
    return_ids: bool = False

    @classmethod
    def of_chat(
        cls,
        request: ChatCompletionRequest | None,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        eos: frozenset[int],
    ) -> Options:
        """The options of a chat. Formats are used as far as the request turns them on.

        Where one is configured, markers are looked for in the text, so special tokens are kept in it; `eos` are not.
        """
        if request is None:
            return cls()
        parsed = reasoning is not None or tools is not None
        hidden = reasoning is not None and not request.include_reasoning
        choice = request.tool_choice
        named = isinstance(choice, ChatCompletionNamedToolChoiceParam)
        reasoning = reasoning if reasoning and _thinks(reasoning, request) else None
        tools = tools if request.tools and choice != "none" else None
        stop = _stop_strings(request)
        include_stop = request.include_stop_str_in_output
        return cls(
            scanner=_scanner(reasoning, tools, stop=stop, include_stop=include_stop) if parsed or stop else None,
            parsed=parsed,
            declared=Declared(request.tools or ()) if tools else NONE,
            reasoning=reasoning,
            skip_special=request.skip_special_tokens and not parsed,
            show_reasoning=not hidden,
            one_call=request.parallel_tool_calls is False,
            named=named,
            forced=named or choice == "required",
            stop_ids=(eos if parsed else frozenset()) | _stop_ids(request),
            return_ids=bool(request.return_token_ids) and not hidden,
        )

    @classmethod
    def of_completion(cls, request: CompletionRequest | None) -> Options:
        """The options of a completion, which has neither reasoning nor calls."""
        if request is None:
            return cls()
        stop = _stop_strings(request)
        return cls(
            scanner=_scanner(stop=stop, include_stop=request.include_stop_str_in_output) if stop else None,
            skip_special=request.skip_special_tokens,
            stop_ids=_stop_ids(request),
            return_ids=bool(request.return_token_ids),
        )


def _thinks(reasoning: ReasoningFormat, request: ChatCompletionRequest) -> bool:
    if reasoning.off_when is None:
        return True
    name, off = reasoning.off_when
    return (request.chat_template_kwargs or {}).get(name) != off


def _stop_strings(request: ChatCompletionRequest | CompletionRequest) -> tuple[str, ...]:
    return tuple(sorted(set(request.stop)))


def _stop_ids(request: ChatCompletionRequest | CompletionRequest) -> frozenset[int]:
    return frozenset() if request.include_stop_str_in_output else frozenset(request.stop_token_ids)
