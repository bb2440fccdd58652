"""Deadlines: who is late, and how much is remembered of those that never were."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.generate.deadlines import Deadlines

RUNS = st.sampled_from("abcdef")
ADD = st.tuples(st.just("add"), RUNS, st.integers(0, 20))
DROP = st.tuples(st.just("drop"), RUNS, st.just(0))
LOOK = st.tuples(st.just("look"), st.just(""), st.integers(0, 20))


@given(st.lists(ADD | DROP | LOOK))
def test_those_are_late_whose_deadline_has_come_and_no_others(steps: list[tuple[str, str, int]]) -> None:
    deadlines, held = Deadlines(), dict[str, int]()
    for step, run, moment in steps:
        match step:
            case "add":
                deadlines.add(run, moment)
                held[run] = moment
            case "drop":
                deadlines.drop(run)
                held.pop(run, None)
            case _:
                due = sorted((at, name) for name, at in held.items() if at <= moment)
                assert sorted((held.pop(name), name) for name in deadlines.late(moment)) == due


def test_runs_that_end_in_time_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(f"r{number}", 1e9 + number)
        deadlines.drop(f"r{number - 10}")
    assert len(deadlines) < 200
    assert len(deadlines.late(2e9)) == 10
