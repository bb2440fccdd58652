"""What the chaos driver asks for, and what may come of each request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.chaos.schedules.answers import Answer, Wish, answer_to

By = Literal["sdk", "plain"]
Twist = Literal["", "cancelled", "late", "twice", "broken", "unserved", "rejected", "never sent"]
"""What else befalls a request: unserved ones wait where nobody takes them until the broker gives them up, rejected ones
are thrown out of there."""

MODEL: Final = "demo"
NOBODY: Final = "nobody"
"""A model without workers."""
SUBMITTED_AT: Final = 1_700_000_000.0
"""When plain producers say that they have sent their requests."""

ANSWERED: Final = frozenset({"answered"})
PERHAPS: Final = frozenset({"answered", "cancelled"})


@dataclass(frozen=True, slots=True)
class Kind:
    """So many requests of a kind, with the outcomes that each may have: ``answered``, or an error's code."""

    name: str
    count: int
    by: By
    wish: Wish
    twist: Twist = ""
    outcomes: frozenset[str] = ANSWERED


def _wish(endpoint: str, delivery: Literal["stream", "final", "tokens"] = "stream", **body: object) -> Wish:
    return Wish(endpoint, json.dumps(body), delivery)


def _chat(delivery: Literal["stream", "final", "tokens"] = "stream", **body: object) -> Wish:
    messages = [{"role": "user", "content": "What is the weather?"}]
    return _wish("/v1/chat/completions", delivery, messages=messages, temperature=1, **body)


def _tokens(delivery: Literal["stream", "final", "tokens"], count: int) -> Wish:
    parameters = {"max_tokens": count, "temperature": 1, "ignore_eos": True}
    return _wish("/inference/v1/generate", delivery, token_ids=[5, 6, 7], sampling_params=parameters)


_WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
_TWO: Final = _wish("/v1/completions", prompt="Once upon", n=2, max_tokens=24, temperature=1)

KINDS: Final = (
    Kind("tools", 6, "sdk", _chat(tools=[_WEATHER], max_tokens=60)),
    Kind("chat", 6, "sdk", _chat(max_tokens=12)),
    Kind("two", 4, "sdk", _TWO),
    Kind("final", 6, "sdk", _chat("final", max_tokens=30)),
    Kind("tokens", 4, "sdk", _tokens("tokens", 20)),
    Kind("long", 4, "sdk", _chat(max_tokens=600, ignore_eos=True)),
    Kind("cancelled", 3, "sdk", _chat(max_tokens=2000, ignore_eos=True), "cancelled", PERHAPS),
    Kind("late", 2, "sdk", _chat(max_tokens=10), "late", frozenset({"expired"})),
    Kind("plain-chat", 5, "plain", _chat(max_tokens=40)),
    Kind("plain-final", 3, "plain", _chat("final", max_tokens=25)),
    Kind("plain-tokens", 3, "plain", _tokens("tokens", 30)),
    Kind("twice", 3, "plain", _chat(max_tokens=30), "twice"),
    Kind("broken", 2, "plain", _chat(), "broken", frozenset({"bad_request"})),
    Kind("unserved", 4, "plain", _chat(), "unserved", frozenset({"expired"})),
    Kind("rejected", 4, "plain", _chat(), "rejected", frozenset({"exhausted"})),
    Kind("never-sent", 4, "plain", _chat(), "never sent", frozenset({"cancelled"})),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, the same in every round but for its client's name."""

    request_id: str
    seed: int
    kind: Kind

    @property
    def body(self) -> dict[str, Any]:
        return self.kind.wish.seeded(self.seed)

    @property
    def of_tokens(self) -> bool:
        return self.kind.wish.endpoint == "/inference/v1/generate"

    def envelope(self, client: str, *, deadline: float) -> bytes:
        """The job as a producer without our library writes it; ``deadline`` in Unix seconds."""
        wish = self.kind.wish
        job = {
            "type": "generate" if self.of_tokens else "render",
            "client": client,
            "request_id": self.request_id,
            "model": NOBODY if self.kind.twist in ("unserved", "rejected") else MODEL,
            "endpoint": wish.endpoint,
            "request" if self.of_tokens else "body": self.body,
            "delivery": wish.delivery,
            "submitted_at": SUBMITTED_AT,
            "deadline": deadline,
        }
        if self.kind.twist == "broken":
            del job["model"]
        return json.dumps(job).encode()

    async def answer(self) -> Answer:
        """What an undisturbed line answers."""
        known = _answers.get(self.request_id)
        if known is None:
            known = await answer_to(self.kind.wish, self.request_id, self.seed, calls_tools=False)
            _answers[self.request_id] = known
        return known


_answers: dict[str, Answer] = {}


def _asks() -> Iterator[Ask]:
    seed = 0
    for kind in KINDS:
        for number in range(kind.count):
            seed += 1
            yield Ask(f"{kind.name}-{number}", seed, kind)


ASKS: Final = tuple(_asks())
BURIED: Final = frozenset(ask.request_id for ask in ASKS if ask.kind.twist in ("broken", "rejected"))
"""What must lie in ``dead`` afterwards."""
