"""The tensors of a step: what lies where, who attends together, and that no row reads what another left behind."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.generate.engines.attention import KVCache, _alike, build_step
from headrace.workers.generate.row import Ending, Row
from headrace.workers.generate.scheduler import Slice

CPU = torch.device("cpu")
SIZE = 4


def row(tokens: int, computed: int, blocks: list[int]) -> Row:
    return Row("run", 0, list(range(100, 100 + tokens)), tokens, Ending(9), computed=computed, blocks=blocks)


def test_rows_that_add_one_token_come_first_and_the_longest_of_them_first() -> None:
    chunk = Slice.of(row(9, 3, [1, 2, 3]), 4)
    short = Slice.of(row(3, 2, [4]), 1)
    long = Slice.of(row(6, 5, [5, 6]), 1)
    step = build_step([short, chunk, long], KVCache(blocks=9, size=SIZE), CPU)
    assert step.slices == [long, short, chunk]
    assert step.input_ids.tolist() == [[105, 102, 103, 104, 105, 106]]
    assert step.position_ids.tolist() == [[5, 2, 3, 4, 5, 6]]
    assert step.slots.tolist() == [6 * 4 + 1, 4 * 4 + 2, 1 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2]
    assert step.last.tolist() == [0, 1]
    assert step.sampling == [long, short]


def test_blocks_that_are_begun_and_not_filled_are_fresh() -> None:
    begins = Slice.of(row(9, 8, [1, 2, 3]), 1)
    goes_on = Slice.of(row(10, 9, [4, 5, 6]), 1)
    fills = Slice.of(row(8, 2, [7, 8]), 6)
    chunk = Slice.of(row(20, 2, [9, 10, 11, 12, 13]), 9)
    step = build_step([begins, goes_on, fills, chunk], KVCache(blocks=20, size=SIZE), CPU)
    assert sorted(step.fresh.tolist()) == [3, 11]


def test_a_group_sees_the_tokens_up_to_its_own_and_within_its_window() -> None:
    step = build_step([Slice.of(row(7, 4, [1, 2]), 3)], KVCache(blocks=9, size=SIZE), CPU)
    (group,) = step.groups
    everything = [[key <= at for key in range(8)] for at in (4, 5, 6)]
    window = [[at - 2 < key <= at for key in range(8)] for at in (4, 5, 6)]
    assert group.mask(8, 1, None)[0, 0].tolist() == everything
    assert group.mask(8, 1, 2)[0, 0].tolist() == window
    assert group.mask(8, 2, 2)[0, 0].tolist() == [line for line in window for _ in range(2)]


def test_rows_that_attend_together_are_padded_with_the_block_that_is_nobodys() -> None:
    pieces = [Slice.of(row(9, 8, [1, 2, 3]), 1), Slice.of(row(2, 1, [4]), 1)]
    (group,) = build_step(pieces, KVCache(blocks=9, size=SIZE), CPU).groups
    assert group.table.tolist() == [1, 2, 3, 4, 0, 0]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.sampled_from([0, 100, 1000]))
def test_no_group_reads_more_in_vain_than_it_may(lengths: list[int], padding: int) -> None:
    pieces = [Slice(row(1, 0, []), length - 1, length, True) for length in sorted(lengths, reverse=True)]
    groups = list(_alike(pieces, padding))
    assert [piece for group in groups for piece in group] == pieces
    assert all(sum(group[0].stop - piece.stop for piece in group) <= padding for group in groups)


def test_nothing_that_an_earlier_holder_left_in_a_block_reaches_the_next() -> None:
    cache = KVCache(blocks=3, size=SIZE)

    def write(of: Row, count: int, value: float) -> None:
        step = build_step([Slice.of(of, count)], cache, CPU)
        new = torch.full((1, 2, count, 8), value)
        cache.write(0, new, new, step.slots, step.fresh)

    write(row(8, 0, [1, 2]), 8, math.nan)
    write(row(6, 0, [2, 1]), 6, 1.0)
    keys, values = cache.read(0, torch.tensor([2, 1, 0]), 1)
    for memory in (keys, values):
        assert memory[0, :, :6].eq(1.0).all()
        assert memory[0, :, 6:].eq(0.0).all()
