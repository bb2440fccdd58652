"""What real servers said: every recorded body parses and is written out again as it was."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import TypeAdapter

from headrace.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderChatStreamResponse,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderCompletionStreamResponse,
    DerenderStreamState,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    GenerateTokensResponse,
    GenerateTokensStreamResponse,
    wire,
)
from tests.shared import golden_folder

GOLDEN = golden_folder()
EXCHANGES = sorted((GOLDEN / "exchange").glob("*.json"))
VECTORS = sorted((GOLDEN / "vectors").glob("*.jsonl.gz"))
CASES_PER_FILE = 20

# path -> what is sent, what comes back, what comes back as a stream
ENDPOINTS: dict[str, tuple[Any, Any, Any]] = {
    "/v1/chat/completions/render": (ChatCompletionRequest, GenerateRequest, None),
    "/v1/completions/render": (CompletionRequest, list[GenerateRequest], None),
    "/inference/v1/generate": (GenerateRequest, GenerateResponse, GenerateStreamResponse),
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletionResponse, ChatCompletionStreamResponse),
    "/v1/chat/completions/derender": (DerenderChatRequest, ChatCompletionResponse, None),
    "/v1/completions/derender": (DerenderCompletionRequest, CompletionResponse, None),
}
CHUNKWISE = {
    "chat.completion.chunk": (DerenderChatStreamRequest, DerenderChatStreamResponse),
    "text_completion": (DerenderCompletionStreamRequest, DerenderCompletionStreamResponse),
}


def _same(kind: Any, body: object) -> None:
    """The body, sent as JSON, is dumped as the same JSON: the same keys in the same order, the same values."""
    adapter = TypeAdapter(kind)
    text = json.dumps(body)
    assert json.loads(adapter.dump_json(adapter.validate_json(text), exclude_unset=True)) == body


def _same_to_the_letter(kind: Any, text: str, *, exclude_unset: bool = False) -> None:
    adapter = TypeAdapter(kind)
    compact = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    assert adapter.dump_json(adapter.validate_json(text), exclude_unset=exclude_unset).decode() == compact


def _exchange(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", EXCHANGES, ids=lambda path: path.stem)
def test_a_recorded_exchange_is_read_and_written_to_the_letter(path: Path) -> None:
    exchange = _exchange(path)
    if isinstance(exchange, list):
        for step in exchange:
            asked, answered = CHUNKWISE[step["response"]["chunk"]["object"]]
            _same(asked, step["request"])
            _same_to_the_letter(answered, json.dumps(step["response"]))
        return
    asked, answered, streamed = ENDPOINTS[exchange["path"]]
    if exchange["status"] != 200:
        _same_to_the_letter(ErrorResponse, exchange["raw_body"])
        return
    _same(asked, exchange["request"])
    if "body" in exchange:
        _same_to_the_letter(answered, exchange["raw_body"])
        return
    events = [line[6:] for line in exchange["raw_body"].splitlines() if line.startswith("data: {")]
    assert events
    for event in events:
        # This server leaves unset fields out of its usage chunk and of chat chunks.
        _same_to_the_letter(streamed, event, exclude_unset=True)


def _cases(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") as lines:
        yield from (json.loads(line) for line in islice(lines, CASES_PER_FILE))


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_recorded_vectors_are_read_and_written_as_they_were(path: Path) -> None:
    cases = 0
    for case in _cases(path):
        cases += 1
        chat = case["endpoint"] == "chat"
        if case["request"] is not None:
            _same(ChatCompletionRequest if chat else CompletionRequest, case["request"])
        for stream in case["streams"]:
            for event in stream["events"]:
                _same(GenerateTokensStreamResponse, event["chunk"])
                _response(event["response"], chat)
                if event.get("state") is not None:
                    _same_to_the_letter(DerenderStreamState, json.dumps(event["state"]))
        nonstream = case["nonstream"]
        _same(GenerateTokensResponse, nonstream["generate_response"])
        if "response" in nonstream and "error" not in nonstream["response"]:
            whole = ChatCompletionResponse if chat else CompletionResponse
            _same_to_the_letter(whole, json.dumps(nonstream["response"]))
    assert cases


def _response(response: dict[str, Any], chat: bool) -> None:
    if "error" in response:
        _same(ErrorResponse, response)
        return
    model = ChatCompletionStreamResponse if chat else CompletionStreamResponse
    _same_to_the_letter(model, json.dumps(response["chunk"]))
    struct = wire.ChatChunk if chat else wire.CompletionChunk
    chunk = msgspec.json.decode(json.dumps(response["chunk"]), type=struct)
    assert model.model_validate_json(msgspec.json.encode(chunk)) == model.model_validate(response["chunk"])
