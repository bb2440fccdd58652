"""Draws tokens from logits under temperature, min_p, top_k and top_p, each per row.

A number in [0, 1) falls somewhere in the cumulative weights of the tokens that are kept, in the order of their ids.
It depends on the row's noise and position alone, so the other rows of the batch make no difference. Nothing is sorted
but the candidates of top_k. A nucleus (top_p without top_k) is drawn by rejection: a token is in it if those above
have less than top_p of the weight; if not, one of those above is drawn instead, which leaves the distribution exact.

Shapes: B rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from headrace.workers.generate import noise
from headrace.workers.generate.row import Row

FEW: Final = 256
"""Rows with a larger top_k are sorted apart, so that the others need not sort as much."""
BLOCK: Final = 64
"""Weights of a whole vocabulary are added up in blocks of so many tokens."""


def draw(scores: Tensor, rows: Sequence[Row]) -> Tensor:
    """One token for each row, [B], from float32 scores [B, V]. Every row has a temperature above 0."""
    weights = (scores / _column([row.sampling.temperature for row in rows], scores).float()).softmax(-1)
    groups: dict[bool | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.sampling.top_k > FEW if row.sampling.top_k else None, []).append(i)
    tokens = torch.zeros(len(rows), dtype=torch.long, device=scores.device)
    for many, members in groups.items():
        some = weights if len(groups) == 1 else weights[members]
        way = _nucleus if many is None else _likeliest
        tokens[members] = way(some, [rows[i] for i in members])
    return tokens


def _likeliest(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """Rows with top_k: min_p and top_k keep some candidates, top_p a share of their weight."""
    limits = [min(row.sampling.top_k, weights.shape[-1]) for row in rows]
    values, ids = weights.topk(max(limits), -1)
    rank = torch.arange(values.shape[-1], device=weights.device)
    top_k = _column(limits, weights)
    min_p = _column([row.sampling.min_p for row in rows], weights).float()
    kept = torch.where((rank < top_k) & (values >= min_p * values[:, :1]), values, 0.0).double()
    top_p = _column([row.sampling.top_p for row in rows], weights)
    above = kept.cumsum(-1) - kept
    kept = torch.where((above < top_p * kept.sum(-1, keepdim=True)) | (top_p >= 1), kept, 0.0)
    ids, order = ids.sort(-1)
    kept = kept.gather(1, order)
    return ids.gather(1, _fall(kept, _uniform(rows, weights) * kept.sum(-1, keepdim=True)))[:, 0]


def _nucleus(weights: Tensor, rows: Sequence[Row]) -> Tensor:
    """Rows without top_k: min_p keeps some tokens, top_p a share of their weight."""
    if any(row.sampling.min_p for row in rows):
        min_p = _column([row.sampling.min_p for row in rows], weights).float()
        weights = torch.where(weights >= min_p * weights.amax(-1, keepdim=True), weights, 0.0)
    tokens = _pick(weights, _uniform(rows, weights))
    if all(row.sampling.top_p >= 1 for row in rows):
        return tokens
    top_p = _column([row.sampling.top_p for row in rows], weights)[:, 0]
    bound = torch.where(top_p < 1, top_p * weights.sum(-1), math.inf)
    left = torch.arange(len(rows), device=weights.device)
    attempt = 0
    while True:
        own = weights.gather(1, tokens[left, None])
        weights = torch.where(weights > own, weights, 0.0)
        outside = (weights.sum(-1) >= bound[left]).nonzero()[:, 0]
        if not len(outside):
            return tokens
        attempt += 1
        left, weights = left[outside], weights[outside]
        tokens[left] = _pick(weights, _uniform([rows[i] for i in left.tolist()], weights, attempt))


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token on which ``uniform`` falls, [B], in weights [B, V]: first its block, then its place there."""
    vocabulary = weights.shape[-1]
    full = vocabulary // BLOCK * BLOCK
    sums = [weights[:, :full].view(len(weights), -1, BLOCK).sum(-1), weights[:, full:].sum(-1, keepdim=True)]
    blocks = torch.cat(sums, -1).double()
    target = uniform * blocks.sum(-1, keepdim=True)
    block = _fall(blocks, target)
    before = (blocks.cumsum(-1) - blocks).gather(1, block)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=vocabulary - 1)).double() * (ids < vocabulary)
    return ids.gather(1, _fall(inside, target - before))[:, 0]


def _fall(weights: Tensor, target: Tensor) -> Tensor:
    """The first place at which the cumulative weights pass the target, [B, 1]; never one without weight."""
    place = torch.searchsorted(weights.cumsum(-1), target, right=True)
    last = ((weights > 0) * torch.arange(weights.shape[-1], device=weights.device)).amax(-1, keepdim=True)
    return torch.minimum(place, last)


def _uniform(rows: Sequence[Row], like: Tensor, attempt: int = 0) -> Tensor:
    """The rows' numbers in [0, 1) for this position, [B, 1]; further attempts have their own."""
    if attempt == 0:
        return _column([noise.uniform(row.sampling.noise, row.made) for row in rows], like)
    return _column([noise.uniform(noise.bits(row.sampling.noise, row.made), attempt) for row in rows], like)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
