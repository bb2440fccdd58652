"""The choices of one live request: how far each has come, and the checkpoint that they are restored from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from headrace.protocol import wire
from headrace.workers.derender.core import Core
from headrace.workers.derender.options import Options
from headrace.workers.derender.progress import Progress, carried


class Checkpoint(Struct, omit_defaults=True):
    """What later chunks depend on besides the request: each choice's state, and a prompt that came in a chunk."""

    choices: dict[int, wire.StreamState]
    v: Literal[1] = 1
    prompt: list[int] | None = None


class Choices:
    """Progress by choice index. `prompt` is the request's own, where it is known before the first chunk."""

    def __init__(self, core: Core, options: Options, prompt: Sequence[int] | None) -> None:
        self._core, self._options = core, options
        self.prompt = prompt
        """The prompt, given or told by a chunk."""
        self._told: list[int] | None = None
        self._progress: dict[int, Progress] = {}

    @property
    def stopped(self) -> frozenset[int]:
        """Choices whose text has met a stop string."""
        met = (index for index, p in self._progress.items() if p.scan is not None and p.scan.stopped is not None)
        return frozenset(met)

    def hear(self, prompt: list[int]) -> None:
        """Keep the prompt that a chunk brings, if there is none yet."""
        if self.prompt is None:
            self.prompt = self._told = prompt

    def progress(self, choice: wire.TokenChoice) -> Progress:
        """The progress that the choice's tokens are to advance. Raises BadRequest where they are too many."""
        progress = self._progress.get(choice.index)
        if progress is None:
            progress = self._progress[choice.index] = self._core.open(self._options, self.prompt)
        self._core.check_length(progress, self.prompt, choice.token_ids or ())
        return progress

    def checkpoint(self) -> bytes:
        """As JSON: bounded, but for text that is held back."""
        choices = {index: carried(progress) for index, progress in self._progress.items()}
        return msgspec.json.encode(Checkpoint(choices=choices, prompt=self._told))

    def restore(self, checkpoint: bytes) -> None:
        """Go on from a checkpoint of the same request. Raises ValueError for bytes that are none."""
        try:
            saved = msgspec.json.decode(checkpoint, type=Checkpoint)
        except msgspec.MsgspecError as error:
            raise ValueError(f"these bytes are no checkpoint of a derender session: {error}") from error
        if saved.prompt is not None:
            self.hear(saved.prompt)
        for index, state in saved.choices.items():
            self._progress[index] = self._core.resume(self._options, state, self.prompt)
