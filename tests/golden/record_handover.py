"""Record how the reference goes on from our states, and the states that it gives us to go on from.

    PYTHONPATH=. python -P -m tests.golden.record_handover SHARED

Runs under the reference (vLLM 0.32.0, its CPU build), with this project on the path. SHARED is the folder of golden
vectors and tokenizers. Each line is one case: cut into chunks, and changing hands behind some of them.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headrace.protocol import DerenderChatStreamRequest
from headrace.workers.derender import Derenderer
from tests.golden.markup import Markup
from tests.golden.record import Reference

FILE = Path(__file__).parent / "vectors" / "handover.jsonl.gz"
FILES = ("qwen3__qwen3+hermes", "qwen3__qwen3+qwen3_coder", "qwen3_ext__kimi_k2+kimi_k2")
KINDS = ("reason-tool", "reason-content-tools", "reasoning-multibyte", "tool-two")
TURNS = 10
"""Changes of hands per case and direction, or a few more."""


def vectors(shared: Path, name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(shared / "golden" / "vectors" / f"{name}.jsonl.gz", "rb") as lines:
        yield from map(json.loads, lines)


def chunks(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The case as token chunks of a few tokens each."""
    rng, ids, at, parts = random.Random(case["id"]), case["token_ids"][0], 0, []
    while at < len(ids):
        size = rng.randint(1, 4)
        parts.append(ids[at : at + size])
        at += size
    finish = [None] * (len(parts) - 1) + [case["finish_reason"]]
    return [
        {"request_id": case["id"], "choices": [{"index": 0, "token_ids": part, "finish_reason": reason}]}
        for part, reason in zip(parts, finish, strict=True)
    ]


def recorded(ours: Derenderer, reference: Reference, case: dict[str, Any]) -> dict[str, Any]:
    rest = {"model": "m", "chat_request": case["request"], "prompt_token_ids": case["prompt_token_ids"]}
    parts = chunks(case)

    def mine(state: Any, chunk: dict[str, Any]) -> Any:
        body = {"stream": True, **rest, "generate_chunk": chunk, "stream_state": state}
        return ours.chat_stream(DerenderChatStreamRequest.model_validate(body)).stream_state.model_dump(mode="json")

    def theirs(state: Any, chunk: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        response, state = reference.stream({**rest, "generate_chunk": chunk, "stream_state": state})
        return response["chunk"]["choices"][0], state

    given: list[Any] = [None]
    taken: list[Any] = [None]
    told = []
    for chunk in parts:
        given.append(mine(given[-1], chunk))
        choice, state = theirs(taken[-1], chunk)
        told.append(choice)
        taken.append(state)
    turns = []
    for at in range(1, len(parts), max(1, len(parts) // TURNS)):
        state, going_on = given[at], []
        for chunk in parts[at:]:
            choice, state = theirs(state, chunk)
            going_on.append(choice)
        ours_at = {name: value for name, value in given[at].items() if name != "scan"}
        turns.append({"at": at, "ours": ours_at, "going_on": going_on, "theirs": taken[at]})
    return {"id": case["id"], "chunks": parts, "told": told, "turns": turns}


def main(folder: str) -> None:
    shared, lines = Path(folder), []
    for name in FILES:
        tokenizer, parsers = name.split("__")
        reasoning, _, tools = parsers.partition("+")
        path = shared / "tokenizers" / tokenizer
        reference = Reference(AutoTokenizer.from_pretrained(path), Markup(reasoning, tools, (), str))
        ours = Derenderer.load(path, tools, reasoning, max_model_len=40960, state_mode="replay")
        for case in vectors(shared, name):
            if case["kind"] in KINDS and case["variant"] == 0:
                line = recorded(ours, reference, case)
                lines.append(json.dumps({"file": name, **line}, ensure_ascii=False))
                sys.stdout.write(f"{case['id']} {len(line['turns'])}\n")
    FILE.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
