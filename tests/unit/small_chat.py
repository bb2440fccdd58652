"""A chat with a small tokenizer and one tool: as a live session, and chunk by chunk through the stateless door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.protocol import ChatCompletionRequest, DerenderChatStreamRequest, DerenderChatStreamResponse, wire
from headrace.workers.derender import Derenderer, Session
from tests.unit.derender_tokenizer import byte_level

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
PROMPT = [1, 2, 3]


def session(folder: Path, parser: str, **request: Any) -> tuple[Session, Tokenizer]:
    """A chat with the tool `f`, of a small model with this format."""
    tokenizer = byte_level(folder)
    chat = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        **request,
    }
    live = Session(
        Derenderer.load(folder, tool_parser=parser),
        ChatCompletionRequest.model_validate(chat),
        run="run",
        id="id",
        created=0,
        model="model",
        prompt_token_ids=[1],
    )
    return live, tokenizer


def chunk(token_ids: list[int], finish_reason: str | None) -> wire.TokenChoice:
    return wire.TokenChoice(index=0, token_ids=token_ids, finish_reason=finish_reason)


def tokens(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chunk, or a whole answer, of the generate endpoint."""
    return {"request_id": "r", "choices": list(choices), **more}


def chat_step(derenderer: Derenderer, chunk: dict[str, Any], **more: Any) -> DerenderChatStreamResponse:
    """One chunk through the door."""
    body = {"stream": True, "generate_chunk": chunk, "chat_request": CHAT, "prompt_token_ids": PROMPT, **more}
    return derenderer.chat_stream(DerenderChatStreamRequest.model_validate(body))
