"""Workers that die, stand still and leave at random, and are started again."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.integration.fleet import Fleet

ROLES: Final = ("render", "generate", "derender", "control")
OPTIONS: Final = ("--model", "demo", "--engine", "null", "--max-rows", "64")
BLOWS: Final = ("KILL", "KILL", "STOP", "TERM")
ELDERS_SHARE: Final = 0.25
"""Of the strikes, so many befall elders."""
LOOK_S: Final = 0.1


@dataclass(slots=True)
class Post:
    """A place for a worker. An elder keeps its process to the end: it is only stopped for a while now and then, so what
    it gathers in memory can be seen."""

    role: str
    elder: bool
    process: subprocess.Popen[bytes]
    said: Path
    struck: str = ""
    """The signal that its process has not answered to yet."""
    go_on_at: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ready(self) -> bool:
        """Whether it works, and so knows how to leave."""
        return b"worker.ready" in self.said.read_bytes()


@dataclass(slots=True)
class Crew:
    """Two workers of each role, an elder and another. ``heartbeat`` and ``every``, between two strikes, in seconds."""

    fleet: Fleet
    heartbeat: float
    every: float
    draw: random.Random
    posts: list[Post] = field(default_factory=list)
    strikes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def start(self) -> None:
        """All of them, ready."""
        for _ in range(2):
            for role in ROLES:
                self.posts.append(self._post(role, elder=len(self.posts) < len(ROLES)))

    def _post(self, role: str, *, elder: bool) -> Post:
        process, said = self.fleet.headrace("worker", role, *OPTIONS)
        return Post(role, elder, process, said)

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            while not all(post.ready for post in self.posts):  # noqa: ASYNC110 (files, no events)
                await asyncio.sleep(LOOK_S)

    async def strike_on(self) -> None:
        """Strike after strike, until it is cancelled; then all go on."""
        strike_at = time.monotonic() + self.every
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._tend()
                if time.monotonic() >= strike_at:
                    strike_at = time.monotonic() + self.every * self.draw.uniform(0.5, 1.5)
                    self._strike()
        finally:
            for post in self.posts:
                if post.struck == "STOP":
                    self._go_on(post)

    def _strike(self) -> None:
        elder = self.draw.random() < ELDERS_SHARE
        standing = [post for post in self.posts if post.elder is elder and not post.struck and post.ready]
        if not standing:
            return
        post = self.draw.choice(standing)
        post.struck = "STOP" if elder else self.draw.choice(BLOWS)
        self.strikes[post.struck] += 1
        post.process.send_signal(getattr(signal, f"SIG{post.struck}"))
        post.go_on_at = time.monotonic() + self.heartbeat * self.draw.uniform(0.5, 4.0)

    def _tend(self) -> None:
        for place, post in enumerate(self.posts):
            code = post.process.poll()
            if code is not None:
                if code != {"KILL": -signal.SIGKILL, "TERM": 0}.get(post.struck):
                    self.broken.append(f"{post.role}: ended with {code}: {post.said.read_text()[-2000:]}")
                post.said.unlink(missing_ok=True)
                self.posts[place] = self._post(post.role, elder=post.elder)
            elif post.struck == "STOP" and time.monotonic() >= post.go_on_at:
                self._go_on(post)

    @staticmethod
    def _go_on(post: Post) -> None:
        post.process.send_signal(signal.SIGCONT)
        post.struck = ""

    async def leave(self) -> None:
        """All leave in order."""
        await asyncio.to_thread(self.fleet.close)
        for post in self.posts:
            if post.process.returncode != 0 and post.struck != "KILL":
                self.broken.append(f"{post.role}: left with {post.process.returncode}: {post.said.read_text()[-2000:]}")

    def elders(self) -> Sequence[Post]:
        return [post for post in self.posts if post.elder]
