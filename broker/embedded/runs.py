"""The run store in this process."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from headrace.broker.embedded.shelf import Hold, Run, Shelf
from headrace.broker.entries import Begin, Entry, Position
from headrace.broker.ports import MAX_REASON, Allowance, Checkpoint, Claim, ClaimAnswer, ClaimRequest, Release, Role


class EmbeddedRuns:
    """The RunStore of ports, in one process."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def claim(self, request: ClaimRequest) -> Claim:
        """Takes the run, or says why not. Role generate also starts its log (``begin``)."""
        run = self._shelf.find(request.run)
        answer = self._judge(run, request)
        if run is not None and (run.outcome is not None or run.cancel is not None):
            run.digest = run.digest or request.digest
        if answer is ClaimAnswer.NEW:
            run = self._take(request)
        elif answer is ClaimAnswer.MINE:
            self._shelf.show_life(request.run, request.worker, request.heartbeat)
        if run is None:
            return Claim(answer)
        hold = run.holds.get(request.role, Hold())
        held = answer in (ClaimAnswer.NEW, ClaimAnswer.MINE)
        return Claim(
            answer,
            epoch=hold.epoch if held else 0,
            chunks=run.chunks,
            attempts=hold.attempts,
            rescues=hold.rescues,
            outcome=run.outcome if answer is ClaimAnswer.DONE else None,
            reason=run.cancel if answer is ClaimAnswer.CANCELLED else None,
            job=run.job if request.role == "derender" else None,
            trial=held and hold.rescues >= request.suspect_from,
        )

    def _judge(self, run: Run | None, request: ClaimRequest) -> ClaimAnswer:
        now = self._shelf.clock()
        if run is None:
            return ClaimAnswer.EXPIRED if now >= request.deadline else ClaimAnswer.NEW
        hold = run.holds.get(request.role, Hold())
        mine = hold.owner == request.worker
        held = mine or (hold.owner != "" and self._shelf.lives(request.run, hold.owner))
        if request.digest and run.digest and run.digest != request.digest:
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
        rescues = hold.rescues + _died(hold)
        if hold.attempts >= request.max_attempts or rescues > request.max_rescues:
            return ClaimAnswer.EXHAUSTED
        return ClaimAnswer.SUSPECT if rescues >= request.suspect_from and not request.trial else ClaimAnswer.NEW

    def _take(self, request: ClaimRequest) -> Run:
        known = self._shelf.find(request.run)
        deadline = request.deadline if known is None or known.deadline is None else known.deadline
        run = self._shelf.put(request.run, deadline + request.replay_ttl)
        run.deadline = deadline
        if run.job is None:
            run.job = request.job
        hold = run.hold(request.role)
        hold.rescues += _died(hold)
        hold.owner, hold.epoch = request.worker, hold.epoch + 1
        run.digest = run.digest or request.digest
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
            record.cancel = reason[:MAX_REASON]
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

    async def refuse(self, run: str, digest: str, event: bytes, replay_ttl: float) -> bytes | None:
        """Writes the outcome of a request that cannot be served. None: the run is another request's."""
        record = self._shelf.find(run)
        if record is not None and record.digest not in ("", digest):
            return None
        stands = await self.outcome(run, event, replay_ttl)
        concluded = self._shelf.find(run)
        assert concluded is not None, "it was written"
        concluded.digest = digest
        return stands

    async def reopen(self, run: str, deadline: float, replay_ttl: float, *, fresh: bool) -> None:
        """Takes back a run's outcome and cancellation, and clears its ledger, so that it can be claimed again."""
        known = self._shelf.find(run)
        if known is None:
            return
        self._shelf.resume(run)
        record = self._shelf.put(run, deadline + replay_ttl)
        record.deadline, record.outcome, record.cancel = deadline, None, None
        record.holds = {role: Hold(epoch=hold.epoch + 1) for role, hold in record.holds.items()}
        if fresh:
            record.log = record.job = record.state = None
            record.chunks, record.ended, record.digest = 0, False, ""

    async def result(self, run: str) -> bytes | None:
        """The outcome, if there is one."""
        record = self._shelf.find(run)
        return None if record is None else record.outcome

    async def digest(self, run: str) -> str:
        """Fingerprint of the request that the run is; empty while no claim or refusal has said it."""
        record = self._shelf.find(run)
        return "" if record is None else record.digest

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

    async def put_body(self, run: str, name: str, body: bytes, ttl: float | None) -> None:
        """Keeps a job's body that is too large for a queue, for ``ttl`` seconds; None is until it is dropped."""
        until = inf if ttl is None else self._shelf.clock() + ttl
        self._shelf.bodies.prolong((run, name), body, until)

    async def get_body(self, run: str, name: str) -> bytes | None:
        """The body, if it is still kept."""
        return self._shelf.bodies.of(run).get(name)

    async def drop_body(self, run: str, name: str) -> None:
        """Forgets the body."""
        self._shelf.bodies.pop((run, name))

    async def enter(self, client: str, run: str, tokens: int, until: float, allowance: Allowance) -> str | None:
        """Counts a run as under way for its client. Returns None, or why it may not, with the bound."""
        counted = self._shelf.under_way.of(client)
        if run in counted:
            return None
        refusal = allowance.refusal(client, len(counted), sum(counted.values()), tokens)
        if refusal is None:
            self._shelf.under_way.put((client, run), tokens, until)
        return refusal

    async def leave(self, client: str, run: str) -> None:
        """The run is under way no more."""
        self._shelf.under_way.pop((client, run))

    async def report(self, model: str, worker: str, vitals: bytes, ttl: float) -> None:
        """Says how a worker is doing, a JSON object; kept for ``ttl`` seconds."""
        self._shelf.reports.put((model, worker), vitals, self._shelf.clock() + ttl)

    async def reports(self, model: str) -> dict[str, bytes]:
        """What the workers of a model have last said, by worker."""
        return self._shelf.reports.of(model)

    async def memory(self) -> float:
        """Always 0: finished runs have a bound of their own, and what else this process may hold nobody has said."""
        return 0.0


def _died(hold: Hold) -> int:
    """1 if the last owner did not let go: it is asked only when nobody alive holds the run."""
    return int(hold.owner != "")
