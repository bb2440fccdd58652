"""Processes of Headrace on real servers: workers that tests start, wait for and kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace.settings import PREFIX
from tests.servers import RabbitMQ, Redis

BOUND = 60.0
ROOT = Path(__file__).resolve().parents[2]
NULL_MODEL = ("--model", "demo", "--engine", "null", "--max-rows", "4")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Looks at the condition until it holds, for at most BOUND seconds."""
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {BOUND:g} seconds"
        time.sleep(0.02)


@dataclass(slots=True)
class Fleet:
    """Every process that was started with the same servers; what each says goes to a file of its own."""

    env: dict[str, str]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str | Path) -> tuple[subprocess.Popen[bytes], Path]:
        """A process, and the file with what it says."""
        said = self.folder / f"process-{len(self.processes)}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(command, env=self.env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process, said

    def headrace(self, *arguments: str | Path) -> tuple[subprocess.Popen[bytes], Path]:
        """A process of the command line."""
        return self.start(sys.executable, "-m", "headrace", *arguments)

    def workers(self, *roles: tuple[str, ...], model: tuple[str, ...] = NULL_MODEL) -> list[subprocess.Popen[bytes]]:
        """A worker process for each group of roles, all of them ready."""
        started = [self.headrace("worker", *group, *model) for group in roles]
        for process, said in started:
            wait_until(partial(_ready_or_ended, process, said), "a worker gets ready")
            assert process.poll() is None, said.read_text()
        return [process for process, _ in started]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_or_ended(process: subprocess.Popen[bytes], said: Path) -> bool:
    return b"worker.ready" in said.read_bytes() or process.poll() is not None


@contextmanager
def fleet(rabbitmq: RabbitMQ, redis: Redis, folder: Path, **settings: str) -> Iterator[Fleet]:
    """A fleet on these servers; every process is gone at the end."""
    machine = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    own = {"AMQP_URL": rabbitmq.url, "REDIS_URL": redis.url, "HEARTBEAT": "1.5", "GRACE": "5"} | settings
    env = machine | {f"{PREFIX}{name}": value for name, value in own.items()} | {"OMP_NUM_THREADS": "1"}
    started = Fleet(env, folder)
    try:
        yield started
    finally:
        started.close()
