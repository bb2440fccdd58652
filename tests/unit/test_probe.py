"""Probes: every named point stands in the code, a trap strikes at its time, and nothing else is ever armed."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.workers.probe import POINTS, VARIABLE, Trap, probe

WORKERS = Path(__file__).resolve().parents[2] / "workers"


def test_the_table_names_exactly_the_points_in_the_code() -> None:
    calls = [
        point for file in WORKERS.rglob("*.py") for point in re.findall(r'^ +probe\("(.+?)"\)$', file.read_text(), re.M)
    ]
    assert Counter(calls) == Counter(POINTS.keys())


def test_nothing_is_armed_where_the_environment_says_nothing() -> None:
    assert VARIABLE not in os.environ
    assert Trap.set_by({}) is None
    assert Trap.set_by({VARIABLE: ""}) is None
    probe("render.taken")


@pytest.mark.parametrize("asked", ["render.taken", "render.taken=KILL", "no.point=KILL@1", "render.taken=HUP@1", "x"])
def test_a_trap_that_cannot_be_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE):
        Trap.set_by({VARIABLE: asked})


def test_a_trap_strikes_its_own_process_at_its_point_and_its_time() -> None:
    code = """
from headrace.workers.probe import probe
for number in range(5):
    probe("render.taken")
    probe("generate.taken")
    print(number, flush=True)
"""
    armed = os.environ | {VARIABLE: "generate.taken=KILL@3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=armed, cwd=WORKERS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1"]
