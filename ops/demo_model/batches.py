"""Training batches: drawn examples as padded token ids, in few shapes, since each shape is compiled once."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ops.demo_model.draw import Draw
from ops.demo_model.mixture import COPYING, EVERYTHING, draw_example
from ops.demo_model.tokenizer import SPECIAL

LENGTHS = (48, 96, 208, 304, 448)
TOKENS_PER_BATCH = 8192
EXAMPLES_PER_ROUND = 4000
UNTRAINED = -100
"""The target of a place that is not trained on: prompts and padding."""

Sequence = tuple[list[int], list[int]]
"""Token ids of a prompt and of its continuation."""


def batches(
    draw: Draw, tokenizer: PreTrainedTokenizerFast, progress: Callable[[], float], copy_share: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, targets), each [rows, length]; only copying while progress is below copy_share."""
    waiting: dict[int, list[Sequence]] = {length: [] for length in LENGTHS}
    while True:
        ready: list[tuple[int, list[Sequence]]] = []
        for sequence in _sequences(draw, tokenizer, copying=progress() < copy_share):
            total = len(sequence[0]) + len(sequence[1])
            length = next((length for length in LENGTHS if length >= total), None)
            if length is None:
                continue
            waiting[length].append(sequence)
            if len(waiting[length]) == TOKENS_PER_BATCH // length:
                ready.append((length, waiting[length]))
                waiting[length] = []
        draw.random.shuffle(ready)
        for length, rows in ready:
            yield pad(rows, length)


def _sequences(draw: Draw, tokenizer: PreTrainedTokenizerFast, copying: bool) -> list[Sequence]:
    """One round of tokenized examples, and after them runs of random tokens that are to be repeated."""
    mixture = COPYING if copying else EVERYTHING
    examples = [draw_example(draw, mixture) for _ in range(EXAMPLES_PER_ROUND)]
    prompts, continuations = (
        [encoded.ids for encoded in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
        for texts in (
            [prompt for prompt, _ in examples],
            [continuation for _, continuation in examples],
        )
    )
    sequences = list(zip(prompts, continuations, strict=True))
    usable = range(len(SPECIAL), len(tokenizer))
    for _ in range(600 if copying else 100):
        run = [draw.pick(usable) for _ in range(draw.between(4, 22))]
        sequences.append(([*run, 0], run))
    return sequences


def pad(rows: list[Sequence], length: int) -> tuple[Tensor, Tensor]:
    """(ids, targets), each [rows, length]: a target is the id that follows, and only continuations have them."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), UNTRAINED)
    for row, (prompt, continuation) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(continuation)
        ids[row, :end] = torch.tensor(prompt + continuation)
        targets[row, start - 1 : end - 1] = torch.tensor(continuation)
    return ids, targets
