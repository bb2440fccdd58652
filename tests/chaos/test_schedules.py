"""Whatever happens to the processes and the lines between them, every request is answered once and rightly."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import embedded
from headrace.broker.embedded import EmbeddedRuns
from headrace.broker.embedded.queues import StoredQueue
from headrace.broker.embedded.shelf import Run
from headrace.broker.ports import Append, Batch, ClaimRequest
from headrace.client.order import Order
from headrace.workers.generate.engines.null import NullEngine
from tests.chaos.schedules.steps import (
    Again,
    Away,
    Cancel,
    Drain,
    Duplicate,
    Forget,
    Freeze,
    Kill,
    Lose,
    LoseOwn,
    Pass,
    Reconnect,
    Spoil,
    Start,
    Step,
    Submit,
)
from tests.chaos.schedules.verdict import tell
from tests.chaos.schedules.wire import At

EXAMPLES: Final = 5_000 if "HEADRACE_CHAOS" in os.environ else 300
"""Schedules that are tried."""

NTH = st.sampled_from((0, 0, 1, 2))
ROLE = st.sampled_from(("generate", "derender", "generate", "derender", "render", "control"))
DELAY = st.sampled_from((0.0, 0.004, 0.15))
SERVER = st.sampled_from(("rabbitmq", "redis"))
LOST = st.sampled_from(("request", "reply"))
CALLS = st.integers(1, 3)
AGAIN = st.sampled_from((0.3, 5.0, None))

DEADLY = st.integers(0, 15).map(lambda drawn: drawn == 15)
SUBMITS = st.builds(Submit, st.integers(0, 5), st.integers(1, 3), st.integers(0, 1), st.booleans(), DEADLY)
VERBS = ("append", "outcome", "publish", "claim", "ack", "save", "retry", "release", "read", "beat")
AT = st.none() | st.builds(At, st.sampled_from(VERBS), st.booleans())
DEATHS = st.builds(Kill, ROLE, NTH, AGAIN, AT) | st.builds(
    Freeze, ROLE, NTH, st.sampled_from((1.0, 8.5, 9.5, 25.0)), AT
)
NUISANCES: st.SearchStrategy[Step] = st.one_of(
    st.builds(Start, ROLE, DELAY),
    st.builds(Drain, ROLE, NTH, AGAIN),
    st.builds(Reconnect, ROLE, NTH),
    st.builds(Lose, ROLE, NTH, SERVER, LOST, CALLS),
    st.builds(LoseOwn, st.integers(0, 1), SERVER, LOST, CALLS),
    st.builds(Away, SERVER, st.sampled_from((0.5, 3.0, 9.0))),
    st.builds(Duplicate, st.integers(0, 8)),
    st.builds(Spoil, st.integers(0, 1), st.sampled_from(("drop", "late", "twice")), st.integers(1, 6)),
)
WHIMS: st.SearchStrategy[Step] = st.one_of(
    st.builds(Again, NTH),
    st.builds(Again, NTH, st.just(True)),
    st.builds(Cancel, NTH),
    st.builds(Forget, NTH, st.sampled_from(("tail", "log", "all"))),
)
MOMENTS = st.sampled_from((0.1, 0.0, 0.004, 0.03, 0.3, 0.3, 1.0, 3.0, 10.0, 20.0)).map(Pass)
STEPS = st.tuples(st.one_of(SUBMITS, DEATHS, DEATHS, NUISANCES, NUISANCES, WHIMS), MOMENTS)
SCHEDULES = st.builds(
    lambda first, moment, steps: [first, moment, *chain.from_iterable(steps)],
    SUBMITS,
    MOMENTS,
    st.lists(STEPS, min_size=4, max_size=16),
)
"""After each step some time passes."""


@given(SCHEDULES, st.booleans(), DELAY)
@settings(max_examples=EXAMPLES)
def test_no_schedule_loses_doubles_or_changes_an_answer(steps: list[Step], calls_tools: bool, delay: float) -> None:
    tell(steps, calls_tools=calls_tools, delay=delay)


BEGUN: Final[list[Step]] = [Submit(0, 1), Pass(0.3)]
ANOTHER_BODY = [*BEGUN, Again(0, other=True), Spoil(1, "drop", 1), Pass(1.0)]
NOBODY_GENERATES = [Kill("generate", 0), Kill("generate", 0)]
EXPIRES_UNTAKEN = [*NOBODY_GENERATES, Submit(0, 1, hasty=True), Lose("control", 0, "redis", "request", 1), Pass(20.0)]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(ANOTHER_BODY, id="the conflict is not heard of and must not be taken for the other's answer"),
        pytest.param(EXPIRES_UNTAKEN, id="what expired in its queue is told as that also at the second try"),
    ],
)
def test_a_schedule_that_once_went_wrong_goes_right(steps: list[Step]) -> None:
    tell(steps)


DEADLY_ONE = Submit(0, 3, deadly=True)
NEIGHBOURS = [Submit(0, 1), Submit(1, 2), Submit(2, 1)]
DEADLY_ONES: Final[list[Step]] = [*NEIGHBOURS, DEADLY_ONE, DEADLY_ONE, *NEIGHBOURS, DEADLY_ONE, Pass(60.0)]


def test_requests_that_take_workers_down_are_given_up_and_their_neighbours_are_answered() -> None:
    tell(DEADLY_ONES)


Plant = Callable[[pytest.MonkeyPatch], None]


def unsuspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is tried alone."""
    monkeypatch.setattr(ClaimRequest, "suspect_from", 99)


def unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was replaced may go on writing."""
    judge = embedded.log._judge

    def lenient(run: Run, batch: Batch) -> Append:
        answer = judge(run, batch)
        return Append.STORED if answer is Append.FENCED and run.outcome is None else answer

    monkeypatch.setattr(embedded.log, "_judge", lenient)


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process held is gone with it, as if it had been acked before it was done."""
    monkeypatch.setattr(StoredQueue, "give_back", lambda *_: None)


def started_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes over begins with the first token."""
    admit = NullEngine.admit
    monkeypatch.setattr(NullEngine, "admit", lambda self, admission: admit(self, replace(admission, resume=())))


def overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last outcome wins."""

    async def outcome(self: EmbeddedRuns, run: str, event: bytes, replay_ttl: float) -> bytes:
        self._shelf.put(run, self._shelf.clock() + replay_ttl).outcome = event
        return event

    monkeypatch.setattr(EmbeddedRuns, "outcome", outcome)


def unsorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client takes chunks as they come."""

    def put(self: Order[object], seq: int, item: object) -> None:
        self._held[self.expected] = item
        self.expected += 1

    monkeypatch.setattr(Order, "put", put)


@pytest.mark.parametrize(
    ("plant", "steps"),
    [
        (unfenced, [*BEGUN, Freeze("generate", 0, 8.5), Pass(20.0)]),
        (forgotten, [*BEGUN, Kill("generate", 0, 0.3), Pass(1.0)]),
        (started_over, [*BEGUN, Kill("generate", 0, 0.3), Pass(20.0)]),
        (overwritten, [*BEGUN, Freeze("derender", 0, 25.0, At("outcome", after=False)), Pass(10.0)]),
        (unsuspected, DEADLY_ONES),
        (unsorted, [*BEGUN, Spoil(0, "twice", 6), Pass(1.0)]),
    ],
)
def test_a_fault_that_is_planted_is_seen(plant: Plant, steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    tell(steps)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        tell(steps)
