"""Paged attention for the models of transformers, through the library's AttentionInterface.

The model hands its attention function the new queries, keys and values of all tokens of a step. Ours writes keys and
values into blocks and lets each token attend to the blocks of its own row. What a step computes is a ``Step``, in
force for the thread that runs the model (``Step.applied``).

Shapes: T tokens in the step, H heads for queries, K heads for keys and values, G = H / K, D the head's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from headrace.workers.generate.scheduler import Slice

NAME: Final = "headrace_paged"
"""What a model is loaded with as its attn_implementation."""

PADDING: Final = {"cpu": 1024}
"""Keys that one group of decoding rows may read in vain before it is split: a launch costs as much on a CPU."""
PADDING_ELSEWHERE: Final = 65_536


class KVCache:
    """Keys and values of every layer, ``blocks`` + 1 blocks of ``size`` tokens. Layers take shape as they are written.

    What is masked out of attention must still be finite, so block 0, which is nobody's, stays zero, and a block is
    zeroed when its first token is written: nothing that an earlier holder left there can reach the next one.
    """

    def __init__(self, *, blocks: int, size: int) -> None:
        self.size = size
        self._blocks = blocks + 1
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together."""
        return sum(t[0, 0].nbytes for layer in self._layers.values() for t in layer)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, fresh: Tensor) -> None:
        """Stores keys and values, [1, K, T, D] each, at T slots (block * size + place); zeroes ``fresh`` blocks."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        for memory, new in zip(self._layers[layer], (keys, values), strict=True):
            if len(fresh):
                memory.index_fill_(0, fresh, 0.0)
            memory.flatten(0, 1).index_copy_(0, slots, new[0].transpose(0, 1))

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        return torch.zeros(self._blocks, self.size, heads, width, dtype=like.dtype, device=like.device)

    def read(self, layer: int, table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [rows, K, tokens, D] each, of the blocks in ``table``, those of a row side by side."""
        keys, values = (m.index_select(0, table).view(rows, -1, *m.shape[2:]) for m in self._layers[layer])
        return keys.transpose(1, 2), values.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together: ``rows`` of ``length`` tokens each, from token ``start`` of the step on.

    ``table`` [rows * blocks of a row] is what they read, ``positions`` [rows, length] where their tokens stand.
    """

    start: int
    rows: int
    length: int
    table: Tensor
    positions: Tensor
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.rows * self.length)

    def mask(self, keys: int, group: int, window: int | None) -> Tensor:
        """[rows, 1, length * G, keys]: true where a token sees a key, itself and earlier ones in its window."""
        mask = self._masks.get((group, window))
        if mask is None:
            at = torch.arange(keys, device=self.positions.device)
            here = self.positions[:, :, None]
            mask = at <= here
            if window is not None:
                mask &= at > here - window
            mask = mask[:, :, None].expand(-1, -1, group, -1).reshape(self.rows, 1, -1, keys)
            self._masks[group, window] = mask
        return mask


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: ``slices`` in the order of their tokens, and where those go.

    ``slots`` [T] take the keys and values; ``fresh`` are blocks that are begun and not filled; ``last`` are the tokens
    after which to sample.
    """

    cache: KVCache
    slices: list[Slice]
    input_ids: Tensor
    position_ids: Tensor
    slots: Tensor
    fresh: Tensor
    last: Tensor
    groups: list[Group]

    @property
    def sampling(self) -> list[Slice]:
        """The slices that a token is sampled for, as ``last`` has them."""
        return [piece for piece in self.slices if piece.samples]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Models run in this thread compute this step."""
        token = _step.set(self)
        try:
            yield
        finally:
            _step.reset(token)


_step: ContextVar[Step] = ContextVar("step")


def build_step(plan: Sequence[Slice], cache: KVCache, device: torch.device) -> Step:
    """The tensors of a plan: rows that add one token first, longest first, so that like lengths attend together."""
    singles = sorted((s for s in plan if s.stop - s.start == 1), key=lambda s: s.stop, reverse=True)
    chunks = [s for s in plan if s.stop - s.start > 1]
    slices = singles + chunks

    ends = np.cumsum([s.stop - s.start for s in slices])
    ids = np.concatenate([s.row.tokens[s.start : s.stop] for s in slices])
    positions = np.concatenate([np.arange(s.start, s.stop) for s in slices])
    slots = np.concatenate([_slots(s, cache.size) for s in slices])

    def on_device(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)

    groups, start = [], 0
    for members in [*_alike(singles, PADDING.get(device.type, PADDING_ELSEWHERE)), *([c] for c in chunks)]:
        length = members[0].stop - members[0].start
        blocks = -(-members[0].stop // cache.size)
        table = np.array([s.row.blocks[:blocks] + [0] * (blocks - len(s.row.blocks)) for s in members])
        places = positions[start : start + len(members) * length].reshape(len(members), length)
        groups.append(Group(start, len(members), length, on_device(table.reshape(-1)), on_device(places)))
        start += len(members) * length

    return Step(
        cache=cache,
        slices=slices,
        input_ids=on_device(ids)[None],
        position_ids=on_device(positions)[None],
        slots=on_device(slots),
        fresh=on_device(np.array([block for s in slices for block in _fresh(s, cache.size)])),
        last=on_device(np.array([end - 1 for s, end in zip(slices, ends, strict=True) if s.samples])),
        groups=groups,
    )


def _slots(piece: Slice, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    positions = np.arange(piece.start, piece.stop)
    first = piece.start // size
    blocks = np.array(piece.row.blocks[first : -(-piece.stop // size)])
    return blocks[positions // size - first] * size + positions % size


def _fresh(piece: Slice, size: int) -> list[int]:
    """The slice's last block, if the slice begins it and does not fill it."""
    begun = piece.stop // size
    return [piece.row.blocks[begun]] if piece.stop % size and piece.start <= begun * size else []


def _alike(singles: Sequence[Slice], padding: int) -> Iterator[list[Slice]]:
    """Splits rows in falling length so that no group reads more than ``padding`` keys in vain."""
    group: list[Slice] = []
    waste = 0
    for piece in singles:
        waste += group[0].stop - piece.stop if group else 0
        if waste > padding:
            yield group
            group, waste = [], 0
        group.append(piece)
    if group:
        yield group


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """The attention function of transformers: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    ``s_aux`` [H] are attention sinks. What else a model may pass is checked by its result when it is loaded.
    """
    step = _step.get()
    layer = module.layer_idx
    assert isinstance(layer, int)
    step.cache.write(layer, key, value, step.slots, step.fresh)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = key.shape[1]
    group = query.shape[1] // heads
    queries = query[0].transpose(0, 1)
    outputs = []
    for part in step.groups:
        keys, values = step.cache.read(layer, part.table, part.rows)
        q = queries[part.tokens].view(part.rows, part.length, heads, group, -1).transpose(1, 2).flatten(2, 3)
        mask = part.mask(keys.shape[2], group, sliding_window)
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        else:
            sinks = None if s_aux is None else s_aux.view(heads, 1, group).expand(-1, part.length, -1).flatten(1)
            out = _attend(q, keys, values, mask, scale, softcap, sinks)
        out = out.view(part.rows, heads, part.length, group, -1).transpose(1, 2)
        outputs.append(out.reshape(-1, heads * group, value.shape[-1]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention spelled out, for what the fused kernels lack: capped scores, and sinks [K, length * G]."""
    scores = (q @ keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(values.dtype) @ values
    column = sinks.float()[None, :, :, None].expand(scores.shape[0], -1, -1, -1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values


AttentionInterface.register(NAME, paged_attention)
