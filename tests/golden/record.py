"""Record what the reference answers to the messages of markup.py, as vectors beside this file.

    python -m tests.golden.record TOKENIZER [FILE ...]

Runs under the reference (vLLM 0.32.0, its CPU build), not under the project. TOKENIZER is the folder of qwen3's; the
markers of markup.py are added to it as `tests.golden.extended` says. FILE: only these, by name.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.scale_out.derender.serving import ServingDerender
from vllm.entrypoints.scale_out.token_in_token_out import protocol
from vllm.renderers.online_derenderer import OnlineDerenderer

from tests.golden.extended import extended
from tests.golden.markup import MARKUPS, MESSAGES, TOOLS, Markup, Said

VECTORS = Path(__file__).parent / "vectors"
MAX_MODEL_LEN = 40960
PROMPT = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n<|im_start|>assistant\n"


class Reference:
    """The reference's derender endpoints, without a server."""

    def __init__(self, tokenizer: Any, markup: Markup) -> None:
        renderer = SimpleNamespace(
            tokenizer=tokenizer, get_tokenizer=lambda: tokenizer, _executor=ThreadPoolExecutor(1)
        )
        config = SimpleNamespace(
            hf_config=SimpleNamespace(model_type="qwen3"),
            model="more",
            max_model_len=MAX_MODEL_LEN,
            max_logprobs=20,
        )
        derenderer = OnlineDerenderer(
            config,
            renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=markup.tool_parser is not None,
            tool_parser=markup.tool_parser,
            reasoning_parser=markup.reasoning_parser,
        )
        models = SimpleNamespace(
            model_config=config, is_base_model=lambda _: True, lora_requests={}, model_name=lambda: "more"
        )
        self.serving = ServingDerender(models, derenderer)

    def stream(self, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """One chunk: the response as JSON, and the state."""
        request = protocol.DerenderChatStreamRequest.model_validate({"stream": True, **body})
        done = asyncio.run(self.serving.derender_chat_stream_response(request))
        if isinstance(done, tuple):
            chunk, state = done
            return {"chunk": {**chunk.model_dump(mode="json"), "created": 0}}, state.model_dump(mode="json")
        return done.model_dump(mode="json"), None

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """The one-shot response, or what went wrong."""
        try:
            request = protocol.DerenderChatRequest.model_validate(body)
            done = asyncio.run(self.serving.derender_chat_response(request)).model_dump(mode="json")
        except Exception as error:  # the reference's own failures are recorded too
            return {"exception": f"{type(error).__name__}: {error}"[:200]}
        return {**done, "created": 0} if "choices" in done else done


def sizes(count: int, chunking: str, rng: random.Random) -> Iterator[int]:
    while count > 0:
        size = {"single": 1, "all": count}.get(chunking) or rng.randint(1, 8)
        yield min(size, count)
        count -= size


def case(reference: Reference, tokenizer: Any, markup: Markup, said: Said, number: int) -> dict[str, Any]:
    text = markup.text(said)
    if said.cut == 100:
        text += "<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    request = {
        "model": "more",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "stream": True,
    }
    request |= {"tools": TOOLS, **said.request}
    request = {key: value for key, value in request.items() if value is not None}
    rest = {"chat_request": request, "prompt_token_ids": prompt, "prompt_tokens": len(prompt), "model": "more"}
    run, finish = f"gen-{said.kind}", "stop" if said.cut == 100 else "length"
    rng, streams = random.Random(number), []
    for chunking in ("single", "random", "all"):
        if chunking == "single" and len(ids) > 40:
            continue
        events, state, at = [], None, 0
        for size in sizes(len(ids), chunking, rng):
            choice: dict[str, Any] = {"index": 0, "token_ids": ids[at : at + size]}
            at += size
            if at >= len(ids):
                choice["finish_reason"] = finish
            chunk = {"request_id": run, "output_mode": "tokens", "choices": [choice]}
            response, state = reference.stream({**rest, "generate_chunk": chunk, "stream_state": state})
            events.append({"index": 0, "chunk": chunk, "response": response})
        streams.append({"chunking": chunking, "events": events})
    whole = {
        "request_id": run,
        "output_mode": "tokens",
        "choices": [{"index": 0, "token_ids": ids, "finish_reason": finish}],
    }
    return {
        "id": f"{markup.name}-{said.kind}",
        "kind": said.kind,
        "variant": 0,
        "endpoint": "chat",
        "tokenizer": "qwen3_more",
        "tool_parser": markup.tool_parser,
        "reasoning_parser": markup.reasoning_parser,
        "texts": [text],
        "token_ids": [ids],
        "request": request,
        "prompt_token_ids": prompt,
        "prompt_tokens": len(prompt),
        "finish_reason": finish,
        "streams": streams,
        "nonstream": {"generate_response": whole, "response": reference.whole({**rest, "generate_response": whole})},
    }


def main(tokenizer_folder: str, *only: str) -> None:
    VECTORS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(extended(Path(tokenizer_folder), Path(folder)))
        for markup in MARKUPS:
            if only and markup.name not in only:
                continue
            reference = Reference(tokenizer, markup)
            lines = [
                json.dumps(case(reference, tokenizer, markup, said, number), ensure_ascii=False)
                for number, said in enumerate(MESSAGES)
                if markup.text(said)
                and (not said.calls or markup.tool_parser)
                and (not said.reasoning or markup.reasoning_parser)
            ]
            data = gzip.compress("\n".join(lines).encode(), mtime=0)
            (VECTORS / f"{markup.name}.jsonl.gz").write_bytes(data)
            sys.stdout.write(f"{markup.name} {len(lines)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
