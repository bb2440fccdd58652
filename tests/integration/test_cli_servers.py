"""The commands that speak to real servers, one request at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli import main
from tests.integration.fleet import BOUND, Fleet, fleet, wait_until
from tests.servers import RabbitMQ, Redis

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def working(rabbitmq: RabbitMQ, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All roles for the model ``demo``, in one process; queues without workers for the model ``idle``."""
    with (
        rabbitmq.fresh_vhost() as vhost,
        redis_server.fresh_database() as database,
        fleet(vhost, database, tmp_path_factory.mktemp("cli")) as started,
    ):
        assert headrace(started, "topology", "idle").exit_code == 0
        started.workers(("all",))
        yield started


def headrace(working: Fleet, *arguments: str | Path) -> Result:
    own = {name: value for name, value in working.env.items() if name.startswith("HEADRACE_")}
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=own)


def test_topology_declares_the_queues_of_a_model_and_counts_what_waits(working: Fleet) -> None:
    told = headrace(working, "topology", "idle", "demo")
    assert told.exit_code == 0, told.stderr
    depths = {name: int(depth) for depth, name in map(str.split, told.stdout.splitlines())}
    roles = ("render", "render-high", "render-low", "generate", "generate-high", "generate-low", "derender")
    more = (*(f"generate-backlog{n}" for n in range(4)), "derender-replays")
    assert set(depths) == {
        *(f"{role}.{model}" for role in (*roles, *more) for model in ("idle", "demo")),
        *("control", "intake", "dead"),
    }
    assert depths["render.demo"] == 0


def test_doctor_finds_servers_that_are_ready(working: Fleet) -> None:
    told = headrace(working, "doctor")
    assert told.exit_code == 0, told.output
    assert told.stdout.count(": ready") == 2
    assert "guest:guest" not in told.output


def test_submit_prints_what_the_workers_say(working: Fleet) -> None:
    told = headrace(working, "submit", "--say", "hello", "--delivery", "tokens", "--json")
    assert told.exit_code == 0, told.stderr
    *chunks, response = [json.loads(text) for text in told.stdout.splitlines()]
    assert chunks
    assert response["model"] == "demo"


def test_submit_to_a_model_that_nobody_serves_is_one_sentence(working: Fleet) -> None:
    told = headrace(working, "submit", "--say", "hello", "--model", "nobody")
    assert (told.exit_code, told.stdout) == (1, "")
    assert told.stderr == "Error: model: 'nobody' is not served here; a model is served as its worker's --name.\n"


def test_the_result_of_a_request_is_found_after_its_submitter_is_gone(working: Fleet) -> None:
    submitted = headrace(working, "submit", "--say", "hello", "--no-wait")
    request_id = submitted.stdout.strip()
    wait_until(lambda: headrace(working, "result", request_id).exit_code == 0, "the result")
    found = json.loads(headrace(working, "result", request_id).stdout)
    assert found["object"] == "chat.completion"


def test_there_is_no_result_of_a_request_that_was_never_sent(working: Fleet) -> None:
    told = headrace(working, "result", "never-sent")
    assert (told.exit_code, told.stdout) == (1, "")
    assert "never-sent: no outcome is kept for client 'local'" in told.stderr


def test_a_request_that_waits_can_be_cancelled(working: Fleet) -> None:
    submitted = headrace(working, "submit", "--say", "hello", "--model", "idle", "--no-wait")
    request_id = submitted.stdout.strip()
    assert headrace(working, "cancel", request_id, "--reason", "no longer wanted").exit_code == 0

    def cancelled() -> bool:
        told = headrace(working, "result", request_id)
        return "no longer wanted" in told.stdout and told.exit_code == 1

    wait_until(cancelled, "the cancellation")


def test_tail_prints_the_events_of_a_request_up_to_its_end(working: Fleet) -> None:
    tailing, said = working.headrace("tail", "--request-id", "watched")
    wait_until(lambda: b"Listening" in said.read_bytes() or tailing.poll() is not None, "the subscription")
    told = headrace(working, "submit", "--say", "hello", "--request-id", "watched")
    assert told.exit_code == 0, told.stderr
    assert tailing.wait(timeout=BOUND) == 0, said.read_text()
    events = [json.loads(text) for text in said.read_text().splitlines() if text.startswith("{")]
    assert [event["type"] for event in events] == ["chunk"] * (len(events) - 1) + ["final"]
    assert [event["seq"] for event in events[:-1]] == list(range(len(events) - 1))
    assert {event["request_id"] for event in events} == {"watched"}


def test_a_worker_ends_in_good_order_when_it_is_told_to(working: Fleet) -> None:
    (process,) = working.workers(("derender",))
    process.terminate()
    assert process.wait(timeout=BOUND) == 0
