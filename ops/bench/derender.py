"""CPU per chunk of derendering, and whether it stays flat as the output grows.

    python ops/bench/derender.py TOKENIZER [--tokens 128 512 2048 8192 32768]

One-token chunks with a prompt of 397 ids. `live` is a worker's session: a step per chunk, its response as JSON.
`stateless` is the derender endpoint: each chunk's whole request as JSON in (the state and the prompt with it), the
response and the new state as JSON out. Microseconds of CPU time per chunk, the best of three runs; `last` is the
mean of the last tenth; `state` is the size of the state that the last chunk leaves, in bytes of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from headrace.protocol import ChatCompletionRequest, DerenderChatStreamRequest, wire
from headrace.workers.derender import Derenderer, Session

PROMPT_IDS = 397
RUNS = 3
TEXT = "The quick brown fox jumps over the lazy dog, 你好，世界！ then 🧑🏿‍🚀 rests (and x < 2). "  # fits a JSON string
CALL = '<tool_call>\n{"name": "write_file", "arguments": {"path": "notes.md", "content": "'
CHAT = {
    "model": "bench",
    "messages": [{"role": "user", "content": "Write the notes."}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool",
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
            },
        }
        for name in ("write_file", "read_file", "search", "ping")
    ],
    "stream": True,
}
# The paths of the comparison: what is configured, and what the model writes until the tokens are used up.
PATHS = {
    "plain": ((None, None), "", TEXT),
    "qwen3+hermes, long content": (("hermes", "qwen3"), f"<think>\n{TEXT}\n</think>\n\n", TEXT),
    "qwen3+hermes, long argument": (("hermes", "qwen3"), f"<think>\n{TEXT}\n</think>\n\n{CALL}", TEXT),
}

Step = Callable[[int], int]
"""Derender one token and give the size of what it leaves: the response's for `live`, the state's for `stateless`."""


def live(derenderer: Derenderer, prompt: list[int]) -> Step:
    session = Session(
        derenderer,
        ChatCompletionRequest.model_validate(CHAT),
        run="bench",
        id="bench",
        created=0,
        model="bench",
        prompt_token_ids=prompt,
    )
    encode = msgspec.json.Encoder().encode

    def step(token_id: int) -> int:
        chunk = wire.TokenChunk(request_id="bench", choices=[wire.TokenChoice(index=0, token_ids=[token_id])])
        return len(encode(session.step(chunk)))

    return step


def stateless(derenderer: Derenderer, prompt: list[int]) -> Step:
    rest = json.dumps({"stream": True, "chat_request": CHAT, "prompt_token_ids": prompt, "prompt_tokens": len(prompt)})
    state = "null"

    def step(token_id: int) -> int:
        nonlocal state
        chunk = f'{{"request_id": "bench", "choices": [{{"index": 0, "token_ids": [{token_id}]}}]}}'
        body = f'{rest[:-1]}, "generate_chunk": {chunk}, "stream_state": {state}}}'
        done = derenderer.chat_stream(DerenderChatStreamRequest.model_validate_json(body))
        done.chunk.model_dump_json()
        state = done.stream_state.model_dump_json()
        return len(state)

    return step


def measure(make: Callable[[], Step], ids: list[int]) -> tuple[float, float, int]:
    """Microseconds per chunk over all, over the last tenth, and what the last step gave; the best of the runs."""
    best = (float("inf"), float("inf"), 0)
    tail = max(len(ids) // 10, 1)
    for _ in range(RUNS):
        step, size = make(), 0
        start = time.process_time()
        for token_id in ids[:-tail]:
            step(token_id)
        middle = time.process_time()
        for token_id in ids[-tail:]:
            size = step(token_id)
        end = time.process_time()
        best = min(best, ((end - start) / len(ids) * 1e6, (end - middle) / tail * 1e6, size))
    return best


def output(tokenizer: Tokenizer, start: str, text: str, count: int) -> list[int]:
    def endless() -> Iterator[int]:
        yield from tokenizer.encode(start, add_special_tokens=False).ids
        yield from cycle(tokenizer.encode(text, add_special_tokens=False).ids)

    return list(islice(endless(), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="folder of a tokenizer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048, 8192])
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    prompt = output(tokenizer, "", TEXT, PROMPT_IDS)
    print("| path | tokens | live µs | last | stateless µs | last | state bytes |")
    print("|---|---|---|---|---|---|---|")
    for name, ((tools, reasoning), start, text) in PATHS.items():
        derenderer = Derenderer.load(options.tokenizer, tool_parser=tools, reasoning_parser=reasoning)
        for count in options.tokens:
            ids = output(tokenizer, start, text, count)
            each, last, _ = measure(partial(live, derenderer, prompt), ids)
            through, through_last, state = measure(partial(stateless, derenderer, prompt), ids)
            print(f"| {name} | {count} | {each:.1f} | {last:.1f} | {through:.0f} | {through_last:.0f} | {state} |")


if __name__ == "__main__":
    main()
