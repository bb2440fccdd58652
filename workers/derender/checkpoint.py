"""Checkpoints: how far a run has been told, so that whoever takes it over goes on from there.

A checkpoint is the place in the log and the state of the telling after it. It says nothing that the log does not say:
who cannot use it tells the log from its start, with the same chunks under the same numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from headrace.broker import ports
from headrace.broker.entries import Position
from headrace.broker.ports import Broker, BrokerError
from headrace.logs import get_logger
from headrace.protocol import wire
from headrace.workers.derender.formats import ScanState
from headrace.workers.derender.told import Told
from headrace.workers.follow import Follower
from headrace.workers.probe import probe

log = get_logger()

EVERY_CHUNKS: Final = 256
"""A run is saved once it is so many chunks past its last checkpoint, or one round more,"""
EVERY_S: Final = 5.0
"""or so many seconds, if anything was told of it since."""
LOOK_S: Final = 0.5
"""Between two looks at all runs for those that are due by the time."""
AT_ONCE: Final = 256
"""Runs that one look saves: bounds how long it keeps the event loop."""


def _core() -> str:
    """A fingerprint of what a state is made of, the scanners' own version among it: a core whose states are made of
    something else would read another meaning into them."""
    _, components = msgspec.json.schema_components(
        [wire.StreamState, ScanState], schema_hook=lambda _: {"type": "object"}
    )
    schema = msgspec.json.encode(components, order="sorted")
    return hashlib.blake2b(schema, digest_size=8).hexdigest()


CORE: Final = _core()


class Saved(Struct, frozen=True):
    """A checkpoint as it is stored: the last entry that was told, and the follower's and the telling's state then."""

    core: str
    run: str
    epoch: int
    k: int
    chunks: int
    running: int
    telling: Raw

    @classmethod
    def of(cls, told: Told) -> Saved:
        follower, position = told.follower, told.follower.position
        telling = Raw(told.telling.checkpoint())
        return cls(CORE, told.job.run, position.epoch, position.k, follower.chunks, follower.running, telling)

    def follower(self) -> Follower:
        """A follower that is where the one before was."""
        return Follower(Position(self.epoch, self.k), self.chunks, self.running)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Saved).decode


def read(state: bytes, run: str) -> Saved | None:
    """The checkpoint in these bytes; None if it is not one that this core took of the run."""
    try:
        saved = _decode(state)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("checkpoint.unreadable", error=str(error))
        return None
    if saved.core != CORE:
        log.info("checkpoint.of_another_core", core=saved.core, ours=CORE)
        return None
    if saved.run != run:
        log.error("checkpoint.of_another_run", run=run, saved=saved.run)
        return None
    return saved


class Checkpoints:
    """The checkpoints of the runs that a worker tells. Taking one costs about a chunk; writing them happens beside the
    telling, all that are due in one round trip, and the newest of a run in place of those that were not yet written."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._unwritten: dict[str, tuple[Told, bytes]] = {}
        self._some = asyncio.Event()
        self._look_at = 0.0

    def told(self, tellings: Iterable[Told], now: float) -> None:
        """Something more of these was sent: takes the checkpoints that are due by its chunks. ``now`` is a monotonic
        clock."""
        for told in tellings:
            if told.follower.chunks - told.kept_chunks >= EVERY_CHUNKS and told.resumable:
                self.take(told, now)

    def look(self, tellings: Iterable[Told], now: float) -> None:
        """Takes the checkpoints that are due by the time. All that was taken of the runs' logs must have been sent."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        due = 0
        for told in tellings:
            if told.follower.chunks == told.kept_chunks or not told.resumable:
                continue
            if told.kept_at is None:
                told.kept_at = now
            elif now - told.kept_at >= EVERY_S:
                self.take(told, now)
                due += 1
                if due == AT_ONCE:
                    self._look_at = now  # the rest at the next look: those just taken are not due then
                    return

    def take(self, told: Told, now: float) -> None:
        """Takes a run's checkpoint, whether or not it is due."""
        told.kept_at, told.kept_chunks = now, told.follower.chunks
        try:
            self._unwritten[told.job.run] = told, _encode(Saved.of(told))
        except Exception as error:  # whatever it is: telling the run, and the others, goes on without
            log.error("checkpoint.not_taken", request_id=told.job.request_id, exc_info=error)
        self._some.set()

    async def write_on(self) -> None:
        """Writes whatever is taken, as it is taken."""
        while True:
            await self._some.wait()
            await self.write()

    async def write(self) -> None:
        """Writes what is taken and not yet written. One that cannot be written now is not: the next one will be.

        First whatever was sent must be with the brokers: a checkpoint must not say that a chunk was told which this
        process still holds.
        """
        self._some.clear()
        unwritten, self._unwritten = self._unwritten, {}
        if not unwritten:
            return
        try:
            for via in {told.job.via for told, _ in unwritten.values()}:
                await self._broker.via(via).flush()
            states = [ports.Checkpoint(run, told.epoch, state) for run, (told, state) in unwritten.items()]
            await self._broker.runs.save(states)
            probe("derender.checkpoint_written")
        except BrokerError as away:
            log.warning("checkpoints.not_written", runs=len(unwritten), error=str(away))
