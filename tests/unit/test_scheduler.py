"""The scheduler gives out rows and blocks: who runs, what a step computes, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.generate.blocks import BlockPool
from headrace.workers.generate.row import Ending, Finish, Row
from headrace.workers.generate.scheduler import Scheduler, Slice

SIZE = 4


def scheduler(*, rows: int = 4, blocks: int = 64, budget: int = 64) -> Scheduler:
    return Scheduler(rows=rows, blocks=BlockPool(blocks, SIZE), budget=budget)


def row(prompt: int = 5, limit: int = 8, *, run: str = "run", priority: int = 0, leader: Row | None = None) -> Row:
    return Row(run, 0, list(range(prompt)), prompt, Ending(limit), priority=priority, leader=leader)


def added(to: Scheduler, *rows: Row) -> tuple[Row, ...]:
    for one in rows:
        to.add(one)
    return rows


def spans(plan: list[Slice]) -> dict[Row, tuple[int, int]]:
    return {piece.row: (piece.start, piece.stop) for piece in plan}


def step(of: Scheduler) -> list[Slice]:
    """One step as an engine does it; a row that samples makes token 7."""
    plan = of.plan()
    sampling = [piece.row for piece in plan if piece.samples]
    of.computed(plan)
    for one in sampling:
        if one.take(7) is not None:
            of.remove(one)
    return plan


def test_a_prompt_is_computed_at_once_and_then_one_token_a_step() -> None:
    of = scheduler()
    (one,) = added(of, row(prompt=5, limit=3))
    assert [spans(step(of))[one] for _ in range(3)] == [(0, 5), (5, 6), (6, 7)]
    assert not of.busy


def test_a_long_prompt_comes_in_chunks_beside_a_row_that_decodes() -> None:
    of = scheduler(budget=6)
    (short,) = added(of, row(prompt=2, limit=8))
    step(of)
    (long,) = added(of, row(prompt=12))
    assert spans(step(of)) == {short: (2, 3), long: (0, 5)}
    assert spans(step(of)) == {short: (3, 4), long: (5, 10)}
    assert spans(step(of)) == {short: (4, 5), long: (10, 12)}
    assert spans(step(of)) == {short: (5, 6), long: (12, 13)}


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    of = scheduler(budget=6)
    added(of, row(prompt=8))
    assert [piece.samples for piece in step(of) + step(of)] == [False, True]


def test_no_more_rows_run_than_there_are() -> None:
    of = scheduler(rows=2)
    first, second, third = added(of, row(limit=2), row(limit=5), row())
    step(of)
    assert of.running == [first, second]
    step(of)
    assert set(spans(step(of))) == {second, third}


def test_a_lower_priority_number_is_served_earlier() -> None:
    of = scheduler(rows=1)
    late, soon = added(of, row(priority=5), row(priority=-1))
    assert set(spans(of.plan())) == {soon}
    assert of.waiting == [late]


def test_equal_priorities_are_served_as_they_came() -> None:
    of = scheduler(rows=2)
    rows = added(of, *(row() for _ in range(4)))
    step(of)
    assert of.running == [*rows[:2]]
    assert of.waiting == [*rows[2:]]


def test_a_row_waits_until_blocks_for_all_its_tokens_are_free() -> None:
    of = scheduler(blocks=6)
    first, second = added(of, row(prompt=12, limit=2), row(prompt=12, limit=2))
    assert set(spans(step(of))) == {first}
    step(of)
    assert set(spans(step(of))) == {second}


def test_a_row_that_does_not_fit_is_not_overtaken() -> None:
    of = scheduler(blocks=6)
    added(of, row(prompt=12, limit=9))
    big, small = added(of, row(prompt=16), row(prompt=1))
    step(of)
    assert of.waiting == [big, small]


def test_without_a_free_block_the_row_served_last_gives_way_and_goes_on_later_with_its_tokens() -> None:
    of = scheduler(blocks=5)
    first, second = added(of, row(prompt=7, limit=9), row(prompt=7, limit=9))
    step(of)
    step(of)
    assert spans(step(of)) == {first: (8, 9), second: (8, 9)} or of.waiting == [second]
    while second not in of.waiting:
        step(of)
    had = list(second.tokens)
    assert second.blocks == []
    assert second.computed == 0
    while of.busy:
        step(of)
    assert second.tokens[: len(had)] == had
    assert first.made == second.made == 9
    assert of.blocks.free == of.blocks.total


def test_a_row_of_higher_priority_never_gives_way_to_a_lower_one() -> None:
    of = scheduler(blocks=5)
    low, high = added(of, row(prompt=7, limit=9, priority=1), row(prompt=7, limit=9))
    while low not in of.waiting or high not in of.running:
        step(of)
    while of.busy:
        assert high.blocks or high.made == 9
        step(of)


def test_a_removed_row_frees_its_place_and_its_blocks_at_once() -> None:
    of = scheduler(rows=1)
    running, waiting = added(of, row(), row())
    step(of)
    of.remove(running)
    assert of.blocks.free == of.blocks.total
    of.remove(waiting)
    assert not of.busy


def test_choices_of_one_prompt_share_its_full_blocks_and_compute_only_the_rest() -> None:
    of = scheduler()
    (leader,) = added(of, row(prompt=11))
    follower, _ = added(of, row(prompt=11, leader=leader), row(prompt=11, leader=leader))
    assert set(spans(step(of))) == {leader}
    assert spans(step(of))[follower] == (8, 11)
    assert follower.blocks[:2] == leader.blocks[:2]
    assert follower.blocks[2] != leader.blocks[2]


def test_shared_blocks_live_until_the_last_holder_is_gone() -> None:
    of = scheduler()
    (leader,) = added(of, row(prompt=11))
    (follower,) = added(of, row(prompt=11, leader=leader))
    step(of)
    step(of)
    shared = leader.blocks[:2]
    of.remove(leader)
    assert not set(shared) & set(of.blocks.take(of.blocks.free))
    assert follower.blocks[:2] == shared


def test_a_row_whose_leader_is_gone_computes_its_prompt_itself() -> None:
    of = scheduler(rows=1)
    (leader,) = added(of, row(prompt=11, limit=1))
    (follower,) = added(of, row(prompt=11, leader=leader))
    step(of)
    assert spans(step(of)) == {follower: (0, 11)}


def test_rows_that_wait_for_their_leader_do_not_hold_up_others() -> None:
    of = scheduler(budget=6)
    (leader,) = added(of, row(prompt=20))
    follower, other = added(of, row(prompt=20, leader=leader), row(prompt=1))
    step(of)
    assert of.waiting == [follower]
    assert other in of.running


def test_a_budget_that_could_not_feed_every_row_is_refused() -> None:
    with pytest.raises(ValueError, match="budget must be at least the number of rows, 4, got 3"):
        scheduler(rows=4, budget=3)


def test_capacity_counts_waiting_rows_as_taken() -> None:
    of = scheduler(rows=3, blocks=8)
    added(of, *(row(prompt=4) for _ in range(2)))
    step(of)
    added(of, *(row() for _ in range(9)))
    room = of.capacity(40)
    assert (room.rows, room.free_rows, room.tokens, room.free_tokens, room.max_model_len) == (3, 0, 32, 24, 40)


# ------------------------------------------------------------------------------------------------ endings


ENDINGS: list[tuple[Ending, list[int], Finish | None]] = [
    (Ending(3, eos=frozenset([1])), [5, 1], Finish("stop")),
    (Ending(3, stops=frozenset([6])), [5, 6], Finish("stop", 6)),
    (Ending(2), [5, 5], Finish("length")),
    (Ending(3), [5, 5], None),
    (Ending(9, minimum=3, eos=frozenset([1])), [1, 1], None),
    (Ending(9, minimum=2, eos=frozenset([1])), [1, 1], Finish("stop")),
    (Ending(2, eos=frozenset([1])), [5, 1], Finish("stop")),
]


@pytest.mark.parametrize(("ending", "output", "finish"), ENDINGS)
def test_a_row_ends_by_its_eos_its_stop_ids_or_its_length(
    ending: Ending, output: list[int], finish: Finish | None
) -> None:
    one = Row("run", 0, [1, 6], 2, ending)
    assert [one.take(token) for token in output][-1] == finish


# ------------------------------------------------------------------------------------------------ any schedule


Op = Callable[[Scheduler, list[Row]], None]


def _add(prompt: int, limit: int, priority: int, choices: int) -> Op:
    def op(of: Scheduler, rows: list[Row]) -> None:
        leader: Row | None = None
        for _ in range(choices):
            one = row(prompt, limit, priority=priority, leader=leader)
            leader = leader or one
            rows.extend(added(of, one))

    return op


def _cancel(which: int) -> Op:
    def op(of: Scheduler, rows: list[Row]) -> None:
        alive = [one for one in rows if one in of.running or one in of.waiting]
        if alive:
            of.remove(alive[which % len(alive)])

    return op


def _step(of: Scheduler, _: list[Row]) -> None:
    if of.busy:
        plan = step(of)
        assert plan
        assert sum(piece.stop - piece.start for piece in plan) <= of.budget


def _sound(of: Scheduler) -> None:
    """Every block that is not free is held, in whole, by rows that run; only a common prompt is held twice."""
    held = Counter(block for one in of.running for block in one.blocks)
    assert len(held) + of.blocks.free == of.blocks.total
    assert len(of.running) <= of.rows
    assert all(not one.blocks and one.computed == 0 for one in of.waiting)
    for one in of.running:
        assert of.blocks.needed(one.computed) <= len(one.blocks)
        own = one.blocks[(one.prompt - 1) // SIZE :]
        assert all(held[block] == 1 for block in own)
    assert of.running == sorted(of.running, key=lambda one: one.order)


operations = st.one_of(
    st.builds(_add, st.integers(1, 20), st.integers(1, 12), st.integers(-1, 1), st.integers(1, 3)),
    st.builds(_cancel, st.integers(0, 99)),
    st.just(_step),
    st.just(_step),
)


@given(
    st.lists(operations, max_size=200),
    st.integers(1, 6),
    st.integers(8, 24),
    st.integers(6, 40),
)
def test_whatever_is_admitted_and_cancelled_every_row_ends_and_every_block_comes_back(
    ops: list[Op], rows: int, blocks: int, budget: int
) -> None:
    of = scheduler(rows=rows, blocks=blocks, budget=budget)
    seen: list[Row] = []
    for op in ops:
        op(of, seen)
        _sound(of)
    for _ in range(40 * len(seen) + 1):
        _step(of, seen)
        _sound(of)
    assert not of.busy
    assert of.blocks.free == of.blocks.total
