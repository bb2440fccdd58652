"""What scanning a piece of output finds."""

from __future__ import annotations

from msgspec import Struct


class CallPiece(Struct):
    """A piece of call number `index`: its name comes once, with the first piece."""

    index: int
    name: str | None
    arguments: str
    id: str | None = None
    """The id that the model itself gave to the call."""


class Found(Struct):
    """Text by kind, in pieces, in the order of the output within each kind."""

    reasoning: list[str] = []
    content: list[str] = []
    calls: list[CallPiece] = []
    length: int = 0
    """Characters read, whatever became of them."""
    opened: int = 0
    """Calls opened so far in this output, earlier pieces included: the number of the next one."""

    def open_call(self, name: str, arguments: str = "", id: str | None = None) -> None:
        """The next call begins."""
        self.calls.append(CallPiece(self.opened, name, arguments, id))
        self.opened += 1

    def add_arguments(self, text: str) -> None:
        """More arguments, as JSON text, for the call that was opened last."""
        if not text:
            return
        index = self.opened - 1
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        else:
            self.calls.append(CallPiece(index, None, text))
