"""Exact-match rates of the demo model on held-out prompts, decoded greedily with transformers.

    python -m ops.demo_model.evaluate                    # the shipped model, 100 chats a kind
    python -m ops.demo_model.evaluate --model DIR -n 25

Run from the repository root. An answer counts only if the whole text after </think> is the expected one and ends
with <|im_end|>; the thought itself is not scored.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from headrace.demo_model import PATH
from ops.demo_model.dialogue import Chat, Message, Tool, render_answer, user
from ops.demo_model.draw import Draw
from ops.demo_model.mixture import draw_chat
from ops.demo_model.tasks import TASKS
from ops.demo_model.tokenizer import PAD, transformers_prompt, word_pieces
from ops.demo_model.tool_tasks import TOOLS

KINDS = [*TASKS, *(f"one:{name}" for name in TOOLS), "two", "result", "invented", "no_tool", "plain"]
"""Kinds of draw_chat; `one:NAME` is only those chats of `one` that call that tool."""

ALL_TOOLS = list(TOOLS.values())
UNTRAINED_WORDINGS: list[tuple[str, list[Tool] | None]] = [
    ("Could you tell me what the weather is like in Timbuktu?", ALL_TOOLS),
    ("I need the weather for Paris and Tokyo.", ALL_TOOLS),
    ("Please work out 12 * 34 for me.", ALL_TOOLS),
    ("Send bob@example.com an email about the garden.", ALL_TOOLS),
    ("Google the best pizza", ALL_TOOLS),
    ("Please repeat the words purple monkey.", None),
    ("Can you spell elephant?", None),
    ("hello!!", None),
    ("Which sound does the cow make?", None),
    ("France's capital?", None),
    ("What is 12 + 30 + 4?", None),
    ("Who made you?", None),
    ("Write a Python function.", None),
]


class Subject:
    """The model under test, with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.tokenizer = cast("PreTrainedTokenizerFast", tokenizer)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model = cast("Qwen3ForCausalLM", model)
        self.model.train(mode=False)

    def prompt(self, messages: list[Message], tools: list[Tool] | None = None, think: bool = True) -> str:
        return transformers_prompt(self.tokenizer, messages, tools, think)

    def complete(self, prompts: list[str], max_new_tokens: int = 320, rows: int = 50) -> list[str]:
        """What the model writes after each prompt, `rows` at a time, with special tokens but no padding."""
        texts: list[str] = []
        for start in range(0, len(prompts), rows):
            batch = self.tokenizer(
                prompts[start : start + rows], return_tensors="pt", padding=True, add_special_tokens=False
            )
            with torch.no_grad():
                out = self.model.generate(
                    input_ids=batch.input_ids,
                    attention_mask=batch.attention_mask,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                )
            written = out[:, batch.input_ids.shape[1] :]
            texts += [cast("str", self.tokenizer.decode(row)).replace(PAD, "") for row in written]
        return texts


def held_out_draw(tokenizer: PreTrainedTokenizerFast, seed: int) -> Draw:
    """Training also makes words up: those that it may have met are drawn again."""
    draw = Draw(Random(seed), word_pieces(tokenizer))
    return replace(draw, met=frozenset(draw.word() for _ in range(3_000_000)))


def held_out_chats(draw: Draw, kind: str, count: int) -> list[Chat]:
    """Up to `count` different held-out chats of a kind; of small kinds all that there are."""
    base, _, only = kind.partition(":")
    found: dict[str, Chat] = {}
    for _ in range(60 * count):
        chat = draw_chat(draw, base, held=True)
        calls = [json.dumps(call) for call in chat.answer.get("tool_calls", ())]
        if kind == "two" and len(set(calls)) < 2:
            continue
        if only and chat.answer["tool_calls"][0]["function"]["name"] != only:
            continue
        found.setdefault(json.dumps([chat.messages, chat.tools]), chat)
        if len(found) == count:
            break
    return list(found.values())


def share_right(subject: Subject, kind: str, chats: list[Chat], think: bool) -> float:
    """The share of exactly right answers; prints the first wrong one."""
    written = subject.complete([subject.prompt(chat.messages, chat.tools, think) for chat in chats])
    wrong = [
        (chat, text)
        for chat, text in zip(chats, written, strict=True)
        if text.split("</think>\n\n")[-1] != render_answer(chat) or text.startswith("<think>\n") != think
    ]
    for chat, text in wrong[:1]:
        print(f"  wrong: {chat.messages[-1]['content']!r} -> {text!r}, not {render_answer(chat)!r}")
    return 1 - len(wrong) / len(chats)


def tokens_per_second(subject: Subject, rows: int, new_tokens: int = 128) -> float:
    """Greedy decoding speed of transformers' generate, best of four."""
    prompt = subject.prompt([user("Count from 1 to 60.")])
    ids = subject.tokenizer([prompt] * rows, return_tensors="pt", add_special_tokens=False).input_ids
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        with torch.no_grad():
            subject.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        best = min(best, time.perf_counter() - start)
    return rows * new_tokens / best


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact-match rates of the demo model on held-out prompts.")
    parser.add_argument("--model", type=Path, default=PATH, help="model folder (default: the shipped one)")
    parser.add_argument("-n", type=int, default=100, help="chats of each kind (default: 100)")
    parser.add_argument("--seed", type=int, default=4242)
    options = parser.parse_args()
    if options.n < 1:
        parser.error("-n must be at least 1")
    torch.set_num_threads(2)
    subject = Subject(options.model)
    draw = held_out_draw(subject.tokenizer, options.seed)
    for kind in KINDS:
        chats = held_out_chats(draw, kind, options.n)
        with_thought, without = (share_right(subject, kind, chats, think) for think in (True, False))
        print(f"{kind:16} n {len(chats):4}  thinking {with_thought:.2f}  no thinking {without:.2f}", flush=True)
    print("Wordings that were never trained on, with thinking:")
    for question, tools in UNTRAINED_WORDINGS:
        print(f"  {question!r} -> {subject.complete([subject.prompt([user(question)], tools)])[0]!r}")
    for rows in (1, 8):
        print(f"transformers generate, batch {rows}: {tokens_per_second(subject, rows):.0f} tokens/s")


if __name__ == "__main__":
    main()
