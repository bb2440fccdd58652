"""The run store: one Redis hash per run, changed by script only."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Final, TypeAlias, cast

from headrace.broker.ports import MAX_REASON, Allowance, Checkpoint, Claim, ClaimAnswer, ClaimRequest, Release, Role
from headrace.broker.redis.keys import Keys
from headrace.broker.redis.line import Line
from headrace.broker.redis.scripts import (
    BEAT,
    CANCEL,
    CLAIM,
    ENTER,
    LEAVE,
    OUTCOME,
    REFUSE,
    RELEASE,
    REOPEN,
    REPORTS,
    SAVE,
    command,
)

LATEST_MS: Final = 10**15
"""The latest time that the server is told, about the year 33658: a later deadline means no other thing."""
_BODY_S: Final = 15.0
"""How many seconds longer the reply may take where a large body goes one way or the other."""

_Claimed: TypeAlias = "tuple[bytes, int, int, int, int, bytes | None, bytes | None]"


class RedisRuns:
    """The RunStore of ports, on Redis."""

    def __init__(self, line: Line, bodies: Line, keys: Keys) -> None:
        self._line = line
        self._bodies = bodies
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
            0 if request.trial else request.suspect_from,
            *(() if request.job is None else (request.job,)),
        )
        (reply,) = await self._line.ask([call])
        said, epoch, chunks, attempts, rescues, extra, job = cast("_Claimed", reply)
        answer = ClaimAnswer(said.decode())
        outcome = extra if answer is ClaimAnswer.DONE else None
        reason = extra.decode() if answer is ClaimAnswer.CANCELLED and extra is not None else None
        trial = epoch > 0 and rescues >= request.suspect_from
        return Claim(answer, epoch, chunks, attempts, rescues, outcome, reason, job, trial)

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
        (reply,) = await self._line.ask([CANCEL.call((keys.run, keys.workers), reason[:MAX_REASON], _ms(ttl))])
        return reply == 1

    async def outcome(self, run: str, event: bytes, replay_ttl: float) -> bytes:
        """Writes the run's outcome; the first writer wins. Returns the outcome that stands."""
        keys = self._keys.of(run)
        call = OUTCOME.call((keys.run, keys.log, keys.job, keys.state), event, _ms(replay_ttl))
        (stands,) = cast("list[bytes | None]", await self._line.ask([call]))
        return event if stands is None else stands

    async def refuse(self, run: str, digest: str, event: bytes, replay_ttl: float) -> bytes | None:
        """Writes the outcome of a request that cannot be served. None: the run is another request's."""
        keys = self._keys.of(run)
        call = REFUSE.call((keys.run, keys.log, keys.job, keys.state), digest, event, _ms(replay_ttl))
        return await self._get(call)

    async def reopen(self, run: str, deadline: float, replay_ttl: float, *, fresh: bool) -> None:
        """Takes back a run's outcome and cancellation, and clears its ledger, so that it can be claimed again."""
        keys = self._keys.of(run)
        call = REOPEN.call((keys.run, keys.log, keys.job, keys.state), _ms(deadline), _ms(replay_ttl), int(fresh))
        await self._line.ask([call])

    async def result(self, run: str) -> bytes | None:
        """The outcome, if there is one."""
        return await self._get(command("HGET", self._keys.of(run).run, "outcome"))

    async def digest(self, run: str) -> str:
        """Fingerprint of the request that the run is; empty while no claim or refusal has said it."""
        return (await self._get(command("HGET", self._keys.of(run).run, "digest")) or b"").decode()

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

    async def put_body(self, run: str, name: str, body: bytes, ttl: float | None) -> None:
        """Keeps a job's body that is too large for a queue, for ``ttl`` seconds; None is until it is dropped."""
        key = self._keys.body(run, name)
        # One that is there is prolonged first: it cannot run out before the second command finds it.
        if ttl is None:
            calls = [command("PERSIST", key), command("SET", key, body, "NX")]
        else:
            calls = [command("PEXPIRE", key, _ms(ttl), "GT"), command("SET", key, body, "NX", "PX", _ms(ttl))]
        await self._bodies.ask(calls, longer=_BODY_S)

    async def get_body(self, run: str, name: str) -> bytes | None:
        """The body, if it is still kept."""
        (body,) = await self._bodies.ask([command("GET", self._keys.body(run, name))], longer=_BODY_S)
        return cast("bytes | None", body)

    async def drop_body(self, run: str, name: str) -> None:
        """Forgets the body."""
        await self._line.ask([command("UNLINK", self._keys.body(run, name))])

    async def enter(self, client: str, run: str, tokens: int, until: float, allowance: Allowance) -> str | None:
        """Counts a run as under way for its client. Returns None, or why it may not, with the bound."""
        limits = (allowance.requests, allowance.tokens)
        (full,) = await self._line.ask([ENTER.call(self._keys.under_way(client), run, tokens, _ms(until), *limits)])
        if full is None:
            return None
        requests, total = cast("list[int]", full)
        return allowance.refusal(client, requests, total, tokens)

    async def leave(self, client: str, run: str) -> None:
        """The run is under way no more."""
        await self._line.ask([LEAVE.call(self._keys.under_way(client), run)])

    async def report(self, model: str, worker: str, vitals: bytes, ttl: float) -> None:
        """Says how a worker is doing, a JSON object; kept for ``ttl`` seconds."""
        await self._line.ask([REPORTS.call(self._keys.reports(model), worker, vitals, _ms(ttl))])

    async def reports(self, model: str) -> dict[str, bytes]:
        """What the workers of a model have last said, by worker."""
        (said,) = await self._line.ask([REPORTS.call(self._keys.reports(model))])
        words = cast("list[bytes]", said)
        return {worker.decode(): word for worker, word in zip(words[::2], words[1::2], strict=True)}

    async def memory(self) -> float:
        """Share of ``maxmemory`` that is in use; without one, of the memory of the machine that Redis runs on."""
        (info,) = await self._line.ask([command("INFO", "memory")])
        said = dict(line.split(":", 1) for line in cast("bytes", info).decode().splitlines() if ":" in line)
        return int(said["used_memory"]) / (int(said["maxmemory"]) or int(said["total_system_memory"]))

    async def _get(self, asked: bytes) -> bytes | None:
        (reply,) = await self._line.ask([asked])
        return cast("bytes | None", reply)


def _ms(seconds: float) -> int:
    """Milliseconds, at least 1: Redis takes 0 for an error or for never."""
    return max(1, int(min(seconds * 1000, LATEST_MS)))
