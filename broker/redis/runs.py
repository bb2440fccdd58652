"""The run store: one Redis hash per run, changed by script only."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from headrace.broker.ports import Checkpoint, Claim, ClaimAnswer, ClaimRequest, Release, Role
from headrace.broker.redis.keys import Keys
from headrace.broker.redis.line import Line
from headrace.broker.redis.scripts import BEAT, CANCEL, CLAIM, OUTCOME, RELEASE, SAVE, command

LATEST_MS: Final = 10**15
"""The latest time that the server is told, about the year 33658: a later deadline means no other thing."""

_Claimed: TypeAlias = "tuple[bytes, int, int, int, int, bytes | None, bytes | None]"


class RedisRuns:
    """The RunStore of ports, on Redis."""

    def __init__(self, line: Line, keys: Keys) -> None:
        self._line = line
        self._keys = keys
        self._me = secrets.token_hex(8)
        self._calls = itertools.count(1)

    async def claim(self, request: ClaimRequest) -> Claim:
        """Takes the run, or says why not. Role generate also starts its log (``begin``). One script, atomic."""
        keys = self._keys.of(request.run)
        call = CLAIM.call(
            (keys.run, keys.log, keys.job, keys.workers),
            request.role,
            request.worker,
            f"{self._me}-{next(self._calls)}",
            request.digest,
            _ms(request.deadline),
            _ms(request.replay_ttl),
            _ms(request.heartbeat),
            request.max_attempts,
            request.max_rescues,
            *(() if request.job is None else (request.job,)),
        )
        (reply,) = await self._line.ask([call])
        said, epoch, chunks, attempts, rescues, extra, job = cast("_Claimed", reply)
        answer = ClaimAnswer(said.decode())
        outcome = extra if answer is ClaimAnswer.DONE else None
        reason = extra.decode() if answer is ClaimAnswer.CANCELLED and extra is not None else None
        return Claim(answer, epoch, chunks, attempts, rescues, outcome, reason, job)

    async def release(self, run: str, role: Role, epoch: int, how: Release) -> None:
        """Lets go of a run; no-op if the epoch is not the current one."""
        used = int(how is Release.FAILED)
        await self._line.ask([RELEASE.call((self._keys.of(run).run,), role, epoch, used)])

    async def beat(self, worker: str, runs: Sequence[str], heartbeat: float) -> dict[str, str]:
        """Keeps the worker alive in the partitions of these runs. Returns those to be cancelled, with the reason."""
        partitions: dict[bytes, list[str]] = {}
        for run in runs:
            partitions.setdefault(self._keys.of(run).workers, []).append(run)
        if not partitions:
            return {}
        calls = [
            BEAT.call((workers, *(self._keys.of(run).run for run in here)), worker, _ms(heartbeat))
            for workers, here in partitions.items()
        ]
        told: dict[str, str] = {}
        for reply, here in zip(await self._line.ask(calls), partitions.values(), strict=True):
            for run, reason in zip(here, cast("list[bytes | None]", reply), strict=True):
                if reason is not None:
                    told[run] = reason.decode()
        return told

    async def cancel(self, run: str, reason: str, ttl: float) -> bool:
        """Asks for a run to be cancelled. True: nobody holds it, so the caller writes the outcome."""
        keys = self._keys.of(run)
        (reply,) = await self._line.ask([CANCEL.call((keys.run, keys.workers), reason, _ms(ttl))])
        return reply == 1

    async def outcome(self, run: str, event: bytes, replay_ttl: float) -> bytes:
        """Writes the run's outcome; the first writer wins. Returns the outcome that stands."""
        keys = self._keys.of(run)
        call = OUTCOME.call((keys.run, keys.log, keys.job, keys.state), event, _ms(replay_ttl))
        (stands,) = cast("list[bytes | None]", await self._line.ask([call]))
        return event if stands is None else stands

    async def result(self, run: str) -> bytes | None:
        """The outcome, if there is one."""
        return await self._get(command("HGET", self._keys.of(run).run, "outcome"))

    async def job(self, run: str) -> bytes | None:
        """What the claim stored for later roles."""
        return await self._get(command("GET", self._keys.of(run).job))

    async def save(self, checkpoints: Sequence[Checkpoint]) -> list[bool]:
        """Stores them, in one round trip. False for each whose derender epoch is not the current one."""
        if not checkpoints:
            return []
        return [reply == 1 for reply in await self._line.ask([self._save(each) for each in checkpoints])]

    def _save(self, checkpoint: Checkpoint) -> bytes:
        keys = self._keys.of(checkpoint.run)
        return SAVE.call((keys.run, keys.state), checkpoint.epoch, checkpoint.state)

    async def load(self, run: str) -> bytes | None:
        """The state of the last checkpoint that was stored."""
        return await self._get(command("GET", self._keys.of(run).state))

    async def _get(self, asked: bytes) -> bytes | None:
        (reply,) = await self._line.ask([asked])
        return cast("bytes | None", reply)


def _ms(seconds: float) -> int:
    """Milliseconds, at least 1: Redis takes 0 for an error or for never."""
    return max(1, int(min(seconds * 1000, LATEST_MS)))
