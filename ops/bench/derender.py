"""CPU per chunk of derendering, and whether it stays flat as the output grows; memory of a loaded tokenizer.

    python -m ops.bench.derender TOKENIZER [--tokens 128 512 2048 8192 32768]
    python -m ops.bench.derender TOKENIZER ... --memory

One-token chunks with a prompt of 397 ids. `live` is a worker's session: a step per chunk, its response as JSON.
`stateless` is the derender endpoint: each chunk's whole request as JSON in (the state and the prompt with it), the
response and the new state as JSON out. Microseconds of CPU time per chunk, the best of three runs; `last` is the
mean of the last tenth; `state` is the size of the state that the last chunk leaves, in bytes of JSON.

derender_reference.py measures the same paths of the reference implementation, where that is installed.

Memory is measured in a process of its own for each tokenizer: what is resident before and after loading, the most
that was resident while loading, and the CPU time of loading.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec

from headrace.protocol import ChatCompletionRequest, DerenderChatStreamRequest, wire
from headrace.workers.derender import Derenderer, Session
from ops.bench.derender_text import CHAT, PATHS, PROMPT_IDS, TEXT, output

RUNS = 3

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


def memory(folder: Path) -> tuple[float, float, float, float]:
    """Resident megabytes before and after loading, the most while loading, and its CPU time in milliseconds."""
    before, start = resident(), time.process_time()
    derenderer = Derenderer.load(folder)
    spent, after = time.process_time() - start, resident()
    assert derenderer.core
    return before, after, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, spent * 1e3


def resident() -> float:
    """Megabytes that are resident in this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def print_memory(folders: list[Path]) -> None:
    print("| tokenizer | before MB | after MB | adds MB | most MB | load CPU ms |")
    print("|---|---|---|---|---|---|")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as fresh:
        for folder, (before, after, most, spent) in zip(folders, fresh.map(memory, folders), strict=True):
            added = after - before
            print(f"| {folder.name} | {before:.1f} | {after:.1f} | {added:.1f} | {most:.1f} | {spent:.0f} |")


def print_speed(folder: Path, counts: list[int]) -> None:
    # Imported here: derendering itself often does without it, which the memory shows.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prompt = output(encode, "", TEXT, PROMPT_IDS)
    print("| path | tokens | live µs | last | stateless µs | last | state bytes |")
    print("|---|---|---|---|---|---|---|")
    for name, ((tools, reasoning), start, text) in PATHS.items():
        derenderer = Derenderer.load(folder, tool_parser=tools, reasoning_parser=reasoning)
        for count in counts:
            ids = output(encode, start, text, count)
            each, last, _ = measure(partial(live, derenderer, prompt), ids)
            through, through_last, state = measure(partial(stateless, derenderer, prompt), ids)
            print(f"| {name} | {count} | {each:.1f} | {last:.1f} | {through:.0f} | {through_last:.0f} | {state} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", type=Path, nargs="+", metavar="TOKENIZER", help="folder of a tokenizer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--memory", action="store_true", help="measure the memory of the loaded tokenizers instead")
    options = parser.parse_args()
    if options.memory:
        print_memory(options.tokenizers)
        return
    for folder in options.tokenizers:
        print_speed(folder, options.tokens)


if __name__ == "__main__":
    main()
