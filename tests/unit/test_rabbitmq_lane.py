"""A channel's books: every publish is answered once, and nothing is settled twice."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiormq import Connection
from aiormq.exceptions import ChannelInvalidStateError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp.header import ContentHeader

from headrace.broker.rabbitmq import frames
from headrace.broker.rabbitmq.channel import Lane, Outcome, Outgoing

JOB = Outgoing("", "render.m", b"{}", "r")
CHUNK = Outgoing("headrace.topics", "a.chunk", b"{}", durable=False)


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    """A connection that never connects: what is written stays in its queue."""
    connection = Connection("amqp://nowhere/")
    connection.connection_tune = spec.Connection.Tune(frame_max=4096)
    connection.server_properties = {"capabilities": {"publisher_confirms": True}}
    connection.write_queue = asyncio.Queue()
    yield connection
    for channel in list(connection.channels.values()):
        assert channel is not None
        await channel.close()


def a_lane(connection: Connection) -> Lane:
    number = len(connection.channels) + 1
    lane = Lane(connection, number, generation=number, confirms=True)
    connection.channels[number] = lane
    return lane


@pytest.mark.parametrize("ending", ["answered", "gone"])
async def test_a_flush_waits_for_what_was_sent_before_it_and_for_no_more(connection: Connection, ending: str) -> None:
    lane = a_lane(connection)
    for message in (JOB, CHUNK, CHUNK):
        lane.send(message)
    flushing = asyncio.create_task(lane.answered())
    await asyncio.sleep(0)
    lane.send(CHUNK)
    await lane._on_confirm_frame(spec.Basic.Ack(3))
    await lane._on_confirm_frame(spec.Basic.Ack(1))
    await asyncio.wait((flushing,), timeout=0.02)
    assert not flushing.done()
    if ending == "answered":
        await lane._on_confirm_frame(spec.Basic.Ack(2))
    else:
        await lane.close()
    async with asyncio.timeout(10):
        await flushing
        await a_lane(connection).answered()


async def returned(lane: Lane, tag: int) -> None:
    """What the broker sends when no queue takes a message."""
    lane.frames.put_nowait((0, spec.Basic.Return(312, "NO_ROUTE", "", "render.m")))
    properties = spec.Basic.Properties(message_id=f"{lane._name}-{tag}")
    lane.frames.put_nowait((0, ContentHeader(properties=properties, body_size=0)))


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[bool], list[tuple[str, int]]]:
    """Which of some publishes are durable, and the broker's replies to a part of them, in any legal order."""
    durable = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    open_tags = list(range(1, len(durable) + 1))
    told: list[tuple[str, int]] = []
    for _ in range(draw(st.integers(0, len(durable)))):
        if not open_tags:
            break
        tag = draw(st.sampled_from(open_tags))
        kind = draw(st.sampled_from(("ack", "nack", "return", "ack up to")))
        told.append((kind, tag))
        open_tags = [other for other in open_tags if (other > tag if kind == "ack up to" else other != tag)]
    return durable, told


@given(replies())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_every_durable_publish_gets_one_true_answer(
    connection: Connection, case: tuple[list[bool], list[tuple[str, int]]]
) -> None:
    durable, told = case
    lane = a_lane(connection)
    answers = [lane.send(JOB if is_durable else CHUNK) for is_durable in durable]
    expected = dict.fromkeys(range(1, len(durable) + 1), Outcome.LOST)
    for kind, tag in told:
        if kind == "return":
            await returned(lane, tag)
        frame = spec.Basic.Nack(tag) if kind == "nack" else spec.Basic.Ack(tag, multiple=kind == "ack up to")
        lane.frames.put_nowait((0, frame))
        covered = [other for other in expected if other <= tag] if kind == "ack up to" else [tag]
        meant = {"nack": Outcome.REJECTED, "return": Outcome.RETURNED}.get(kind, Outcome.CONFIRMED)
        expected |= {other: meant for other in covered if expected[other] is Outcome.LOST}
    lane.frames.put_nowait((0, spec.Channel.CloseOk()))
    await asyncio.wait((lane.gone,))
    await asyncio.sleep(0)
    got = {tag: answer.result() for tag, answer in enumerate(answers, start=1) if answer is not None}
    assert got == {tag: expected[tag] for tag in got}
    assert lane.in_flight == 0
    unheard = [tag for tag, answer in enumerate(answers, start=1) if answer is None and expected[tag] is Outcome.LOST]
    assert lane.lost == [CHUNK] * len(unheard)
    connection.channels.pop(lane.number)


async def test_a_lane_that_is_gone_sends_and_settles_nothing(connection: Connection) -> None:
    lane = a_lane(connection)
    lane.unsettled.add(1)
    lane.frames.put_nowait((0, spec.Channel.Close(406, "PRECONDITION_FAILED")))
    await asyncio.wait((lane.gone,))
    assert not lane.ack(1)
    assert not lane.requeue(1)
    assert not lane.ack_up_to(1)
    with pytest.raises(ChannelInvalidStateError):
        lane.send(JOB)


async def test_nothing_follows_our_answer_to_the_brokers_close(connection: Connection) -> None:
    lane = a_lane(connection)
    lane.unsettled |= {1, 2}
    lane.ack(1)
    lane.frames.put_nowait((0, spec.Channel.Close(406, "PRECONDITION_FAILED")))
    while lane.usable:
        await asyncio.sleep(0)
        lane.ack(2)
    await asyncio.wait((lane.gone,))
    written = [connection.write_queue.get_nowait().payload for _ in range(connection.write_queue.qsize())]
    assert written[-1] == bytes.fromhex("0100010000000400140029ce")  # channel.close-ok


async def test_a_tag_is_settled_once(connection: Connection) -> None:
    lane = a_lane(connection)
    lane.unsettled |= {1, 2, 3}
    assert lane.ack_up_to(2)
    assert not lane.ack(1)
    assert not lane.requeue(2)
    assert not lane.drained.is_set()
    assert lane.ack(3)
    assert lane.drained.is_set()


async def test_a_message_that_cannot_be_written_leaves_the_count_of_confirms_as_it_was(connection: Connection) -> None:
    lane = a_lane(connection)
    with pytest.raises(ValueError, match="over AMQP's limit"):
        lane.send(Outgoing("", "x" * 256, b""))
    answer = lane.send(JOB)
    assert answer is not None
    lane.frames.put_nowait((0, spec.Basic.Ack(1)))
    assert await answer is Outcome.CONFIRMED


async def test_an_ack_that_was_given_leaves_before_the_end(connection: Connection) -> None:
    lane = a_lane(connection)
    lane.unsettled |= {7, 8}
    assert lane.ack(7)
    await lane.shut()
    assert not lane.ack(8)
    assert connection.write_queue.get_nowait().payload == frames.ack(lane.number, 7)
    assert connection.write_queue.empty()
