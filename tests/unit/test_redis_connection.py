"""A connection to Redis gives each caller his own replies, whatever the socket and the other callers do."""

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.redis.connection import Connection, ConnectionLost


class Wire(asyncio.Transport):
    """A socket that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.aborted.set()


def connected() -> tuple[Connection, Wire]:
    connection, wire = Connection(asyncio.get_running_loop()), Wire()
    connection.connection_made(wire)
    return connection, wire


async def turn() -> None:
    """Everything that is due now has run."""
    for _ in range(3):
        await asyncio.sleep(0)


@given(
    values=st.lists(st.binary(max_size=30), min_size=1, max_size=20),
    counts=st.data(),
    cuts=st.lists(st.integers(0, 400), max_size=20),
)
def test_replies_go_to_their_callers_however_the_bytes_arrive(
    values: list[bytes], counts: st.DataObject, cuts: list[int]
) -> None:
    async def main() -> None:
        connection, _ = connected()
        asks, rest = [], list(values)
        while rest:
            count = counts.draw(st.integers(1, len(rest)))
            asks.append((connection.post(b"", count, 60.0), rest[:count]))
            del rest[:count]
        for number, (waiter, _) in enumerate(asks):
            if number % 3 == 1:
                waiter.cancel()
        stream = b"".join(b"$%d\r\n%s\r\n" % (len(value), value) for value in values)
        edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
        for start, end in itertools.pairwise(edges):
            connection.data_received(stream[start:end])
        for waiter, expected in asks:
            assert waiter.cancelled() or await waiter == expected
        await done(connection)

    asyncio.run(main())


async def done(connection: Connection) -> None:
    connection.abort(ConnectionError("the test is over"))
    connection.connection_lost(None)


async def test_commands_of_one_turn_go_out_in_one_write_in_order() -> None:
    connection, wire = connected()
    asks = [asyncio.create_task(connection.ask(b"%d" % n, 1, 60.0)) for n in range(5)]
    await turn()
    assert wire.written == [b"01234"]
    connection.data_received(b":0\r\n:1\r\n:2\r\n:3\r\n:4\r\n")
    assert await asyncio.gather(*asks) == [[0], [1], [2], [3], [4]]
    await done(connection)


async def test_a_late_reply_breaks_the_connection_for_everybody() -> None:
    connection, wire = connected()
    first, second = connection.post(b"a", 1, 0.01), connection.post(b"b", 1, 60.0)
    async with asyncio.timeout(10):
        await wire.aborted.wait()
    connection.connection_lost(None)
    for waiter in (first, second):
        with pytest.raises(ConnectionLost, match="no reply in time"):
            await waiter
    assert not connection.open


async def test_the_reply_of_a_caller_who_gave_up_is_owed_all_the_same() -> None:
    connection, wire = connected()
    connection.post(b"a", 1, 0.01).cancel()
    async with asyncio.timeout(10):
        await wire.aborted.wait()
    connection.connection_lost(None)


async def test_replies_in_time_keep_the_connection() -> None:
    connection, wire = connected()
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, over.set)
    first, second = connection.post(b"a", 1, 0.01), connection.post(b"b", 1, 60.0)
    connection.data_received(b"+OK\r\n")
    await over.wait()  # the first would have been due, and somebody looked
    assert connection.open and not wire.aborted.is_set()
    connection.data_received(b"+OK\r\n")
    assert [*await first, *await second] == [b"OK", b"OK"]
    await done(connection)


@pytest.mark.parametrize(("said", "fault"), [(b"+OK\r\n+OK\r\n", "nobody asked for"), (b"?what\r\n", "Protocol error")])
async def test_what_is_no_reply_breaks_the_connection(said: bytes, fault: str) -> None:
    connection, wire = connected()
    waiter = connection.post(b"a", 2 if said.startswith(b"?") else 1, 60.0)
    connection.data_received(said)
    assert wire.aborted.is_set() and not connection.open
    connection.connection_lost(None)
    if said.startswith(b"?"):
        with pytest.raises(ConnectionLost, match=fault):
            await waiter
    else:
        assert await waiter == [b"OK"]
    with pytest.raises(ConnectionLost, match=fault):
        await connection.ask(b"b", 1, 60.0)


async def test_a_full_socket_holds_the_next_caller_back_until_it_drains() -> None:
    connection, wire = connected()
    connection.pause_writing()
    asking = asyncio.create_task(connection.ask(b"a", 1, 60.0))
    await turn()
    assert wire.written == []
    connection.resume_writing()
    await turn()
    assert wire.written == [b"a"]
    connection.data_received(b":1\r\n")
    assert await asking == [1]
    await done(connection)


async def test_a_caller_held_back_by_a_full_socket_hears_of_its_loss() -> None:
    connection, _ = connected()
    connection.pause_writing()
    asking = asyncio.create_task(connection.ask(b"a", 1, 60.0))
    await turn()
    connection.connection_lost(ConnectionResetError("reset by peer"))
    with pytest.raises(ConnectionLost, match="reset by peer"):
        await asking


async def test_error_replies_are_values_for_the_caller() -> None:
    connection, _ = connected()
    waiter = connection.post(b"a", 2, 60.0)
    connection.data_received(b"-ERR no such thing\r\n:1\r\n")
    error, one = await waiter
    assert isinstance(error, Exception) and str(error) == "ERR no such thing" and one == 1
    await done(connection)


async def test_closing_ends_every_wait() -> None:
    connection, wire = connected()
    waiter = connection.post(b"a", 1, 60.0)
    lost: Callable[[], None] = lambda: connection.connection_lost(None)  # noqa: E731
    asyncio.get_running_loop().call_soon(lost)
    await connection.close()
    assert wire.aborted.is_set()
    with pytest.raises(ConnectionLost, match="closed by us"):
        await waiter
