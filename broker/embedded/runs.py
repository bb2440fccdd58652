"""The run store in this process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.broker.embedded.shelf import Hold, Run, Shelf
from headrace.broker.entries import Begin, Entry, Position
from headrace.broker.ports import Checkpoint, Claim, ClaimAnswer, ClaimRequest, Release, Role


class EmbeddedRuns:
    """The RunStore of ports, in one process."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def claim(self, request: ClaimRequest) -> Claim:
        """Takes the run, or says why not. Role generate also starts its log (``begin``)."""
        run = self._shelf.find(request.run)
        answer = self._judge(run, request)
        if answer is ClaimAnswer.NEW:
            run = self._take(request)
        elif answer is ClaimAnswer.MINE:
            self._shelf.show_life(request.run, request.worker, request.heartbeat)
        if run is None:
            return Claim(answer)
        hold = run.holds.get(request.role, Hold())
        return Claim(
            answer,
            epoch=hold.epoch if answer in (ClaimAnswer.NEW, ClaimAnswer.MINE) else 0,
            chunks=run.chunks,
            attempts=hold.attempts,
            rescues=hold.rescues,
            outcome=run.outcome if answer is ClaimAnswer.DONE else None,
            reason=run.cancel if answer is ClaimAnswer.CANCELLED else None,
            job=run.job if request.role == "derender" else None,
        )

    def _judge(self, run: Run | None, request: ClaimRequest) -> ClaimAnswer:
        now = self._shelf.clock()
        if run is None:
            return ClaimAnswer.EXPIRED if now >= request.deadline else ClaimAnswer.NEW
        hold = run.holds.get(request.role, Hold())
        mine = hold.owner == request.worker
        held = mine or (hold.owner != "" and self._shelf.lives(request.run, hold.owner))
        if hold.epoch and hold.digest != request.digest:
            return ClaimAnswer.CONFLICT
        if run.outcome is not None:
            return ClaimAnswer.DONE
        if run.cancel is not None and not held:
            return ClaimAnswer.CANCELLED
        if now >= (request.deadline if run.deadline is None else run.deadline):
            return ClaimAnswer.EXPIRED
        if request.role == "generate" and run.ended:
            return ClaimAnswer.ENDED
        if held:
            return ClaimAnswer.MINE if mine else ClaimAnswer.ALIVE
        if hold.attempts >= request.max_attempts or hold.rescues + _died(hold) > request.max_rescues:
            return ClaimAnswer.EXHAUSTED
        return ClaimAnswer.NEW

    def _take(self, request: ClaimRequest) -> Run:
        known = self._shelf.find(request.run)
        deadline = request.deadline if known is None or known.deadline is None else known.deadline
        run = self._shelf.put(request.run, deadline + request.replay_ttl)
        run.deadline = deadline
        if run.job is None:
            run.job = request.job
        hold = run.hold(request.role)
        hold.rescues += _died(hold)
        hold.owner, hold.digest, hold.epoch = request.worker, request.digest, hold.epoch + 1
        self._shelf.show_life(request.run, request.worker, request.heartbeat)
        if request.role == "generate":
            begin = Begin(request.worker, self._shelf.clock(), run.chunks)
            run.log = run.log or []
            run.log.append(Entry(Position(hold.epoch, 0), "begin", msgspec.json.encode(begin), 0))
            self._shelf.added(request.run)
        return run

    async def release(self, run: str, role: Role, epoch: int, how: Release) -> None:
        """Lets go of a run; no-op if the epoch is not the current one."""
        record = self._shelf.find(run)
        hold = Hold() if record is None else record.holds.get(role, Hold())
        if hold.owner and hold.epoch == epoch:
            hold.owner = ""
            hold.attempts += how is Release.FAILED

    async def beat(self, worker: str, runs: Sequence[str], heartbeat: float) -> dict[str, str]:
        """Keeps the worker alive in the partitions of these runs. Returns those to be cancelled, with the reason."""
        told = {}
        for run in runs:
            self._shelf.show_life(run, worker, heartbeat)
            record = self._shelf.find(run)
            if record is not None and record.cancel is not None:
                told[run] = record.cancel
        return told

    async def cancel(self, run: str, reason: str, ttl: float) -> bool:
        """Asks for a run to be cancelled. True: nobody holds it, so the caller writes the outcome."""
        record = self._shelf.find(run) or self._shelf.put(run, self._shelf.clock() + ttl)
        if record.outcome is not None:
            return False
        if record.cancel is None:
            record.cancel = reason
        holders = (hold.owner for role, hold in record.holds.items() if not (role == "generate" and record.ended))
        return not any(self._shelf.lives(run, owner) for owner in holders)

    async def outcome(self, run: str, event: bytes, replay_ttl: float) -> bytes:
        """Writes the run's outcome; the first writer wins. Returns the outcome that stands."""
        record = self._shelf.find(run)
        if record is None or record.outcome is None:
            record = self._shelf.put(run, self._shelf.clock() + replay_ttl)
            record.outcome = event
            self._shelf.finish(run)
        assert record.outcome is not None, "it was written"
        return record.outcome

    async def result(self, run: str) -> bytes | None:
        """The outcome, if there is one."""
        record = self._shelf.find(run)
        return None if record is None else record.outcome

    async def job(self, run: str) -> bytes | None:
        """What the claim stored for later roles."""
        record = self._shelf.find(run)
        return None if record is None else record.job

    async def save(self, checkpoints: Sequence[Checkpoint]) -> list[bool]:
        """Stores them. False for each whose derender epoch is not the current one."""
        return [self._save(each) for each in checkpoints]

    def _save(self, checkpoint: Checkpoint) -> bool:
        record = self._shelf.find(checkpoint.run)
        if record is None or record.hold("derender").epoch != checkpoint.epoch:
            return False
        record.state = checkpoint.state
        return True

    async def load(self, run: str) -> bytes | None:
        """The state of the last checkpoint that was stored."""
        record = self._shelf.find(run)
        return None if record is None else record.state


def _died(hold: Hold) -> int:
    """1 if the last owner did not let go: it is asked only when nobody alive holds the run."""
    return int(hold.owner != "")
