"""The rim where AMQP's errors become ours, and how long to wait before the next attempt."""

import asyncio

import aiormq.exceptions as amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.ports import BrokerError, BrokerUnavailable, TopologyDrift, Unroutable
from headrace.broker.rabbitmq.connection import DEFAULT_TIMING, Counters, State, Supervisor, backoff, rim


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_wait_doubles_up_to_its_cap_and_half_of_it_is_jitter(attempt: int, draw: float) -> None:
    ceiling = min(10.0, 0.1 * 2.0 ** min(attempt, 60))
    assert ceiling / 2 <= backoff(attempt, DEFAULT_TIMING, draw) <= ceiling


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (amqp.ChannelNotFoundEntity("NOT_FOUND"), Unroutable, "look: RabbitMQ has no queue 'q'"),
        (amqp.ChannelPreconditionFailed("PRECONDITION_FAILED - why"), TopologyDrift, "queue 'q'.*PRECONDITION_FAILED"),
        (amqp.ChannelAccessRefused("ACCESS_REFUSED - why"), BrokerError, "look: RabbitMQ refuses: ACCESS_REFUSED"),
        (amqp.ChannelLockedResource("RESOURCE_LOCKED"), BrokerError, "look: RabbitMQ refuses: RESOURCE_LOCKED"),
        (amqp.ConnectionClosed(320, "CONNECTION_FORCED"), BrokerUnavailable, "look: .*CONNECTION_FORCED"),
        (amqp.ChannelInvalidStateError("closed"), BrokerUnavailable, "look: closed"),
        (ConnectionResetError(), BrokerUnavailable, "look: ConnectionResetError"),
        (asyncio.CancelledError(), BrokerUnavailable, "look: the connection to RabbitMQ was lost"),
    ],
)
async def test_an_error_of_amqp_is_told_as_ours(theirs: BaseException, ours: type[BrokerError], told: str) -> None:
    with pytest.raises(ours, match=told) as caught:
        async with rim("look", 5, "queue 'q'"):
            raise theirs
    assert caught.type is ours


async def test_a_silence_is_told_with_its_bound_and_what_may_explain_it() -> None:
    with pytest.raises(BrokerUnavailable, match=r"look: no answer from RabbitMQ within 0.01 s \(it is down\)"):
        async with rim("look", 0.01, state=lambda: "it is down"):
            await asyncio.Event().wait()


async def test_somebody_who_cancels_us_is_obeyed() -> None:
    inside = asyncio.Event()

    async def look() -> None:
        async with rim("look", 5):
            inside.set()
            await asyncio.Event().wait()

    looking = asyncio.create_task(look())
    await inside.wait()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert looking.cancelled()


async def test_a_fault_of_our_own_is_not_taken_for_the_brokers() -> None:
    with pytest.raises(ZeroDivisionError):
        async with rim("look", 5):
            raise ZeroDivisionError


def test_without_a_url_there_is_nothing_to_supervise() -> None:
    with pytest.raises(ValueError, match="urls"):
        Supervisor([], "test", DEFAULT_TIMING, Counters())


async def test_what_was_never_started_is_connecting_and_then_closed() -> None:
    supervisor = Supervisor(["amqp://nowhere/"], "test", DEFAULT_TIMING, Counters())
    before = supervisor.state
    await supervisor.close()
    assert (before, supervisor.state) == (State.CONNECTING, State.CLOSED)
    with pytest.raises(BrokerUnavailable, match="closed"):
        await supervisor.connection()


@pytest.mark.parametrize("instead", [None, amqp.ChannelInvalidStateError("closed"), TimeoutError()])
async def test_our_own_cancellation_goes_through_whatever_the_library_makes_of_it(instead: Exception | None) -> None:
    begun = asyncio.Event()

    async def look() -> None:
        async with rim("look", 5):
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if instead is not None:
                    raise instead from None

    looking = asyncio.create_task(look())
    await begun.wait()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
