"""A batch: a clear row for every line, each line once, whatever stops it on the way."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

import headrace.batch.run
import headrace.client.many
from headrace.batch.ledger import Ledger, LedgerError
from headrace.batch.lines import Line, Refused, Row, read_line
from headrace.batch.run import Batch
from headrace.batch.tally import Tally, output_tokens
from headrace.client import Broken, Headrace
from headrace.protocol import errors
from headrace.protocol.jobs import Job, Terminal
from headrace.settings import Settings
from tests.unit.scripted import BOUND, Scripted, error, final

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}

Rows = list[dict[str, Any]]


def line(custom_id: object = "a", *, url: object = "/v1/chat/completions", body: object = HELLO, **more: object) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


class Files:
    """The three files of a batch."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.errors = folder / "out.jsonl.errors.jsonl"
        self.run = folder / "out.jsonl.run"

    def write(self, lines: Iterable[str]) -> None:
        self.source.write_text("".join(f"{text}\n" for text in lines))

    def results(self) -> Rows:
        return read(self.out)

    def failures(self) -> Rows:
        return read(self.errors)


def read(file: Path) -> Rows:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.client.many, "pause", lambda tries, at_least: 0.0)
    monkeypatch.setattr(headrace.batch.run, "DRAIN_S", 0.05)


Answer = Callable[[Job], Terminal | None]


@asynccontextmanager
async def answered_by(servers: Scripted, answer: Answer) -> AsyncIterator[list[str]]:
    """Servers that answer each job; the list holds the request ids that they were asked."""
    asked: list[str] = []

    async def work() -> None:
        while True:
            job = await servers.job()
            asked.append(job.request_id)
            event = answer(job)
            if event is not None:
                servers.tell(job, event)

    task = asyncio.create_task(work())
    try:
        yield asked
    finally:
        task.cancel()


class Played:
    """What came of one run over the files."""

    def __init__(self) -> None:
        self.finished = False
        self.asked: list[str] = []
        self.tally = Tally(started=0.0)


async def play(
    files: Files,
    answer: Answer = final,
    *,
    servers: Scripted | None = None,
    stop: asyncio.Event | None = None,
    max_in_flight: int = 8,
    **given_settings: object,
) -> Played:
    servers = servers or Scripted()
    config = Settings(**given_settings)  # type: ignore[arg-type]
    played = Played()
    async with asyncio.timeout(BOUND):
        with Ledger.opened(files.out, files.errors) as ledger:
            batch = Batch(files.source, ledger, config, played.tally, max_in_flight)
            async with (
                Headrace.connect(config, broker=servers.broker, topic=ledger.batch) as hr,
                answered_by(servers, answer) as asked,
            ):
                played.asked = asked
                played.finished = await batch.run(hr, stop or asyncio.Event())
    return played


# ----------------------------------------------------------------------------------------------- reading a line


@pytest.mark.parametrize(
    ("text", "code", "param", "custom_id"),
    [
        ("no json", "invalid_json_line", None, None),
        ("[1]", "invalid_json_line", None, None),
        ('{"custom_id": "a"', "invalid_json_line", None, None),
        (line(...), "missing_required_parameter", "custom_id", None),
        (line(5), "invalid_custom_id", "custom_id", None),
        (line(None), "invalid_custom_id", "custom_id", None),
        (line(""), "invalid_custom_id", "custom_id", None),
        (line("x" * 513), "invalid_custom_id", "custom_id", None),
        (line(method="GET"), "invalid_method", "method", "a"),
        (line(method=3), "invalid_method", "method", "a"),
        (line(method=...), "missing_required_parameter", "method", "a"),
        (line(url="/v1/embeddings"), "invalid_url", "url", "a"),
        (line(url=7), "invalid_url", "url", "a"),
        (line(url=...), "missing_required_parameter", "url", "a"),
        (line(body=...), "missing_required_parameter", "body", "a"),
    ],
)
def test_a_line_that_cannot_be_sent_is_refused_by_its_field(
    text: str, code: str, param: str | None, custom_id: str | None
) -> None:
    with pytest.raises(Refused) as refused:
        read_line(text.encode(), 3)
    assert (refused.value.refusal.code, refused.value.refusal.param) == (code, param)
    assert refused.value.custom_id == custom_id
    if param is not None:
        assert param in refused.value.refusal.message


def test_a_line_is_asked_under_the_same_id_in_a_batch_and_under_another_if_it_changed() -> None:
    def request_id(batch: str, text: str, number: int = 1) -> str | None:
        return read_line(text.encode(), number).request(batch).request_id

    first = request_id("b1", line("a"))
    assert first == request_id("b1", line("a"), number=7)
    others = {
        request_id("b2", line("a")),
        request_id("b1", line("b")),
        request_id("b1", line("a", body={"prompt": "x"})),
        request_id("b1", line("a", url="/v1/completions")),
    }
    assert len(others | {first}) == 5


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_whatever_a_line_holds_it_is_read_or_refused(text: bytes) -> None:
    try:
        read_line(text, 1)
    except Refused as refused:
        json.loads(json.dumps(refused.refusal.message))


def test_the_body_is_sent_as_it_stands_in_the_line() -> None:
    body = '{ "prompt":"x",   "top_p": 1.00 }'
    text = f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}'
    sent = read_line(text.encode(), 1).body
    assert bytes(sent).strip() == body.encode()


def test_output_tokens_come_from_the_usage_or_else_from_the_ids() -> None:
    assert output_tokens(Raw(b'{"usage": {"completion_tokens": 7}, "choices": [{"token_ids": [1]}]}')) == 7
    assert output_tokens(Raw(b'{"choices": [{"token_ids": [1, 2]}, {"token_ids": null}, {}]}')) == 2


# ----------------------------------------------------------------------------------------------- rows


async def test_each_answered_line_gets_its_row_in_the_output_form(files: Files) -> None:
    files.write([line(f"q{at}") for at in range(20)])
    played = await play(files)
    assert played.finished
    rows = files.results()
    assert sorted(row["custom_id"] for row in rows) == sorted(f"q{at}" for at in range(20))
    row = rows[0]
    assert set(row) == {"id", "custom_id", "response", "error"}
    assert row["id"].startswith("batch_req_")
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    assert row["response"]["request_id"] in played.asked
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "done"
    assert not files.errors.exists()
    assert not files.run.exists()
    assert (played.tally.answered, played.tally.tokens, played.tally.size) == (20, 40, files.source.stat().st_size)


async def test_a_bad_line_gets_its_own_error_and_the_rest_is_unharmed(files: Files) -> None:
    generate = "/inference/v1/generate"
    files.write(
        [
            line("good"),
            "{ torn",
            line("no messages", body={"messages": []}),
            line("negative", url=generate, body={"token_ids": [1, -1], "sampling_params": {}}),
            line("good"),
            line("elsewhere", url="/v1/embeddings"),
            "",
            line("tokens", url=generate, body={"token_ids": [1], "sampling_params": {}}),
        ]
    )
    played = await play(files)
    assert played.finished
    assert sorted(row["custom_id"] for row in files.results()) == ["good", "tokens"]
    failures = {(row["custom_id"], (row["error"] or {}).get("line")): row for row in files.failures()}
    assert set(failures) == {
        (None, 2),
        ("no messages", None),
        ("negative", None),
        ("good", 5),
        ("elsewhere", 6),
    }
    assert failures[None, 2]["error"]["code"] == "invalid_json_line"
    assert failures[None, 2]["response"] is None
    assert failures["good", 5]["error"] == {
        "code": "duplicate_custom_id",
        "message": "custom_id 'good' is that of an earlier line.",
        "param": "custom_id",
        "line": 5,
    }
    refused = failures["no messages", None]
    assert refused["error"] is None
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "messages"
    assert failures["negative", None]["response"]["body"]["error"]["param"] == "token_ids.1"
    assert played.tally.failures == {
        "invalid_json_line": 1,
        "duplicate_custom_id": 1,
        "invalid_url": 1,
        "BadRequestError": 2,
    }


async def test_what_the_servers_refuse_stands_in_the_error_file_with_their_words(files: Files) -> None:
    files.write([line("a"), line("b")])

    def answer(job: Job) -> Terminal:
        return error(job, "not_found", 404, "NotFoundError", message="No such model.", param="model")

    await play(files, answer)
    assert files.results() == []
    assert [row["response"]["status_code"] for row in files.failures()] == [404, 404]
    assert files.failures()[0]["response"]["body"] == {
        "error": {"message": "No such model.", "type": "NotFoundError", "param": "model", "code": 404}
    }


async def test_a_retryable_failure_is_tried_again(files: Files) -> None:
    files.write([line("a")])

    def answer(job: Job) -> Terminal:
        if job.request_id.endswith(".2"):
            return final(job)
        return error(job, "stream_lost", 500, "StreamLostError", retryable=True)

    played = await play(files, answer)
    assert len(played.asked) == 3
    assert [row["custom_id"] for row in files.results()] == ["a"]


async def test_a_line_over_the_bound_is_refused_without_being_read_whole(files: Files) -> None:
    files.write([line("big", body={"prompt": "x" * 100_000}), line("a")])
    await play(files, max_request_bytes=2048)
    assert [row["custom_id"] for row in files.results()] == ["a"]
    assert [(row["error"]["code"], row["error"]["line"]) for row in files.failures()] == [("line_too_long", 1)]


async def test_stream_true_gets_the_whole_response(files: Files) -> None:
    files.write([line("a", body=HELLO | {"stream": True})])
    deliveries = []

    def answer(job: Job) -> Terminal:
        deliveries.append(job.delivery)
        return final(job)

    await play(files, answer)
    assert deliveries == ["final"]
    assert len(files.results()) == 1


async def test_a_byte_order_mark_carriage_returns_and_a_missing_last_newline_do_no_harm(files: Files) -> None:
    files.source.write_bytes(b"\xef\xbb\xbf" + line("a").encode() + b"\r\n\r\n" + line("b").encode())
    await play(files)
    assert sorted(row["custom_id"] for row in files.results()) == ["a", "b"]


async def test_no_more_lines_are_under_way_than_allowed(files: Files) -> None:
    files.write([line(f"q{at}") for at in range(30)])
    under_way: list[Job] = []
    most = 0
    servers = Scripted()

    def answer(job: Job) -> None:
        nonlocal most
        under_way.append(job)
        most = max(most, len(under_way))
        if len(under_way) == 3 or servers.queues.waiting == 0:
            while under_way:
                servers.tell(job := under_way.pop(), final(job))

    await play(files, answer, servers=servers, max_in_flight=3)
    assert len(files.results()) == 30
    assert most <= 3


async def test_memory_is_flat_over_the_lines(files: Files) -> None:
    async def peak(lines: int) -> int:
        files.out.unlink(missing_ok=True)
        files.errors.unlink(missing_ok=True)
        files.write(line(f"q{at}", url="/v1/embeddings") for at in range(lines))
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        played = await play(files)
        assert played.tally.failed == lines
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        await peak(100)
        assert await peak(10_000) - await peak(1_000) < 200_000
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------------- going on


async def test_a_finished_batch_has_nothing_left_to_do(files: Files) -> None:
    files.write([line("a"), "bad", line("b")])
    await play(files)
    again = await play(files)
    assert again.finished
    assert again.asked == []
    assert len(files.results()) == 2 and len(files.failures()) == 1


async def test_failed_lines_are_tried_again_once_the_error_file_is_gone(files: Files) -> None:
    files.write([line("a"), line("b")])
    first = await play(files, lambda job: error(job, "internal", 500, "InternalServerError"))
    files.errors.unlink()
    second = await play(files)
    assert sorted(row["custom_id"] for row in files.results()) == ["a", "b"]
    assert set(first.asked).isdisjoint(second.asked)


@pytest.mark.parametrize("edited", [["a", "c", "b"], ["a", "b"], ["c", "a", "b"]])
async def test_a_line_that_stands_where_another_was_refused_is_run(files: Files, edited: list[str]) -> None:
    files.write([line("a"), "bad"])
    await play(files)
    files.write(map(line, edited))
    assert (await play(files)).finished
    assert sorted(row["custom_id"] for row in files.results()) == sorted(edited)


async def test_a_stopped_batch_goes_on_under_the_same_request_ids(files: Files) -> None:
    files.write([line(f"q{at}") for at in range(10)])
    stop = asyncio.Event()
    seen = 0

    def answer(job: Job) -> Terminal | None:
        nonlocal seen
        seen += 1
        if seen == 6:
            stop.set()
        return final(job) if seen < 4 else None

    first = await play(files, answer, stop=stop, max_in_flight=4)
    assert not first.finished
    assert len(files.results()) == 3
    assert files.run.exists()

    second = await play(files)
    assert second.finished
    assert set(first.asked[3:]) <= set(second.asked)
    assert sorted(row["custom_id"] for row in files.results()) == sorted(f"q{at}" for at in range(10))


async def test_lines_under_way_may_end_after_the_stop(files: Files) -> None:
    files.write([line("a"), line("b")])
    stop = asyncio.Event()

    def answer(job: Job) -> Terminal:
        stop.set()
        return final(job)

    played = await play(files, answer, stop=stop, max_in_flight=1)
    assert not played.finished
    assert [row["custom_id"] for row in files.results()] == ["a"]


async def test_a_broken_client_stops_the_batch_and_fails_no_line(files: Files) -> None:
    files.write([line("a"), line("b")])
    servers = Scripted()
    with pytest.raises(Broken):
        await play(files, lambda job: servers.topics.end(), servers=servers)
    assert files.failures() == []
    assert (await play(files)).finished


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(cut=st.integers(0, 5_000), in_errors=st.booleans())
def test_wherever_a_crash_cut_the_files_each_line_has_one_row_in_the_end(
    tmp_path_factory: pytest.TempPathFactory, cut: int, in_errors: bool
) -> None:
    files = Files(tmp_path_factory.mktemp("cut"))
    files.write([line(f"q{at}") if at % 3 else line(f"q{at}", body={"messages": []}) for at in range(12)])
    asyncio.run(play(files))
    torn = files.errors if in_errors else files.out
    torn.write_bytes(torn.read_bytes()[:cut])
    assert asyncio.run(play(files)).finished
    assert sorted(row["custom_id"] for row in files.results()) == sorted(f"q{at}" for at in range(12) if at % 3)
    assert sorted(row["custom_id"] for row in files.failures()) == sorted(f"q{at}" for at in range(0, 12, 3))


# ----------------------------------------------------------------------------------------------- the ledger


def test_two_processes_never_write_the_same_batch(files: Files) -> None:
    with (
        Ledger.opened(files.out, files.errors),
        pytest.raises(LedgerError, match=r"out\.jsonl\.run"),
        Ledger.opened(files.out, files.errors),
    ):
        pass


def test_a_file_that_is_no_batch_is_left_alone(files: Files) -> None:
    files.out.write_text("my notes\nof today\n")
    with pytest.raises(LedgerError, match=r"out\.jsonl: line 1"), Ledger.opened(files.out, files.errors):
        pass
    assert files.out.read_text() == "my notes\nof today\n"
    assert not files.run.exists()


@pytest.mark.parametrize("which", ["out", "errors"])
def test_a_device_is_no_file_of_a_batch(files: Files, which: str) -> None:
    named = {"out": files.out, "errors": files.errors} | {which: Path("/dev/full")}
    with pytest.raises(LedgerError, match="/dev/full is not a regular file"), Ledger.opened(**named):
        pass
    assert not files.run.exists()
    assert not Path("/dev/full.run").exists()


def test_a_full_disk_is_said_with_the_file_and_what_is_written_stays(files: Files) -> None:
    def row(custom_id: str) -> Row:
        return read_line(line(custom_id).encode(), 1).answered("r", Raw(b"{}"))

    with Ledger.opened(files.out, files.errors) as ledger, Path("/dev/full").open("wb", buffering=0) as full:
        ledger.write(row("a"))
        ledger._out, whole = full, ledger._out
        with pytest.raises(LedgerError, match=r"/dev/full: No space left on device"):
            ledger.write(row("b"))
        ledger._out = whole
    with Ledger.opened(files.out, files.errors) as again:
        assert again.done_before == 1


def test_a_killed_batch_keeps_its_name_and_a_finished_one_gives_it_up(files: Files) -> None:
    names = []
    for finish in (False, True, False):
        with Ledger.opened(files.out, files.errors) as ledger:
            names.append(ledger.batch)
            ledger.meet("a")
            if finish:
                ledger.finish()
    assert names[0] == names[1] != names[2]


def test_a_line_read_is_known_by_its_row() -> None:
    text = line("a").encode()
    parsed = read_line(text, 1)
    assert isinstance(parsed, Line)
    row = parsed.failed("r", errors.NotFound("No such model.", param="model"))
    assert row.custom_id == "a" and row.response is not None and row.response.status_code == 404


def test_a_tally_tells_counts_and_rates() -> None:
    tally = Tally(started=10.0, done_before=5, answered=20, tokens=400)
    tally.failures.update(["BadRequestError", "BadRequestError", "invalid_url"])
    assert tally.summary(20.0).splitlines() == [
        "20 answered, 3 failed, 5 done before; 2.0 requests/s, 40 output tokens/s; 10.0 s",
        "  2 x BadRequestError",
        "  1 x invalid_url",
    ]


def test_a_batch_that_never_came_to_its_first_line_leaves_no_files(tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    with pytest.raises(RuntimeError), Ledger.opened(out, errors):
        raise RuntimeError("the model was refused")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_sent_a_line_keeps_its_name_for_the_next_run(tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    with Ledger.opened(out, errors) as ledger:
        ledger.meet("a")
        name = ledger.batch
    with Ledger.opened(out, errors) as again:
        assert again.batch == name


def test_an_output_in_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(LedgerError, match="nowhere is not a folder"),
        Ledger.opened(tmp_path / "nowhere" / "o", tmp_path / "e"),
    ):
        pass
