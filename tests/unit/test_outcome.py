"""One outcome for each run, whoever writes it and however often it is told."""

from __future__ import annotations

import asyncio

from headrace.broker.embedded import Embedded
from headrace.protocol import jobs
from headrace.protocol.errors import Cancelled, DeadlineExceeded
from headrace.protocol.jobs import ErrorEvent, FinalEvent, GenerateJob
from headrace.workers.outcome import answered, conclude, failed
from tests.line import CLIENT, listening, raw

REQUEST = GenerateJob(client=CLIENT, request_id="r", model="demo", request=raw({}))


async def test_the_outcome_that_was_first_is_told_by_whoever_comes_later() -> None:
    home = Embedded()
    async with listening(home.broker) as client:
        await conclude(home.broker, answered(REQUEST, b'{"first":1}', chunks=3), to=REQUEST)
        await conclude(home.broker, failed(REQUEST, Cancelled("too late")), to=REQUEST)
        await client.until(lambda: len(client.outcomes("r")) == 2)
        first, again = client.outcomes("r")
        assert isinstance(first, FinalEvent)
        assert first == again
        assert bytes(first.response) == b'{"first":1}'
        assert await home.broker.runs.result(REQUEST.run) == jobs.encode(first)
    home.close()


async def test_an_error_is_told_as_it_is_stored() -> None:
    home = Embedded()
    async with listening(home.broker) as client, asyncio.timeout(10):
        late = failed(REQUEST, DeadlineExceeded("deadline: it passed"), chunks=2)
        await conclude(home.broker, late, to=REQUEST)
        told = await client.outcome("r")
        assert isinstance(told, ErrorEvent)
        assert jobs.encode(told) == jobs.encode(late) == await home.broker.runs.result(REQUEST.run)
    home.close()
