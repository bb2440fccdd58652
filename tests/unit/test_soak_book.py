"""The book of a soak: what is lost, doubled, wrong or told again does not go unseen."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from headrace.protocol.errors import Interrupted
from headrace.protocol.jobs import ChunkEvent, FinalEvent, run_of
from headrace.workers.outcome import failed
from ops.soak.book import Book, Counts, Expected

CLIENT = "c"
EXPECTED = Expected(({"text": "a"}, {"text": "b"}), {"text": "ab"})


def chunk(seq: int, text: str) -> ChunkEvent:
    body = Raw(msgspec.json.encode({"id": "r", "created": 7, "text": text}))
    return ChunkEvent(client=CLIENT, request_id="r", seq=seq, chunk=body)


def final(text: str = "ab", *, at: float = 1.0) -> FinalEvent:
    body = Raw(msgspec.json.encode({"id": "r", "created": 7, "text": text}))
    run = run_of(CLIENT, "r")
    return FinalEvent(client=CLIENT, request_id="r", event_id=run, response=body, chunks=2, finished_at=at)


@pytest.fixture
def book() -> Book:
    book = Book()
    book.owe(CLIENT, "r", EXPECTED)
    return book


def told(book: Book, *events: ChunkEvent | FinalEvent) -> Counts:
    for event in events:
        book.heard(event)
    return book.counts


def test_an_answer_that_comes_whole_breaks_nothing(book: Book) -> None:
    assert [book.heard(event) for event in (chunk(0, "a"), chunk(1, "b"), final())] == [False, False, True]
    book.handed_over(CLIENT, "r", final(), None)
    assert (book.lost(), book.broken) == ([], [])
    assert (book.counts.outcomes, book.counts.told_again, book.counts.chunks_again) == (1, 0, 0)


@pytest.mark.parametrize("events", [[], [chunk(0, "a"), chunk(1, "b")], [chunk(0, "a"), final()]])
def test_what_does_not_come_is_lost(events: list[ChunkEvent | FinalEvent], book: Book) -> None:
    told(book, *events)
    assert book.lost() == [run_of(CLIENT, "r")]


def test_the_same_once_more_is_told_again_and_no_more_than_that(book: Book) -> None:
    counts = told(book, chunk(0, "a"), chunk(0, "a"), chunk(1, "b"), final(), final())
    assert (counts.chunks_again, counts.told_again, counts.doubled, counts.wrong) == (1, 1, 0, 0)


def test_another_outcome_is_a_double(book: Book) -> None:
    assert told(book, final(), final(at=2.0)).doubled == 1
    book.handed_over(CLIENT, "r", final(at=3.0), None)
    assert book.counts.doubled == 2


def test_what_the_sdk_hands_over_twice_is_a_double(book: Book) -> None:
    for _ in range(2):
        book.handed_over(CLIENT, "r", final(), None)
    assert book.counts.doubled == 1


@pytest.mark.parametrize("event", [chunk(0, "b"), chunk(2, "c"), final("ax")])
def test_what_an_undisturbed_line_does_not_say_is_wrong(event: ChunkEvent | FinalEvent, book: Book) -> None:
    assert told(book, event).wrong == 1


def test_an_error_is_wrong(book: Book) -> None:
    book.heard(failed(final(), Interrupted("the worker was lost")))
    book.handed_over(CLIENT, "r", None, Interrupted("the worker was lost"))
    assert book.counts.wrong == 2


def test_an_event_of_a_request_that_was_never_sent_is_wrong() -> None:
    assert told(Book(), final()).wrong == 1
