"""Points at which a worker process can be made to end, or to stand still, by itself.

What a worker leaves behind when it dies depends on where it was, and between a write and its answer there is no time to
hit it from outside. So the points that matter have names here, and the one that the environment arms strikes its own
process as it passes: ``HEADRACE_PROBE="generate.claimed=KILL@3"`` is SIGKILL at the third time. Unarmed, a point is one
look at a global.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "HEADRACE_PROBE"

POINTS: Final = {
    "render.taken": "a render job is here, nothing is done",
    "render.rendered": "its token ids are known, the generate job is not sent",
    "render.published": "the generate job is in its queue, the render job not acked",
    "generate.taken": "a generate job is here, nothing is done",
    "generate.claimed": "the run is this worker's, nobody tells it yet",
    "generate.handed_on": "the derender job is in its queue, the engine knows of nothing",
    "generate.admitted": "the engine has it",
    "generate.before_append": "some steps' chunks are made, none of them is durable",
    "generate.after_append": "they are durable, nobody here has looked at the answer",
    "generate.ended": "the log has its end, the job is not acked",
    "derender.taken": "a derender job is here, nothing is done",
    "derender.claimed": "the run is this worker's, nothing is read",
    "derender.chunks_taken": "some of its log is read, nothing of that is told",
    "derender.chunks_sent": "it is told, no checkpoint knows of it",
    "derender.checkpoint_written": "a checkpoint knows of it",
    "derender.before_ack": "the outcome is told, the job not acked",
    "outcome.written": "an outcome stands, nobody was told",
    "outcome.told": "its client was told, the delivery not acked",
    "control.taken": "a message about a run is here, nothing is done",
    "control.cancelled": "the run store knows of the cancellation, the outcome is not written",
    "control.before_ack": "all is done, the message not acked",
    "intake.taken": "what the broker gave up is here, nothing is done",
    "job.buried": "a job is filed under dead, its delivery settled",
}
"""Every point that there is, and what is so at it."""

_SIGNALS: Final = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM}
_FORM: Final = re.compile(rf"([a-z_.]+)=({'|'.join(_SIGNALS)})@([1-9][0-9]*)")


@dataclass(slots=True)
class Trap:
    """Strikes at a point, the time that counts ``left`` down to nothing."""

    point: str
    signal: signal.Signals
    left: int

    @classmethod
    def set_by(cls, environment: Mapping[str, str]) -> Trap | None:
        """The trap that the environment asks for. Raises ValueError for one that cannot be."""
        asked = environment.get(VARIABLE)
        if not asked:
            return None
        form = _FORM.fullmatch(asked)
        if form is None or form[1] not in POINTS:
            raise ValueError(f"{VARIABLE}: {asked!r} is not <point>=<{'|'.join(_SIGNALS)}>@<time>")
        return cls(form[1], _SIGNALS[form[2]], int(form[3]))

    def passed(self, point: str) -> None:
        if point != self.point:
            return
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.signal)  # to this very thread: it comes no further


_armed: Trap | None = Trap.set_by(os.environ)


def probe(point: str) -> None:
    """This process is at this point of ``POINTS``."""
    if _armed is not None:
        _armed.passed(point)
