"""The recorded vectors as cases, and how a case is put to our derenderer."""

from __future__ import annotations

import atexit
import gzip
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.protocol import (
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderChatStreamResponse,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderCompletionStreamResponse,
    DerenderStreamState,
)
from headrace.workers.derender import Derenderer
from tests.golden.extended import extended
from tests.shared import golden_folder, tokenizer_folder

MAX_MODEL_LEN = 40960


class Event(msgspec.Struct):
    """One chunk as it was sent, what the reference answered, and the state that it gave."""

    index: int | None
    chunk: dict[str, Any]
    response: dict[str, Any]
    state: dict[str, Any] | None = None


class Stream(msgspec.Struct):
    chunking: str
    events: list[Event]


class Case(msgspec.Struct):
    """One recorded case; see the vectors' README for the fields."""

    id: str
    kind: str
    variant: int | str
    endpoint: Literal["chat", "completion"]
    tokenizer: str
    tool_parser: str | None
    reasoning_parser: str | None
    texts: list[str]
    token_ids: list[list[int]]
    request: dict[str, Any] | None
    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    finish_reason: str
    streams: list[Stream]
    nonstream: dict[str, Any]

    def rest(self) -> dict[str, Any]:
        """The fields of every derender request of this case, besides the tokens."""
        name = "chat_request" if self.endpoint == "chat" else "completion_request"
        return {
            "model": self.tokenizer,
            name: self.request,
            "prompt_tokens": self.prompt_tokens,
            "prompt_token_ids": self.prompt_token_ids,
        }


_decoder = msgspec.json.Decoder(Case)


@cache
def tokenizer(name: str) -> Path:
    """The folder of a shared tokenizer, or of the one with more markers that our own vectors were recorded with."""
    if name != "qwen3_more":
        return tokenizer_folder(name)
    folder = tempfile.TemporaryDirectory(prefix="headrace-tokenizer-")
    atexit.register(folder.cleanup)
    return extended(tokenizer_folder("qwen3"), Path(folder.name))


def cases(name: str) -> Iterator[Case]:
    """The cases of one file of vectors."""
    here = Path(__file__).parent if name.startswith("qwen3_more") else golden_folder()
    with gzip.open(here / "vectors" / f"{name}.jsonl.gz", "rb") as lines:
        yield from map(_decoder.decode, lines)


def load(name: str) -> Derenderer:
    """The derenderer that a file of vectors, named `<tokenizer>__<reasoning>+<tools>`, was recorded with."""
    folder, parsers = name.split("__")
    reasoning, _, tools = parsers.partition("+")
    return Derenderer.load(
        tokenizer(folder),
        tool_parser=None if tools in ("", "none") else tools,
        reasoning_parser=None if reasoning == "none" else reasoning,
        max_model_len=MAX_MODEL_LEN,
    )


def step(
    derenderer: Derenderer, case: Case, chunk: dict[str, Any], state: DerenderStreamState | None
) -> DerenderChatStreamResponse | DerenderCompletionStreamResponse:
    """One chunk through the stateless door."""
    body = {"stream": True, "generate_chunk": chunk, "stream_state": state, **case.rest()}
    if case.endpoint == "chat":
        return derenderer.chat_stream(DerenderChatStreamRequest.model_validate(body))
    return derenderer.completion_stream(DerenderCompletionStreamRequest.model_validate(body))


def whole(derenderer: Derenderer, case: Case) -> dict[str, Any]:
    """The one-shot answer, as JSON."""
    response, rest = case.nonstream["generate_response"], case.rest()
    if case.endpoint == "chat":
        request = DerenderChatRequest.model_validate({"generate_response": response, **rest})
        return derenderer.chat(request, created=0).model_dump(mode="json")
    for name in ("prompt_tokens", "prompt_token_ids"):
        rest[name] = None if rest[name] is None else [rest[name]]
    completion = DerenderCompletionRequest.model_validate({"generate_responses": [response], **rest})
    return derenderer.completion(completion, created=0).model_dump(mode="json")
