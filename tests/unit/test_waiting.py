"""Whoever waits for the engine gets its share: classes, clients by weight, priorities within a client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.workers.generate.waiting import WEIGHTS, Class, Fair, Waiting

CLASSES: list[Class] = list(WEIGHTS)
SHARES = {"a": 3.0, "b": 0.5, "c": 1.0}
MOST = 4
"""Rows of the largest request."""


def served(waiting: Waiting[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    found = [waiting.next() for _ in range(count)]
    return [each for each in found if each is not None]


def test_nobody_waits_and_nobody_is_next() -> None:
    assert Waiting[int]({}).next() is None


def test_one_client_is_served_by_priority_then_in_order() -> None:
    waiting = Waiting[int]({})
    for number, priority in enumerate([5, 1, 5, 1]):
        waiting.add(number, kind="low", client="a", priority=priority)
    assert [waiting.next() for _ in range(4)] == [1, 3, 0, 2]


def test_a_client_with_ten_is_not_behind_a_thousand_of_another() -> None:
    waiting = Waiting[tuple[str, int]]({})
    for number in range(1000):
        waiting.add(("flood", number), kind="normal", client="flood")
    served(waiting, 100)
    for number in range(10):
        waiting.add(("few", number), kind="normal", client="few")
    assert Counter(client for client, _ in served(waiting, 21))["few"] == 10


def test_who_was_away_begins_at_the_present() -> None:
    waiting = Waiting[tuple[str, int]]({})
    for number in range(200):
        waiting.add(("busy", number), kind="normal", client="busy")
    served(waiting, 100)
    for number in range(100):
        waiting.add(("back", number), kind="normal", client="back")
    counts = Counter(client for client, _ in served(waiting, 100))
    assert abs(counts["busy"] - counts["back"]) <= 1


def test_one_that_waits_no_longer_is_not_served() -> None:
    waiting = Waiting[object]({})
    stays, goes = object(), object()
    for each in (goes, stays):
        waiting.add(each, kind="normal", client="a")
    waiting.drop(goes)
    waiting.drop(goes)
    assert (len(waiting), list(waiting), waiting.of("normal", "a")) == (1, [stays], 1)
    assert waiting.next() is stays
    assert (len(waiting), waiting.of("normal", "a")) == (0, 0)


def test_many_clients_take_turns() -> None:
    waiting = Waiting[tuple[str, int]]({})
    names = [f"client{number}" for number in range(200)]
    for number in range(2):
        for name in names:
            waiting.add((name, number), kind="normal", client=name)
    assert [client for client, _ in served(waiting, 400)] == [*names, *names]


def test_clients_that_come_once_leave_nothing_behind() -> None:
    fair = Fair[str]({})
    fair.join("stays")
    for number in range(10_000):
        fair.join(name := f"client{number}")
        while (first := fair.first()) != name:
            fair.serve(first, 1.0)
        fair.serve(name, 1.0)
        fair.leave(name)
    assert len(fair) < 100
    fair.leave("stays")
    assert len(fair) == 0


@pytest.mark.parametrize("crowd", [1, 10, 100])
def test_newcomers_however_many_do_not_keep_one_waiting_who_has_had_a_turn(crowd: int) -> None:
    waiting, new, since = Waiting[str]({}), 0, 0
    for _ in range(20 * crowd + 100):
        if waiting.of("normal", "stays") == 0:
            waiting.add("stays", kind="normal", client="stays")
        while len(waiting) <= crowd:
            waiting.add("new", kind="normal", client=f"new{new}")
            new += 1
        since = 0 if waiting.next() == "stays" else since + 1
        assert since <= 2 * crowd + 2


def test_who_comes_back_at_once_is_still_ahead_by_what_it_had() -> None:
    waiting, rows = Waiting[str]({}), Counter[str]()
    for _ in range(300):
        waiting.add("many small ones", kind="normal", client="small")
    for _ in range(200):
        if waiting.of("normal", "large") == 0:
            waiting.add("one large one", kind="normal", client="large", cost=4)
        rows[waiting.next() or ""] += 1
    assert abs(rows["many small ones"] - 4 * rows["one large one"]) <= 4


def test_who_comes_after_a_crowd_has_left_does_not_wait_for_the_one_that_stays() -> None:
    waiting = Waiting[str]({})
    for _ in range(2000):
        waiting.add("stays", kind="normal", client="stays")
    for number in range(1000):
        waiting.add("crowd", kind="normal", client=f"crowd{number}")
    while len(waiting) > 999:
        waiting.next()
    waiting.add("new", kind="normal", client="new")
    assert "new" in [waiting.next(), waiting.next()]


ARRIVES = st.tuples(st.sampled_from(CLASSES), st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, MOST))


class Race:
    """How far those who wait together draw ahead of each other, each by its weight."""

    def __init__(self, weights: Mapping[Class, float] | Mapping[str, float]) -> None:
        self._weights = {str(name): weight for name, weight in weights.items()}
        self._most_apart = 2 * MOST / min(weights.values())
        self._leads: dict[tuple[str, str], list[float]] = {}
        """For each two of them what the first has had more than the second, since both wait."""

    def go_on(self, served: str, cost: int, waiting: Iterable[str]) -> None:
        """Somebody was served, at no cost if somebody only came or went; ``waiting`` are those who wait now."""
        pairs = combinations(sorted(set(waiting)), 2)
        self._leads = {pair: self._leads.get(pair, [0.0]) for pair in pairs}
        for (first, second), lead in self._leads.items():
            lead.append(lead[-1] + cost / self._weights[served] * ((served == first) - (served == second)))
            assert max(lead) - min(lead) <= self._most_apart


class Crowd(RuleBasedStateMachine):
    """Requests come in bursts, wait, are served, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Waiting[int](SHARES)
        self.here: dict[int, tuple[Class, str, int, int]] = {}
        self.arrivals = 0
        self.classes = Race(WEIGHTS)
        self.clients = {kind: Race(SHARES) for kind in CLASSES}

    @rule(one=ARRIVES, many=st.integers(1, 30))
    def come(self, one: tuple[Class, str, int, int], many: int) -> None:
        kind, client, priority, cost = one
        for _ in range(many):
            self.waiting.add(self.arrivals, kind=kind, client=client, priority=priority, cost=cost)
            self.here[self.arrivals] = one
            self.arrivals += 1
        self.race(kind, client, 0)

    @rule(many=st.integers(1, 60))
    def serve(self, many: int) -> None:
        for _ in range(min(many, len(self.here))):
            number = self.waiting.next()
            assert number is not None, "nobody is served although somebody waits"
            kind, client, _, cost = self.here[number]
            mine = [each for each, asked in self.here.items() if asked[:2] == (kind, client)]
            assert number == min(mine, key=lambda each: (self.here[each][2], each))
            del self.here[number]
            self.race(kind, client, cost)

    @precondition(lambda self: self.here)
    @rule(which=st.integers(0))
    def go(self, which: int) -> None:
        number = list(self.here)[which % len(self.here)]
        kind, client, *_ = self.here.pop(number)
        self.waiting.drop(number)
        self.race(kind, client, 0)

    def race(self, kind: Class, client: str, cost: int) -> None:
        self.classes.go_on(kind, cost, (asked[0] for asked in self.here.values()))
        self.clients[kind].go_on(client, cost, (asked[1] for asked in self.here.values() if asked[0] == kind))

    @invariant()
    def it_knows_who_waits(self) -> None:
        assert len(self.waiting) == len(self.here)
        assert sorted(self.waiting) == sorted(self.here)


def test_whoever_comes_when_nobody_draws_ahead_and_nothing_idles() -> None:
    run_state_machine_as_test(Crowd, settings=settings(stateful_step_count=30))


@given(st.lists(ARRIVES, max_size=60))
def test_all_are_served_once_and_the_order_within_a_client_is_kept(some: list[tuple[Class, str, int, int]]) -> None:
    waiting = Waiting[int]({"a": 3.0})
    for number, (kind, client, priority, cost) in enumerate(some):
        waiting.add(number, kind=kind, client=client, priority=priority, cost=cost)
    order = [number for _ in some if (number := waiting.next()) is not None]
    assert sorted(order) == list(range(len(some)))
    assert waiting.next() is None
    for kind in CLASSES:
        for client in "abc":
            mine = [number for number in order if some[number][:2] == (kind, client)]
            assert mine == sorted(mine, key=lambda number: (some[number][2], number))


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2),
    st.integers(1, 3),
)
def test_clients_that_wait_all_the_time_are_served_by_their_weights(weights: dict[str, float], cost: int) -> None:
    waiting = Waiting[tuple[str, int]](weights)
    for number in range(400):
        for client in weights:
            waiting.add((client, number), kind="normal", client=client, cost=cost)
    counts = Counter(client for client, _ in served(waiting, 200))
    for client, weight in weights.items():
        fair = 200 * weight / sum(weights.values())
        # Each is at most one service ahead of or behind its share, in its own measure.
        assert abs(counts[client] - fair) <= 1 + weight / min(weights.values())


@given(st.sets(st.sampled_from(CLASSES), min_size=2))
def test_no_class_starves_another(kinds: set[Class]) -> None:
    waiting = Waiting[tuple[str, int]]({})
    for number in range(300):
        for kind in kinds:
            waiting.add((kind, number), kind=kind, client=kind)
    counts = Counter(kind for kind, _ in served(waiting, 150))
    total = sum(WEIGHTS[kind] for kind in kinds)
    for kind in kinds:
        assert counts[kind] >= int(150 * WEIGHTS[kind] / total) - 1
