"""The layout of queues as data, the choice of a retry rung, and what a drift is told as."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.rabbitmq.topology import DEFAULT_LAYOUT, RUNGS, Topology, drift, rung_name

draws = st.floats(0, 1, exclude_max=True)


def test_there_are_six_rungs() -> None:
    assert len(RUNGS) == 6
    assert len({queue.exchange for queue in DEFAULT_LAYOUT.shared() if queue.exchange}) == 6


@pytest.mark.parametrize("name", ["render.m", "control", "intake", *(rung_name(seconds) for seconds in RUNGS)])
def test_what_the_broker_gives_up_on_is_kept_until_its_next_queue_has_it(name: str) -> None:
    (queue,) = [queue for queue in DEFAULT_LAYOUT.all(["render.m"]) if queue.name == name]
    assert queue.arguments["x-queue-type"] == "quorum"
    assert queue.arguments["x-dead-letter-exchange"] == ""
    assert queue.arguments["x-dead-letter-strategy"] == "at-least-once"
    assert queue.arguments["x-overflow"] == "reject-publish"


def test_every_queue_says_its_own_delivery_limit() -> None:
    limits = {queue.name: queue.arguments["x-delivery-limit"] for queue in DEFAULT_LAYOUT.all(["render.m"])}
    assert limits["render.m"] == limits["control"] == limits["intake"] == 200
    assert limits["dead"] == 1_000_000


def test_dead_letters_go_from_work_to_intake_to_dead_and_end_there() -> None:
    keys = {
        queue.name: queue.arguments.get("x-dead-letter-routing-key") for queue in DEFAULT_LAYOUT.all(["generate.m"])
    }
    assert (keys["generate.m"], keys["control"], keys["intake"], keys["dead"]) == ("intake", "intake", "dead", None)


def test_a_shared_queue_asked_for_by_name_stays_as_it_is() -> None:
    layout = Topology(max_length=7)
    assert layout.all(["dead", "intake", "control"]) == layout.shared()


@given(st.sampled_from(RUNGS), draws)
def test_jitter_moves_a_retry_by_one_rung_at_most(delay: float, draw: float) -> None:
    chosen = [rung_name(seconds) for seconds in RUNGS].index(DEFAULT_LAYOUT.rung(delay, draw))
    assert abs(chosen - RUNGS.index(delay)) <= 1


@given(st.floats(0, 1e6))
def test_without_jitter_a_retry_takes_the_nearest_rung_by_ratio(delay: float) -> None:
    chosen = DEFAULT_LAYOUT.rung(delay, 0.5)
    ratios = {rung_name(rung): abs(math.log(max(delay, 1e-9) / rung)) for rung in RUNGS}
    assert ratios[chosen] <= min(ratios.values()) * (1 + 1e-9) + 1e-9


def test_every_neighbour_is_drawn_about_one_time_in_six() -> None:
    draws = [(n + 0.5) / 600 for n in range(600)]
    chosen = [DEFAULT_LAYOUT.rung(15.0, draw) for draw in draws]
    assert [chosen.count(rung_name(seconds)) // 10 for seconds in (4.0, 15.0, 60.0)] == [10, 40, 10]


@pytest.mark.parametrize("rungs", [(), (2.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_rungs_that_do_not_rise_are_refused(rungs: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="rungs"):
        Topology(rungs=rungs)


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (
            "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'render.m' in vhost '/': "
            "received '6' but current is '5'",
            "queue 'render.m' exists with x-max-length = '5', ours is '6'",
        ),
        (
            "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'render.m' in vhost '/': "
            "received none but current is the value '5' of type 'byte'",
            "queue 'render.m' exists with x-max-length = '5', ours is none",
        ),
        (
            "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'render.m' in vhost '/': "
            "received the value 'quorum' of type 'longstr' but current is none",
            "queue 'render.m' exists with x-queue-type = none, ours is 'quorum'",
        ),
        (
            "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'headrace.topics' in vhost '/': "
            "received 'topic' but current is 'fanout'",
            "exchange 'headrace.topics' exists with type = 'fanout', ours is 'topic'",
        ),
        ("PRECONDITION_FAILED - something else", "something else"),
    ],
)
def test_a_drift_names_the_queue_the_argument_and_both_values(refusal: str, told: str) -> None:
    assert told in str(drift(refusal, "the queues"))
