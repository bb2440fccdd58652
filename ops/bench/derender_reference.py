"""CPU per chunk of the reference's streaming derender, to set beside derender.py's `stateless`.

    PYTHON -m ops.bench.derender_reference TOKENIZER [--tokens 128 512 2048 4096]

PYTHON is one in which the reference (vLLM 0.32.0, its CPU build) is installed; the project is not needed there. It
replays the output so far at each chunk, so one call at a length is measured with a state built for it: milliseconds of
CPU time, the best of three, JSON in and JSON out. Cost grows with the length: a whole stream of n one-token chunks
costs n times what a call at n/2 does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.scale_out.derender.serving import ServingDerender
from vllm.entrypoints.scale_out.token_in_token_out.protocol import DerenderChatStreamRequest
from vllm.renderers.online_derenderer import OnlineDerenderer

from ops.bench.derender_text import CHAT, PATHS, PROMPT_IDS, TEXT, output

RUNS = 3


def served(tokenizer: Any, tools: str | None, reasoning: str | None) -> ServingDerender:
    """The reference's derender endpoints, without a server."""
    config = SimpleNamespace(
        hf_config=SimpleNamespace(model_type="qwen3"), model="bench", max_model_len=40960, max_logprobs=20
    )
    renderer = SimpleNamespace(tokenizer=tokenizer, get_tokenizer=lambda: tokenizer, _executor=ThreadPoolExecutor(1))
    derenderer = OnlineDerenderer(
        config,
        renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=tools is not None,
        tool_parser=tools,
        reasoning_parser=reasoning,
    )
    models = SimpleNamespace(
        model_config=config, is_base_model=lambda _: True, lora_requests={}, model_name=lambda: "bench"
    )
    return ServingDerender(models, derenderer)


def call(serving: ServingDerender, body: str) -> tuple[float, dict[str, Any]]:
    """CPU milliseconds of one chunk, and the state that it gives."""
    start = time.process_time()
    done = asyncio.run(serving.derender_chat_stream_response(DerenderChatStreamRequest.model_validate_json(body)))
    chunk, state = done
    chunk.model_dump_json()
    state_json = state.model_dump_json()
    return (time.process_time() - start) * 1e3, json.loads(state_json)


def state_at(plain: bool, state: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """A state behind these ids: a plain one does not grow, the other holds them all."""
    return state if plain else state | {"output_token_ids": ids, "output_chunk_lens": [1] * len(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER", help="folder of a tokenizer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048, 4096])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    prompt = output(encode, "", TEXT, PROMPT_IDS)
    rest = json.dumps({"stream": True, "chat_request": CHAT, "prompt_token_ids": prompt, "prompt_tokens": len(prompt)})
    print("| path | at token | CPU ms a call | state bytes |")
    print("|---|---|---|---|")
    for name, ((tools, reasoning), start, text) in PATHS.items():
        serving = served(tokenizer, tools, reasoning)
        for count in options.tokens:
            ids = output(encode, start, text, count + 1)

            def body(token_id: int, state: dict[str, Any] | None) -> str:
                chunk = {"request_id": "bench", "choices": [{"index": 0, "token_ids": [token_id]}]}
                return f'{rest[:-1]}, "generate_chunk": {json.dumps(chunk)}, "stream_state": {json.dumps(state)}}}'

            _, state = call(serving, body(ids[0], None))
            sent = state_at(tools is None, state, ids[:count])
            best = min(call(serving, body(ids[count], sent))[0] for _ in range(RUNS))
            print(f"| {name} | {count} | {best:.2f} | {len(json.dumps(sent))} |", flush=True)


if __name__ == "__main__":
    main()
