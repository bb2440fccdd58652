"""What an output is from its first token: the prompt may have begun the reasoning, or closed it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.workers.derender.detokenize import Detokenizer
from headrace.workers.derender.formats import Phase, ReasoningFormat, ScanState, ToolFormat
from headrace.workers.derender.formats.harmony_header import ENDS, MAX_HEADER, MESSAGE, START
from headrace.workers.derender.formats.scanner import in_harmony
from headrace.workers.derender.vocabulary import Vocabulary


class Opening:
    """Reads one format's prompts. The last marker of the turn that the model goes on with decides.

    Where all markers are tokens, only ids are looked at; else the prompt's text is.
    """

    def __init__(self, vocabulary: Vocabulary, detokenizer: Detokenizer, reasoning: ReasoningFormat) -> None:
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        self._begins: Phase = reasoning.begins
        self._prose = reasoning.prose
        phases: dict[str, Phase] = dict.fromkeys(reasoning.turns, reasoning.begins)
        phases |= dict.fromkeys((*reasoning.ends, *reasoning.opens), "content")
        phases |= dict.fromkeys(reasoning.starts, "reasoning")
        ids = {marker: vocabulary.find(marker) for marker in phases}
        self._texts = phases
        self._ids = {token: phases[marker] for marker, token in ids.items() if token is not None}
        self._all_tokens = all(ids[marker] is not None for marker in (*reasoning.starts, *reasoning.ends))

    def first(self, in_force: ReasoningFormat | None, prompt: Sequence[int] | None) -> ScanState:
        """Where the scan of an output begins, after the whole prompt. `in_force`: what the request left on."""
        if in_force is None:
            return ScanState()
        if in_force is not self._reasoning:  # thinking is off
            return ScanState(phase=in_force.begins)
        return ScanState(phase=self.phase(prompt), held=in_force.lead)

    def phase(self, prompt: Sequence[int] | None) -> Phase:
        """The phase that the output begins in, after the whole prompt."""
        if not prompt or self._prose:
            return self._begins
        if self._all_tokens:
            return next((self._ids[token] for token in reversed(prompt) if token in self._ids), self._begins)
        text = self._detokenizer.text(prompt)
        last = max(self._texts, key=text.rfind, default=None)
        return self._begins if last is None or last not in text else self._texts[last]


class HarmonyOpening:
    """Reads Harmony's prompts: they may end within the header of the message that the model goes on with."""

    def __init__(self, vocabulary: Vocabulary, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._start = vocabulary.find(START)

    def first(self, in_force: ReasoningFormat | None, prompt: Sequence[int] | None) -> ScanState:
        """See Opening."""
        return ScanState(phase="header", held=self._header(prompt or ()))

    def _header(self, prompt: Sequence[int]) -> str:
        """The header of the prompt's last message, up to its text, unless that message is closed."""
        last = next((at for at in reversed(range(len(prompt))) if prompt[at] == self._start), 0)
        text = self._detokenizer.text(prompt[last:])
        if START not in text or any(end in text[text.rfind(START) :] for end in ENDS):
            return ""
        header, message, _ = text[text.rfind(START) :].partition(MESSAGE)
        return header + message if len(header + message) <= MAX_HEADER else ""


def opening(
    vocabulary: Vocabulary, detokenizer: Detokenizer, reasoning: ReasoningFormat | None, tools: ToolFormat | None
) -> Opening | HarmonyOpening | None:
    """Who reads the prompts of these formats; None where an output is content from its start in any case."""
    if in_harmony(reasoning, tools):
        return HarmonyOpening(vocabulary, detokenizer)
    return None if reasoning is None else Opening(vocabulary, detokenizer, reasoning)
