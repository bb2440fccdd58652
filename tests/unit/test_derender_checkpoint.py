"""A checkpoint loses nothing: whoever goes on from one tells what the one before would have told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.broker.embedded.log import entries_of
from headrace.broker.entries import Entry, Position
from headrace.broker.ports import Delivery
from headrace.protocol import jobs
from headrace.protocol.errors import HeadraceError
from headrace.protocol.jobs import DerenderJob, GenerateJob
from headrace.protocol.wire import TokenChoice, TokenChunk, TokenLogprob, TokenLogprobEntry, TokenLogprobs, Usage
from headrace.workers.derender import Derenderer, checkpoint
from headrace.workers.derender.checkpoint import CORE, Saved
from headrace.workers.derender.outbox import Outbox
from headrace.workers.derender.telling import telling_of
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower
from headrace.workers.generate.writer import Writing
from headrace.workers.outcome import End
from tests.line import demo_spec, raw

PIECES = (
    "<think>",
    "I should look",
    "</think>",
    "\n\n",
    "Hello, 你好 🙂 ",
    '<tool_call>\n{"name": "look", "arguments": {"at": "<b>7</b>", "deep": ',
    "[1, 2]}}",
    "\n</tool_call>",
    "<tool",
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1}
PROMPT = [5, 6, 7]
RUN = jobs.run_of("tester", "r")
DELIVERY = Delivery("derender.demo", b"", "r", {}, redelivered=False, token=None)


@cache
def derenderer() -> Derenderer:
    return Derenderer.load(demo_spec().path, reasoning_parser="qwen3", tool_parser="hermes", max_model_len=4096)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_spec().path / "tokenizer.json"))


def job_of(kind: str) -> GenerateJob:
    who: dict[str, Any] = {"client": "tester", "request_id": "r", "model": "demo", "submitted_at": 1.0}
    request = {"token_ids": PROMPT, "sampling_params": {"logprobs": 1}}
    match kind:
        case "chat":
            return GenerateJob(**who, request=raw(request), endpoint="/v1/chat/completions", source=raw(ASKED))
        case "completion":
            asked = {"prompt": "Hi", "n": 2, "logprobs": 1}
            return GenerateJob(**who, request=raw(request), endpoint="/v1/completions", source=raw(asked))
        case "text":
            return GenerateJob(**who, request=raw(request | {"output_mode": "text", "request_id": "r"}))
        case _:
            return GenerateJob(**who, request=raw(request), delivery="tokens")


def told_of(job: GenerateJob, saved: Saved | None = None) -> Told:
    derender = DerenderJob(**jobs.follow_on(job), endpoint=job.endpoint)
    telling = telling_of(derenderer(), job, None if saved is None else bytes(saved.telling))
    return Told(derender, DELIVERY, 1, telling, None if saved is None else saved.follower())


def chunk_of(index: int, ids: Sequence[int], *, last: bool) -> TokenChunk:
    logprobs = TokenLogprobs([TokenLogprobEntry(i, -0.5, 1, [TokenLogprob(i + 1, -0.7, 2)]) for i in ids])
    choice = TokenChoice(index, token_ids=list(ids), logprobs=logprobs, finish_reason="stop" if last else None)
    return TokenChunk("r", [choice])


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """A whole log of two choices that take turns, in chunks of any size."""
    left = [
        tokenizer().encode("".join(draw(st.lists(st.sampled_from(PIECES), max_size=6))), add_special_tokens=False).ids
        for _ in range(2)
    ]
    chunks: list[TokenChunk] = []
    while any(ids is not None for ids in left):
        index = draw(st.sampled_from([n for n in range(2) if left[n] is not None]))
        size = draw(st.integers(1, 4))
        ids, rest = left[index][:size], left[index][size:]
        chunks.append(chunk_of(index, ids, last=not rest))
        left[index] = rest or None  # type: ignore[call-overload]
    writing = Writing("r", after=Position(1, 0), chunks=0, running=Follower().running)
    writing.add(chunks, End(Usage(len(PROMPT), 9, 6)))
    begin = Entry(Position(1, 0), "begin", b'{"worker":"w","at":0.0,"chunks":0}', 0)
    return [begin, *entries_of(writing.batch())]


def events(told: Told, entries: Sequence[Entry]) -> list[bytes]:
    """What the client hears of these entries, event by event."""
    outbox = Outbox()
    told.take(entries, outbox)
    assert told.lost is None
    messages = outbox.take().get("amqp", [])
    return [jobs.encode(event) for message in messages for event in jobs.decode_events(message.body)]


def outcome(told: Told) -> bytes:
    return jobs.encode(msgspec.structs.replace(told.outcome(), finished_at=0.0))


@given(log=logs(), kind=st.sampled_from(("chat", "completion", "text", "tokens")), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_run_that_is_taken_over_anywhere_is_told_as_if_it_was_not(
    log: list[Entry], kind: str, data: st.DataObject
) -> None:
    job = job_of(kind)
    undisturbed = told_of(job)
    expected = events(undisturbed, log)
    assert len(expected) == len(log) - 2

    cuts = sorted(data.draw(st.lists(st.integers(0, len(log) - 1), min_size=1, max_size=3)))
    told, heard, before = told_of(job), list[bytes](), 0
    for cut in cuts:
        heard += events(told, log[before:cut])
        saved = checkpoint.read(checkpoint._encode(Saved.of(told)), job.run)
        assert saved is not None
        told, before = told_of(job, saved), cut
    heard += events(told, log[before:])
    assert heard == expected

    assert told.partial
    follower = Follower()
    told.recall([chunk for entry in log if (chunk := follower.follow(entry)) is not None])
    assert outcome(told) == outcome(undisturbed)


def state_of(told: Told, **changed: object) -> bytes:
    return json.dumps(json.loads(checkpoint._encode(Saved.of(told))) | changed).encode()


def test_a_checkpoint_of_this_core_is_read() -> None:
    saved = checkpoint.read(state_of(told_of(job_of("chat"))), RUN)
    assert saved is not None
    assert (saved.core, saved.chunks, saved.follower().position) == (CORE, 0, Position())


@pytest.mark.parametrize("core", ["", "0", CORE[:-1], CORE + "0", None, 7])
def test_a_checkpoint_of_another_core_is_not_used(core: object) -> None:
    assert checkpoint.read(state_of(told_of(job_of("chat")), core=core), RUN) is None


@given(st.binary(max_size=100))
def test_bytes_that_are_no_checkpoint_are_not_used(state: bytes) -> None:
    assert checkpoint.read(state, RUN) is None


def test_a_checkpoint_that_is_cut_short_or_of_another_run_is_not_used() -> None:
    state = state_of(told_of(job_of("chat")))
    assert checkpoint.read(state, RUN) is not None
    assert [checkpoint.read(state[:cut], RUN) for cut in range(len(state))] == [None] * len(state)
    assert checkpoint.read(state, jobs.run_of("tester", "another")) is None


@pytest.mark.parametrize("telling", ["{}", '{"choices":{"0":{"scan":{"phase":"call"}}}}', '{"choices":{"x":{}}}', "[]"])
def test_a_telling_that_cannot_be_restored_says_so(telling: str) -> None:
    saved = msgspec.structs.replace(Saved.of(told_of(job_of("chat"))), telling=msgspec.Raw(telling.encode()))
    with pytest.raises((ValueError, HeadraceError)):
        told_of(job_of("chat"), saved)


def test_a_checkpoint_is_small_whatever_the_length_of_the_output() -> None:
    sizes = []
    for length in (10, 1000):
        ids = tokenizer().encode("The quick brown fox. " * length, add_special_tokens=False).ids[:length]
        writing = Writing("r", after=Position(1, 0), chunks=0, running=Follower().running)
        writing.add([chunk_of(0, [token], last=False) for token in ids])
        told = told_of(job_of("chat"))
        events(told, entries_of(writing.batch()))
        sizes.append(len(checkpoint._encode(Saved.of(told))))
    assert sizes[1] < sizes[0] + 40
    assert sizes[1] < 1000
