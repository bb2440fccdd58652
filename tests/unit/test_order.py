"""The reorder buffer: whatever arrives, however often, in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.client.order import Order


def drain(order: Order[int]) -> list[int]:
    got = []
    while (item := order.get()) is not None:
        got.append(item)
    return got


@given(st.permutations(range(12)), st.lists(st.integers(0, 11)), st.lists(st.integers(0, 23), max_size=6))
def test_each_item_comes_once_and_in_order_however_it_arrives(
    arrival: list[int], again: list[int], reads: list[int]
) -> None:
    order: Order[int] = Order(limit=12)
    got: list[int] = []
    for at, seq in enumerate(arrival + again):
        order.put(seq, seq)
        if at in reads:
            got += drain(order)
    assert got + drain(order) == list(range(12))
    assert not order.missing


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans())), st.integers(1, 8))
def test_it_holds_no_more_than_its_limit_and_never_skips(arrivals: list[tuple[int, bool]], limit: int) -> None:
    order: Order[int] = Order(limit)
    got: list[int] = []
    for seq, read in arrivals:
        order.put(seq, seq)
        assert len(order._held) <= limit
        if read and (item := order.get()) is not None:
            got.append(item)
    assert got == list(range(len(got)))
    assert order.missing == (order.horizon > order.expected)


def test_what_found_no_room_is_missing_until_it_comes_again() -> None:
    order: Order[int] = Order(limit=2)
    for seq in range(4):
        order.put(seq, seq)
    assert drain(order) == [0, 1]
    assert order.missing
    for seq in range(order.expected, 4):
        order.put(seq, seq)
    assert drain(order) == [2, 3]
    assert not order.missing


def test_a_total_that_was_told_makes_the_rest_missing() -> None:
    order: Order[int] = Order(limit=8)
    order.put(0, 0)
    order.heard_of(2)
    assert order.missing
