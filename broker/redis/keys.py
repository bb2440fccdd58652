"""Names of the keys. All keys of one run, and its partition's heartbeats, carry one tag: they share a cluster slot.
So do all that is kept for one client's topics."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final, NamedTuple

from headrace.protocol.jobs import partition_of

_REMEMBERED: Final = 8192
"""Runs whose names are kept at hand: making them costs ten times a look-up, and a busy reader asks each round."""
_PREFIX: Final = re.compile(r"[A-Za-z0-9:_.-]{1,64}")


class RunKeys(NamedTuple):
    """The keys of one run. ``workers``, its partition's, says until which Unix millisecond each worker is alive."""

    run: bytes
    log: bytes
    job: bytes
    state: bytes
    workers: bytes


class TimedKeys(NamedTuple):
    """Values of which each has its own time: their names by the Unix millisecond until which they count, and they."""

    until: bytes
    values: bytes


class Keys:
    """``<prefix>:{p<partition>}:<run>:<what>``, and ``<prefix>:{c:<client>}:<what>`` for what is the client's to touch.

    What is counted of a client is not: it begins otherwise, so that a client that may use its own keys cannot reach it.
    """

    def __init__(self, prefix: str = "hr") -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix: {prefix!r} is not 1 to 64 of A-Z a-z 0-9 : _ . -")
        self._prefix = prefix
        self.of = lru_cache(_REMEMBERED)(self._of)

    def _of(self, run: str) -> RunKeys:
        slot = f"{self._prefix}:{{p{partition_of(run)}}}"
        own = f"{slot}:{run}"
        names = (f"{own}:run", f"{own}:log", f"{own}:job", f"{own}:state", f"{slot}:workers")
        return RunKeys._make(name.encode() for name in names)

    def body(self, run: str, name: str) -> bytes:
        """A job's body that is too large for a queue."""
        return f"{self._prefix}:{{p{partition_of(run)}}}:{run}:body:{name}".encode()

    def under_way(self, client: str) -> TimedKeys:
        """A client's runs that are under way, and the tokens of each."""
        return self._timed(f"clients:{{c:{client}}}", "runs", "tokens")

    def reports(self, model: str) -> TimedKeys:
        """The workers of a model, and what each has said. A model's name may hold any character: it is hashed."""
        return self._timed(f"models:{{m:{hashlib.blake2b(model.encode(), digest_size=16).hexdigest()}}}", "by", "said")

    def _timed(self, whose: str, *names: str) -> TimedKeys:
        return TimedKeys._make(f"{self._prefix}:{whose}:{name}".encode() for name in names)

    def subscriptions(self, client: str) -> bytes:
        """The hash of a client's subscriptions."""
        return f"{self._prefix}:{{c:{client}}}:subscriptions".encode()

    def events(self, client: str, subscription: str) -> bytes:
        """The stream of one of them."""
        return f"{self._prefix}:{{c:{client}}}:events:{subscription}".encode()


def run_of_log(key: bytes) -> str:
    """The run whose log has this key."""
    return key.rsplit(b":", 2)[1].decode()
