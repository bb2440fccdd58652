"""What a request asks of derendering."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from msgspec import Struct

from headrace.protocol import ChatCompletionRequest, CompletionRequest, SamplingParams
from headrace.protocol.tools import ChatCompletionNamedToolChoiceParam
from headrace.workers.derender.echo import chat_echo
from headrace.workers.derender.formats import NONE, Declared, ReasoningFormat, Scanner, ToolFormat, scanner
from headrace.workers.derender.formats.tools import CallIds

OFF: Final = (False, "", "none", "no_think")
"""Values of a template argument that turn thinking off."""

_scanner: Final = lru_cache(maxsize=256)(scanner)


class Options(Struct, frozen=True):
    """Settings of one request, the same for all its choices. The defaults are those of an absent request."""

    scanner: Scanner | None = None
    """None: the text is the content."""
    parsed: bool = False
    """A format is configured, whether or not this request turns it on."""
    declared: Declared = NONE
    """The tools whose calls are looked for."""
    reasoning: ReasoningFormat | None = None
    skip_special: bool = True
    show_reasoning: bool = True
    most_calls: int | None = None
    """Calls that the client gets; the others are read and dropped. None: all of them."""
    call_ids: CallIds = "openai"
    """The style of the ids of calls that the model gave none to."""
    named: bool = False
    """One function was demanded by name: its call does not change the finish reason."""
    forced: bool = False
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output; they have no text."""
    echo: str = ""
    """Text to give out before the output."""
    echo_logprobs: bool = False
    """Log probabilities of the prompt go in front too."""
    echo_only: bool = False
    """The output itself, which an engine makes in any case, is thrown away."""
    return_ids: bool = False
    name_by_id: bool = False
    """Tokens of log probabilities are named by their ids, not by their text."""
    withholds: bool = False
    """Some tokens may be kept from the client: those of hidden reasoning, those behind a stop string."""

    @classmethod
    def of_chat(
        cls,
        request: ChatCompletionRequest | None,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        *,
        eos: frozenset[int],
        silent: frozenset[int],
    ) -> Options:
        """The options of a chat. Formats are used as far as the request turns them on.

        Where one is configured, markers are looked for in the text, so special tokens are kept in it: all but `eos`,
        or all but `silent` where the request skips them.
        """
        if request is None:
            return cls()
        parsed = reasoning is not None or tools is not None
        hidden = reasoning is not None and not request.include_reasoning
        choice = request.tool_choice
        demanded = _demanded(request)
        reasoning = _in_force(reasoning, request) if reasoning else None
        asked = choice != "none" if request.tools else tools is not None and tools.unasked == "calls"
        tools = tools if tools and (asked or tools.unasked != "content") else None
        stop = _stop_strings(request)
        include_stop = request.include_stop_str_in_output
        ours, ends = _stop_ids(request), silent if request.skip_special_tokens else eos
        if not parsed:
            ends = frozenset()
        return cls(
            scanner=(
                _scanner(reasoning, tools, demanded=demanded, stop=stop, include_stop=include_stop)
                if parsed or stop
                else None
            ),
            parsed=parsed,
            declared=Declared(request.tools or ()) if tools else NONE,
            reasoning=reasoning,
            skip_special=request.skip_special_tokens and not parsed,
            show_reasoning=not hidden,
            most_calls=0 if not asked else 1 if request.parallel_tool_calls is False else None,
            call_ids=tools.ids if tools else "openai",
            named=bool(demanded),
            forced=demanded is not None,
            stop_ids=ends | ours if ours else ends,
            return_ids=bool(request.return_token_ids) and not hidden,
            echo=chat_echo(request),
            name_by_id=bool(request.return_tokens_as_token_ids),
            withholds=hidden or bool(stop),
        )

    @classmethod
    def of_completion(cls, request: CompletionRequest | None, echo: str = "") -> Options:
        """The options of a completion, which has neither reasoning nor calls."""
        if request is None:
            return cls()
        stop = _stop_strings(request)
        return cls(
            scanner=_scanner(stop=stop, include_stop=request.include_stop_str_in_output) if stop else None,
            skip_special=request.skip_special_tokens,
            stop_ids=_stop_ids(request),
            echo=echo,
            echo_logprobs=bool(request.echo) and request.logprobs is not None,
            echo_only=bool(request.echo) and request.max_tokens == 0,
            return_ids=bool(request.return_token_ids),
            name_by_id=bool(request.return_tokens_as_token_ids),
            withholds=bool(stop),
        )

    @classmethod
    def of_generate(cls, params: SamplingParams, eos: frozenset[int]) -> Options:
        """The options of a generate request that is answered with text."""
        stop = tuple(sorted(set(params.stop)))
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        return cls(
            scanner=_scanner(stop=stop, include_stop=params.include_stop_str_in_output) if stop else None,
            skip_special=params.skip_special_tokens,
            stop_ids=frozenset() if params.include_stop_str_in_output else ends,
            return_ids=True,
            withholds=bool(stop),
        )


def _in_force(reasoning: ReasoningFormat, request: ChatCompletionRequest) -> ReasoningFormat | None:
    """The format, or what is left of it where the request turns thinking off."""
    given = {"reasoning_effort": request.reasoning_effort} | (request.chat_template_kwargs or {})
    told = [given[name] for name in reasoning.switches if given.get(name) is not None]
    thinks = all(value not in OFF for value in told) if told else reasoning.thinks
    return reasoning if thinks else reasoning.off


def _demanded(request: ChatCompletionRequest) -> str | None:
    """The function that must be called; empty where any may be, None where none has to be."""
    match request.tool_choice:
        case ChatCompletionNamedToolChoiceParam() as choice:
            return choice.function.name
        case "required":
            return ""
    return None


def _stop_strings(request: ChatCompletionRequest | CompletionRequest) -> tuple[str, ...]:
    return tuple(sorted(set(request.stop)))


def _stop_ids(request: ChatCompletionRequest | CompletionRequest) -> frozenset[int]:
    return frozenset() if request.include_stop_str_in_output else frozenset(request.stop_token_ids)
