"""What can happen to a line: what its users do, what becomes of its processes, and what the servers lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tests.chaos.schedules.wire import At, Lost, Mischief, Server

Loss = Literal["tail", "log", "all"]
RoleName = Literal["render", "generate", "derender", "control"]
ROLES: Final[tuple[RoleName, ...]] = ("render", "generate", "derender", "control")


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request; one that is ``deadly`` takes every worker down that has it generated."""

    wish: int
    seed: int
    client: int = 0
    hasty: bool = False
    deadly: bool = False


@dataclass(frozen=True, slots=True)
class Again:
    """The other client sends a request again; ``other`` with another body."""

    nth: int
    other: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    nth: int


@dataclass(frozen=True, slots=True)
class Pass:
    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    role: RoleName
    delay: float


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker dies, now or ``at`` a moment; ``again`` seconds later another is there, unless it is None."""

    role: RoleName
    nth: int
    again: float | None = None
    at: At | None = None


@dataclass(frozen=True, slots=True)
class Freeze:
    """A worker stands still for some time, from now on or from a moment."""

    role: RoleName
    nth: int
    seconds: float
    at: At | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    role: RoleName
    nth: int
    again: float | None = None


@dataclass(frozen=True, slots=True)
class Reconnect:
    """A worker's connection to RabbitMQ is lost and made anew."""

    role: RoleName
    nth: int


@dataclass(frozen=True, slots=True)
class Lose:
    """The next calls of a worker to a server fail, before or after they took effect."""

    role: RoleName
    nth: int
    server: Server
    what: Lost
    calls: int


@dataclass(frozen=True, slots=True)
class LoseOwn:
    """The next calls of a client fail so."""

    client: int
    server: Server
    what: Lost
    calls: int


@dataclass(frozen=True, slots=True)
class Away:
    """A server answers nobody."""

    server: Server
    seconds: float


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A job that was published some time ago comes once more."""

    back: int


@dataclass(frozen=True, slots=True)
class Spoil:
    """The next messages to a client are dropped, come late or come twice."""

    client: int
    what: Mischief
    messages: int
    late: float = 1.0


@dataclass(frozen=True, slots=True)
class Forget:
    """What Redis had acknowledged is lost: a run's last entries, its log, or all of it."""

    nth: int
    what: Loss


Step = (
    Submit
    | Again
    | Cancel
    | Pass
    | Start
    | Kill
    | Freeze
    | Drain
    | Reconnect
    | Lose
    | LoseOwn
    | Away
    | Duplicate
    | Spoil
    | Forget
)
