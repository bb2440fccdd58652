"""Trains the demo model from nothing, on two CPU threads, with no downloaded data.

    python -m ops.demo_model.train --minutes 38 --out DIR      # the learning rate follows the clock
    python -m ops.demo_model.train --tokens 20e6 --out DIR     # ... or the number of tokens, padding counted
    python -m ops.demo_model.train --minutes 13 --init DIR --out DIR --scale 0.45 --seed 1   # goes on from there

Run from the repository root. A C++ compiler is needed (torch.compile).
"""

import argparse
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from ops.demo_model.batches import LENGTHS, UNTRAINED, Sequence, batches, pad
from ops.demo_model.dialogue import render_continuation, render_prompt
from ops.demo_model.draw import Draw
from ops.demo_model.mixture import EVERYTHING, draw_chat
from ops.demo_model.model import build_model, load_weights, save
from ops.demo_model.tokenizer import train_tokenizer, transformers_prompt, word_pieces

MATRIX_RATE, OTHER_RATE = 3e-3, 2e-3
WARM_UP_STEPS = 60
COPY_SHARE = 0.15
SAVE_EVERY_S = 240.0


@dataclass(slots=True)
class Budget:
    """How much of the training is done, by the clock or by tokens."""

    minutes: float | None
    tokens: float | None
    seen: int = 0
    start: float = field(default_factory=time.monotonic)

    def elapsed_minutes(self) -> float:
        return (time.monotonic() - self.start) / 60

    def progress(self) -> float:
        """0 at the start, 1 or more at the end."""
        if self.tokens is not None:
            return self.seen / self.tokens
        assert self.minutes is not None
        return self.elapsed_minutes() / self.minutes


class Optimizers:
    """Muon for the matrices, AdamW for embeddings and norms, under one schedule."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self._parameters = [p for _, p in named]
        self._rated: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(
                    matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
                ),
                MATRIX_RATE,
            ),
            (torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0), OTHER_RATE),
        ]

    def step(self, factor: float) -> None:
        """One step at `factor` times the full rates; gradients are clipped to norm 1, then dropped."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, rate in self._rated:
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def rate_factor(step: int, progress: float) -> float:
    """Warms up, holds until 30 % of the way, then falls linearly, to 1 % at the least."""
    return min(1, (step + 1) / WARM_UP_STEPS) * min(1, max(0.01, (1 - progress) / 0.7))


def loss_of(model: Qwen3ForCausalLM, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the places that are trained on; ids and targets are [rows, length]."""
    trained = targets != UNTRAINED
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[trained]
        logits = model.lm_head(hidden)
    return nn.functional.cross_entropy(logits.float(), targets[trained])


def held_out_shares(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: int) -> dict[str, float]:
    """Per kind ("-" for no thinking): the share of held-out chats whose whole continuation is the likeliest."""
    draw = Draw(Random(99), word_pieces(tokenizer))
    return {
        kind + ("" if think else "-"): round(_share_right(model, tokenizer, draw, kind, think, chats), 2)
        for kind in EVERYTHING
        for think in (True, False)
    }


def _share_right(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, draw: Draw, kind: str, think: bool, chats: int
) -> float:
    """Each token is guessed given the right ones before it; chats longer than any batch are drawn again."""
    rows: list[Sequence] = []
    while len(rows) < chats:
        chat = draw_chat(draw, kind, held=True)
        prompt, continuation = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (render_prompt(chat.messages, chat.tools, think), render_continuation(chat, think))
        )
        if len(prompt) + len(continuation) <= LENGTHS[-1]:
            rows.append((prompt, continuation))
    ids, targets = pad(rows, max(len(prompt) + len(continuation) for prompt, continuation in rows))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        guesses = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    right = ((guesses == targets) | (targets == UNTRAINED)).all(dim=1)
    return float(right.float().mean())


def check_rendering(draw: Draw, tokenizer: PreTrainedTokenizerFast, chats: int = 300) -> None:
    """What is trained on must be what transformers renders too. Raises ValueError with the first other prompt."""
    for _ in range(chats):
        chat, think = draw_chat(draw, draw.pick(list(EVERYTHING))), draw.chance(0.5)
        trained = render_prompt(chat.messages, chat.tools, think)
        if trained != transformers_prompt(tokenizer, chat.messages, chat.tools, think):
            raise ValueError(f"the tokenizer's template renders otherwise than training: {trained!r}")


def train(budget: Budget, out: Path, init: Path | None, scale: float, seed: int) -> None:
    """Trains until the budget is spent; saves and reports now and then and at the end."""
    torch.manual_seed(seed)
    draw = Draw(Random(seed))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(init) if init else train_tokenizer(draw)
    draw = replace(draw, pieces=word_pieces(tokenizer))
    check_rendering(draw, tokenizer)
    model = build_model(tokenizer)
    if init:
        load_weights(model, init)
    print(f"vocabulary {len(tokenizer)} parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    probe = build_model(tokenizer)  # not compiled: held-out chats come in many shapes
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    optimizers = Optimizers(model)

    def checkpoint(chats: int) -> None:
        save(model, tokenizer, out)
        probe.load_state_dict(model.state_dict())
        print("held out", held_out_shares(probe, tokenizer, chats), flush=True)

    budget.start = saved = time.monotonic()
    average = 0.0
    for step, (ids, targets) in enumerate(
        batches(draw, tokenizer, budget.progress, copy_share=0 if init else COPY_SHARE)
    ):
        progress = budget.progress()
        if progress >= 1:
            break
        loss = loss_of(model, ids, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(rate_factor(step, progress) * scale)
        budget.seen += ids.numel()
        average = 0.97 * average + 0.03 * loss.item() if step else loss.item()
        if step % 50 == 0:
            print(
                f"step {step} loss {average:.4f} tokens {budget.seen / 1e6:.2f}M "
                f"minutes {budget.elapsed_minutes():.1f} progress {progress:.3f}",
                flush=True,
            )
        if time.monotonic() - saved > SAVE_EVERY_S:
            saved = time.monotonic()
            checkpoint(16)
    print(f"done: loss {average:.4f} tokens {budget.seen} minutes {budget.elapsed_minutes():.1f}", flush=True)
    checkpoint(48)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the demo model on synthetic chats.")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for so long")
    length.add_argument("--tokens", type=float, help="train on so many tokens, padding counted")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--init", type=Path, help="folder of a model to go on from")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (options.minutes or options.tokens or 0) > 0:
        parser.error("--minutes or --tokens must be greater than 0")
    torch.set_num_threads(2)
    options.out.mkdir(parents=True, exist_ok=True)
    train(Budget(options.minutes, options.tokens), options.out, options.init, options.scale, options.seed)


if __name__ == "__main__":
    main()
