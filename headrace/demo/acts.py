"""The requests of the demo, and what has come back for each so far."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Raw

from headrace.batch.lines import Line, Refused, read_line
from headrace.batch.tally import output_tokens
from headrace.client import Headrace
from headrace.client.door import Response
from headrace.client.stream import Chunk, Stream
from headrace.protocol.errors import HeadraceError

LONGEST_S: Final = 300.0
"""Seconds after which a request is given up."""

State = Literal["waiting", "running", "answered", "failed"]


class DemoError(Exception):
    """The request file cannot be played: names the line and what is wrong."""


@dataclass(slots=True)
class Call:
    """A tool call as it arrives."""

    name: str = ""
    arguments: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclass(slots=True)
class Act:
    """One request: what it asks, and of its first choice what it says. Times are seconds of one monotonic clock."""

    line: Line
    asked: str
    state: State = "waiting"
    reasoning: str = ""
    text: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    tokens: int = 0
    error: str = ""
    sent_at: float = 0.0
    first_at: float | None = None
    ended_at: float | None = None

    @property
    def name(self) -> str:
        return self.line.custom_id

    async def play(self, hr: Headrace) -> None:
        """Sends the request and follows its stream to the end."""
        self.sent_at = time.monotonic()
        try:
            stream = await hr.submit(self.line.url, self.line.body, deadline=LONGEST_S)
            async for chunk in stream:
                self._take(chunk)
            await self._close(stream)
        except HeadraceError as error:
            self.state, self.error = "failed", error.message
        self.ended_at = time.monotonic()

    def _take(self, chunk: Chunk) -> None:
        self.state = "running"
        self.first_at = self.first_at or time.monotonic()
        self.tokens += 1
        if chunk.index != 0:
            return
        self.reasoning += chunk.reasoning
        self.text += chunk.text
        for piece in chunk.tool_calls:
            call = self.calls.setdefault(piece.index, Call())
            if piece.function is not None:
                call.name += piece.function.name or ""
                call.arguments += piece.function.arguments or ""
        if self.line.url == "/inference/v1/generate":
            self.text += "".join(f"{token} " for token in chunk.token_ids)

    async def _close(self, stream: Stream[Response]) -> None:
        final = await stream.outcome()
        self.tokens = output_tokens(final.response)
        self.state = "answered"


def read_acts(file: Path, model: str) -> list[Act]:
    """The requests of a file of batch lines; those for another model are asked of ``model``. Raises DemoError."""
    acts = []
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = read_line(text, number)
            body = msgspec.json.decode(line.body, type=dict[str, object])
        except Refused as refused:
            raise DemoError(f"{file}: line {number}: {refused.refusal.message}") from None
        except msgspec.DecodeError as error:
            raise DemoError(f"{file}: line {number}: body: {error}.") from None
        # The demo serves one model, whatever the line names.
        own = dataclasses.replace(line, body=Raw(msgspec.json.encode(body | {"model": model})))
        acts.append(Act(own, _asked(line.url, body)))
    if not acts:
        raise DemoError(f"{file}: there is no request in it.")
    return acts


def _asked(url: str, body: dict[str, object]) -> str:
    """What the request asks, for people."""
    match body:
        case {"messages": [*messages]}:
            asked = [said.get("content") for said in messages if isinstance(said, dict) and said.get("role") == "user"]
            return str(asked[-1]) if asked else url
        case {"prompt": str(prompt)}:
            return prompt
        case {"token_ids": [*ids]}:
            return f"{len(ids)} token ids"
    return url


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and rates of a demo that has ended."""

    requests: int
    answered: int
    reasoned: int
    calls: int
    tokens: int
    seconds: float
    first_ms: float | None
    """Milliseconds from submit to the first chunk, median."""

    @classmethod
    def of(cls, acts: Sequence[Act], seconds: float) -> Summary:
        firsts = sorted(act.first_at - act.sent_at for act in acts if act.first_at is not None)
        return cls(
            requests=len(acts),
            answered=sum(act.state == "answered" for act in acts),
            reasoned=sum(bool(act.reasoning) for act in acts),
            calls=sum(len(act.calls) for act in acts),
            tokens=sum(act.tokens for act in acts),
            seconds=seconds,
            first_ms=firsts[len(firsts) // 2] * 1000 if firsts else None,
        )

    def lines(self) -> list[str]:
        """For people."""
        first = "no chunk" if self.first_ms is None else f"first chunk after {self.first_ms:,.0f} ms (median)"
        return [
            f"{self.answered} of {self.requests} requests answered in {self.seconds:.1f} s: "
            f"{self.reasoned} with reasoning, {self.calls} tool calls",
            f"{self.tokens:,} output tokens, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s, "
            f"{self.answered / max(self.seconds, 1e-9):.1f} requests/s; {first}",
        ]
