"""What must be true of a story, whatever happened in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Final
from unittest.mock import patch

from headrace.broker.embedded import Embedded
from headrace.protocol import errors, jobs
from headrace.protocol.jobs import ChunkEvent, Event, FinalEvent, Terminal
from headrace.workers.derender import checkpoint
from headrace.workers.derender.derenderer import Derenderer
from headrace.workers.derender.rounds import Rounds
from headrace.workers.follow import Follower, read_all
from headrace.workers.holding import Holding
from headrace.workers.render.renderer import Renderer
from tests import virtual
from tests.chaos.schedules.answers import SPEC, answer_to, by_choice, derenderer, renderer, timeless
from tests.chaos.schedules.company import Asked, Requested
from tests.chaos.schedules.steps import Step
from tests.chaos.schedules.story import TERMS, Story

IDLE_S: Final = 5.0
"""The SDK may give up on a missing chunk, and says so, if there was nobody to tell it for so many seconds."""
EVER_S: Final = 3 * 24 * 3600.0
"""After so many seconds nothing may be kept of anything."""
CHECKPOINT_CHUNKS: Final = 8
BLAMED_FOR_OTHERS: Final = 2
"""Rescues that may be counted against a run for what another one did."""


def tell(steps: Sequence[Step], *, calls_tools: bool = False, delay: float = 0.0) -> None:
    """Runs a schedule, and checks what must be true at its end; ``delay`` is that of each way of a call, in seconds."""
    virtual.run(_tell, steps, calls_tools, delay)


async def _tell(steps: Sequence[Step], calls_tools: bool, delay: float) -> None:
    home = Embedded(clock=time.time)
    with _as_in_stories():
        async with AsyncExitStack() as stack:
            story = Story(home, calls_tools, stack)
            stack.push_async_callback(story.close)
            await story.open(delay)
            stack.push_async_callback(story.stop_reading)
            for step in steps:
                await story.take(step)
            await story.finish()
            await _check(story)
        await _check_that_nothing_is_left(story)
    home.close()


@contextmanager
def _as_in_stories() -> Iterator[None]:
    """Tokenizer and templates are loaded once for all workers; checkpoints come often; all clocks are the loop's."""
    renders, derenders = renderer(), derenderer()
    with (
        patch.object(Renderer, "load", lambda *_: renders),
        patch.object(Derenderer, "load", lambda *_, **__: derenders),
        patch.object(checkpoint, "EVERY_CHUNKS", CHECKPOINT_CHUNKS),
        patch.dict(Rounds.__init__.__kwdefaults__, clock=time.monotonic),
        patch.dict(Holding.__init__.__kwdefaults__, clock=time.time),
    ):
        yield


async def _check(story: Story) -> None:
    for request in story.requests:
        for asked in request.asked:
            await _check_answer(story, asked)
        if not request.lost:
            await _check_outcome(story, request)
            _check_numbers(story, request)
    given_up = any(isinstance(asked.error, errors.Exhausted) for request in story.requests for asked in request.asked)
    dead = await story.home.broker.queues.depth(jobs.DEAD_QUEUE)
    assert dead > 0 if given_up else dead == 0 or story.deaths


async def _check_answer(story: Story, asked: Asked) -> None:
    """What the SDK gave its user is the answer, or the beginning of it and an error that has its reason."""
    name = asked.request.request_id
    right = await answer_to(asked.wish, name, asked.seed, calls_tools=story.calls_tools)
    assert [seq for seq, _ in asked.chunks] == list(range(len(asked.chunks))), name
    if asked.request.ambiguous:
        return
    told = by_choice([raw for _, raw in asked.chunks])
    assert asked.error is not None or not asked.request.deadly, name
    if asked.error is None:
        assert asked.response is not None, name
        assert timeless(asked.response) == right.response, name
        assert told == right.chunks, name
        return
    for index, chunks in told.items():
        assert chunks == right.chunks[index][: len(chunks)], name
    assert _has_reason(story, asked), (name, asked.error)


def _has_reason(story: Story, asked: Asked) -> bool:
    request = asked.request
    match asked.error:
        case errors.Cancelled():
            return request.cancelled
        case errors.DeadlineExceeded():
            return asked.ended_at >= min(each.deadline for each in request.asked)
        case errors.Conflict():
            return len(request.bodies) > 1
        case errors.StreamLost(message=message):
            return request.lost or (story.idle_s > IDLE_S and "asked for" in message)
        case errors.NotFound():
            return request.lost
        case errors.Exhausted():
            blamed = BLAMED_FOR_OTHERS if story.deadly else 0
            return request.deadly or story.deaths - request.deaths_before + blamed > TERMS.max_rescues
        case _:
            return False


async def _check_outcome(story: Story, request: Requested) -> None:
    """It has one outcome, and whatever was told of it was that one, to all who asked."""
    outcome = await story.home.broker.runs.result(request.run)
    assert outcome is not None, request.request_id
    ends = [(topic, event) for topic, event in _heard_of(story, request) if isinstance(event, Terminal)]
    assert {jobs.encode(event) for _, event in ends if event.event_id == request.run} == {outcome}
    assert {topic for topic, _ in ends} >= {asked.stream.job.topic for asked in request.asked}
    stands = jobs.decode_terminal(outcome)
    if isinstance(stands, FinalEvent):
        follower = Follower()
        await read_all(story.home.broker.log, request.run, follower)
        assert follower.chunks == stands.chunks, request.request_id


def _check_numbers(story: Story, request: Requested) -> None:
    """Whoever listens by hand never hears two things under one number."""
    said: dict[int, bytes] = {}
    for _, event in _heard_of(story, request):
        if isinstance(event, ChunkEvent):
            first = said.setdefault(event.seq, bytes(event.chunk))
            assert bytes(event.chunk) == first, (request.request_id, event.seq)


def _heard_of(story: Story, request: Requested) -> list[tuple[str, Event]]:
    return [(topic, event) for topic, event in story.heard if event.run == request.run]


async def _check_that_nothing_is_left(story: Story) -> None:
    waiting = await story.waiting()
    assert not waiting, waiting
    await asyncio.sleep(EVER_S)
    await story.home.broker.runs.cancel("f" * 32, "whatever comes next frees what is over", 1.0)
    assert len(story.home.shelf) == 1
    assert not await story.home.broker.runs.reports(SPEC.name)
