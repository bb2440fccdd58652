"""What requests ask for, and what must come of them: worked out by the engine and the derenderer alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Raw
from tokenizers import Tokenizer

from headrace.client.door import Request, job_of
from headrace.protocol import GenerateRequest, jobs
from headrace.protocol.jobs import Delivery, GenerateJob, RenderJob
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.telling import telling_of
from headrace.workers.generate.engine import Admission
from headrace.workers.generate.engines.null import NullEngine, NullSettings, settings_of
from headrace.workers.models import ModelSpec
from headrace.workers.outcome import End
from headrace.workers.render.renderer import Renderer

CLIENT: Final = "tester"
SPEC: Final = ModelSpec.of("demo", engine="null", max_rows=4)
RATE: Final = 20.0
"""Tokens that a row makes in a second."""

_CALLS: Final = (
    "<think>\nThe weather first.\n</think>\n\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
)
_WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@dataclass(frozen=True, slots=True)
class Wish:
    """A request without its seed."""

    endpoint: str
    body: str
    delivery: Delivery = "stream"

    def seeded(self, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.body)
        body.get("sampling_params", body)["seed"] = seed
        return body


def _wish(endpoint: str, delivery: Delivery = "stream", **body: object) -> Wish:
    return Wish(endpoint, json.dumps(body), delivery)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


WISHES: Final = (
    _wish("/v1/chat/completions", messages=_user("Weather?"), tools=[_WEATHER], max_tokens=60, temperature=1),
    _wish("/v1/chat/completions", messages=_user("Hello"), max_tokens=9, temperature=1),
    _wish("/v1/completions", prompt="Once", n=2, max_tokens=12, temperature=1),
    _wish("/v1/chat/completions", "final", messages=_user("Hello"), max_tokens=20, temperature=1),
    _wish("/inference/v1/generate", "tokens", token_ids=[5, 6], sampling_params={"max_tokens": 15, "temperature": 1}),
    _wish("/inference/v1/generate", token_ids=[7, 8], output_mode="text", sampling_params={"max_tokens": 8}),
)


@cache
def renderer() -> Renderer:
    return Renderer.load(SPEC)


@cache
def derenderer() -> Derenderer:
    return Derenderer.load(
        SPEC.path,
        tool_parser=SPEC.tool_parser,
        reasoning_parser=SPEC.reasoning_parser,
        max_model_len=SPEC.model_len(),
    )


@cache
def engine_settings(calls_tools: bool) -> NullSettings:
    """The engine of all workers: every row calls a tool, or makes what its seed says."""
    settings = settings_of(SPEC)
    if not calls_tools:
        return settings
    tokenizer = Tokenizer.from_file(str(SPEC.path / "tokenizer.json"))
    return replace(settings, script=tuple(tokenizer.encode(_CALLS, add_special_tokens=False).ids))


@dataclass(frozen=True, slots=True)
class Answer:
    """The chunks of each choice, in order, and the response, without the second in which they were made."""

    chunks: dict[int, list[object]]
    response: object


async def answer_to(wish: Wish, request_id: str, seed: int, *, calls_tools: bool) -> Answer:
    """What an undisturbed line answers."""
    fields = {"client": CLIENT, "request_id": request_id, "delivery": wish.delivery, "submitted_at": 0.0}
    asked = Request(wish.endpoint, wish.seeded(seed))
    job = _rendered(job_of(asked, default_model=SPEC.name, max_bytes=1 << 20, **fields))
    engine = NullEngine(engine_settings(calls_tools))
    request = GenerateRequest.model_validate_json(bytes(job.request))
    request.request_id = request_id
    engine.admit(Admission(job.run, request))
    telling = telling_of(derenderer(), job)
    chunks: dict[int, list[object]] = {}
    while True:
        for output in await engine.step():
            for chunk in output.chunks:
                told = telling.chunk(chunk, msgspec.json.encode(chunk))
                if told is not None:
                    chunks.setdefault(chunk.choices[0].index, []).append(timeless(told))
            if output.end is not None:
                return Answer(chunks, timeless(telling.final(End(output.end.usage))))


def _rendered(job: RenderJob | GenerateJob) -> GenerateJob:
    if isinstance(job, GenerateJob):
        return job
    render = renderer().chat if job.endpoint == "/v1/chat/completions" else renderer().completion
    request = render(bytes(job.body))
    request.request_id = job.request_id
    return GenerateJob(**jobs.follow_on(job), request=Raw(request.to_wire()), endpoint=job.endpoint, source=job.body)


def timeless(body: bytes) -> object:
    """A chunk or a response without the second in which it was asked for."""
    said = msgspec.json.decode(body)
    if isinstance(said, dict):
        said.pop("created", None)
    return said


def by_choice(chunks: Sequence[bytes]) -> dict[int, list[object]]:
    """Chunks as they came, sorted by choice."""
    sorted_: dict[int, list[object]] = {}
    for chunk in chunks:
        said: Any = timeless(chunk)
        sorted_.setdefault(said["choices"][0]["index"], []).append(said)
    return sorted_
