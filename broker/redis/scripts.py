"""The Lua scripts that hold the guarantee, and commands packed for the wire."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final, TypeAlias, cast

import hiredis

Argument: TypeAlias = str | bytes | int

_pack: Final = cast("Callable[[tuple[Argument, ...]], bytes]", hiredis.pack_command)


def command(*words: Argument) -> bytes:
    """A command as the server reads it."""
    return _pack(words)


@dataclass(frozen=True, slots=True)
class Script:
    """A script that the server knows by its SHA-1, once it was loaded."""

    text: str
    sha: str

    @classmethod
    def read(cls, name: str) -> Script:
        text = files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    def call(self, keys: Sequence[bytes], *arguments: Argument) -> bytes:
        """The command that runs it. Every key that it touches is among ``keys``."""
        return _pack(("EVALSHA", self.sha, len(keys), *keys, *arguments))


CLAIM: Final = Script.read("claim")
APPEND: Final = Script.read("append")
OUTCOME: Final = Script.read("outcome")
RELEASE: Final = Script.read("release")
BEAT: Final = Script.read("beat")
CANCEL: Final = Script.read("cancel")
SAVE: Final = Script.read("save")
REFUSE: Final = Script.read("refuse")
REOPEN: Final = Script.read("reopen")
ENTER: Final = Script.read("enter")
LEAVE: Final = Script.read("leave")
REPORTS: Final = Script.read("reports")
TOPICS_OPEN: Final = Script.read("topics_open")
TOPICS_KEEP: Final = Script.read("topics_keep")
TOPICS_TELL: Final = Script.read("topics_tell")

_RUNS: Final = (CLAIM, APPEND, OUTCOME, RELEASE, BEAT, CANCEL, SAVE, REFUSE, REOPEN, ENTER, LEAVE, REPORTS)
_ALL: Final = (*_RUNS, TOPICS_OPEN, TOPICS_KEEP, TOPICS_TELL)
LOAD: Final = tuple(command("SCRIPT", "LOAD", script.text) for script in _ALL)
"""Makes the server know them all."""
