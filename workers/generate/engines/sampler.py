"""From logits to tokens: every parameter per row, all rows at once.

The order is that of vLLM: allowed ids, ids barred by min_tokens, biases, penalties, temperature, min_p, top_k, top_p.
Logprobs are of the model's own distribution, before any of these.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headrace.protocol.wire import TokenLogprob, TokenLogprobEntry
from headrace.workers.generate.engines.draw import draw
from headrace.workers.generate.row import Row

LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's next token; None if its logits are not finite or allow none."""

    token: int | None
    logprob: TokenLogprobEntry | None = None


class Sampler:
    """Holds no state that matters: what it remembers of its rows follows from their tokens."""

    def __init__(self) -> None:
        self._histories: dict[Row, _History] = {}

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
        """The next token of each row, from its logits [B, V]."""
        scores = self._adjusted(logits, rows)
        best, tokens = scores.max(-1)
        drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
        if drawn:
            some = scores if len(drawn) == len(rows) else scores[drawn]
            tokens[drawn] = draw(some.float(), [rows[i] for i in drawn])
        logprobs = _logprobs(logits, tokens, rows)
        return [
            Sampled(token, logprob) if math.isfinite(score) else Sampled(None)
            for token, logprob, score in zip(tokens.tolist(), logprobs, best.tolist(), strict=True)
        ]

    def _adjusted(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """The logits after all that makes single tokens more or less welcome; a copy if anything does."""
        allowed = [(i, row.sampling.allowed) for i, row in enumerate(rows) if row.sampling.allowed is not None]
        barred = [(i, row.ending.barred) for i, row in enumerate(rows) if row.made < row.ending.minimum]
        biased = [(i, row.sampling.bias) for i, row in enumerate(rows) if row.sampling.bias]
        penalised = [(i, row) for i, row in enumerate(rows) if row.sampling.penalised]
        self._histories = {row: self._histories.get(row) or _History() for _, row in penalised}
        if not (allowed or barred or biased or penalised):
            return logits
        scores = logits.to(torch.float32, copy=True)
        if allowed:
            places = _places(allowed, scores.device)
            kept = scores[places]
            scores[[i for i, _ in allowed]] = -math.inf
            scores[places] = kept
        if barred:
            scores[_places(barred, scores.device)] = -math.inf
        if biased:
            values = np.concatenate([np.fromiter(bias.values(), np.float32, len(bias)) for _, bias in biased])
            scores[_places(biased, scores.device)] += torch.from_numpy(values).to(scores.device)
        if penalised:
            self._penalise(scores, penalised)
        return scores

    def _penalise(self, scores: Tensor, penalised: Sequence[tuple[int, Row]]) -> None:
        """Repetition for every token seen; frequency by count and presence for those of the output."""
        histories = [self._histories[row].follow(row) for _, row in penalised]
        sizes = [len(history.ids) for history in histories]
        places = _places([(i, h.ids) for (i, _), h in zip(penalised, histories, strict=True)], scores.device)

        def each(values: Iterable[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array([*values], np.float32), sizes)).to(scores.device)

        counts = torch.from_numpy(np.concatenate([np.frombuffer(h.counts, np.float32) for h in histories]))
        counts = counts.to(scores.device)
        repetition = each(row.sampling.repetition for _, row in penalised)
        frequency = each(row.sampling.frequency for _, row in penalised)
        presence = each(row.sampling.presence for _, row in penalised)
        before = scores[places]
        after = torch.where(before > 0, before / repetition, before * repetition)
        scores[places] = after - counts * frequency - (counts > 0) * presence


class _History:
    """The tokens of a row, each once, and how often each is in its output."""

    __slots__ = ("counts", "ids", "places", "seen")

    def __init__(self) -> None:
        self.ids = array("q")
        self.counts = array("f")
        self.places: dict[int, int] = {}
        self.seen = 0

    def follow(self, row: Row) -> _History:
        """Takes in the tokens that are new since the last time."""
        for token in row.tokens[self.seen :]:
            place = self.places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0.0)
            self.counts[place] += self.seen >= row.prompt
            self.seen += 1
        return self


def _places(ids: Sequence[tuple[int, Collection[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of the given ids of the given rows in [B, V]."""
    sizes = [len(some) for _, some in ids]
    rows = np.repeat(np.array([i for i, _ in ids], np.int64), sizes)
    columns = np.concatenate([np.fromiter(some, np.int64, len(some)) for _, some in ids])
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def _logprobs(logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> list[TokenLogprobEntry | None]:
    """For the rows that asked: the sampled token, then the likeliest by rank, at most as many as asked for."""
    entries: list[TokenLogprobEntry | None] = [None] * len(rows)
    counts = {i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling.logprobs is not None}
    if not counts:
        return entries
    places = torch.tensor([*counts], device=logits.device)
    logprobs = logits[places].float().log_softmax(-1)
    chosen = tokens[places, None]
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.clamp(min=LOWEST_LOGPROB).topk(max(counts.values()), -1)
    own = own.clamp(min=LOWEST_LOGPROB)
    told = (chosen[:, 0].tolist(), own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist())
    for (i, count), token, logprob, rank, top_ids, top_values in zip(counts.items(), *told, strict=True):
        others = zip(top_ids[:count], top_values, range(1, count + 1), strict=False)
        top = [TokenLogprob(token, logprob, rank), *(TokenLogprob(*other) for other in others if other[0] != token)]
        entries[i] = TokenLogprobEntry(token, logprob, rank, top[: max(count, 1)])
    return entries
