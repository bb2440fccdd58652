"""What a process says on stderr: events, one a line, in one form."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
from headrace import logs
logs.to_stderr("info", as_json=True)
try:
    raise ConnectionError("closed by the broker")
except ConnectionError:
    logging.getLogger("aiormq.connection").warning("Cancelling cause reader exited abnormally", exc_info=True)
logs.get_logger().info("amqp_lost", host="h")
"""


def test_a_library_mixes_no_words_of_its_own_into_the_events() -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    (event,) = [json.loads(text) for text in said.stderr.splitlines()]
    assert (event["event"], event["host"]) == ("amqp_lost", "h")
