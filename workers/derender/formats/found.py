"""What scanning a piece of output finds."""

from __future__ import annotations

from msgspec import Struct


class CallPiece(Struct):
    """A piece of call number `index`: its name comes once, with the first piece."""

    index: int
    name: str | None
    parts: list[str]
    """The arguments' text, in pieces."""
    id: str | None = None
    """The id that the model itself gave to the call."""

    @property
    def arguments(self) -> str:
        """The arguments' text."""
        return "".join(self.parts)


class Found(Struct):
    """Text by kind, in pieces, in the order of the output within each kind."""

    reasoning: list[str] = []
    content: list[str] = []
    calls: list[CallPiece] = []
    length: int = 0
    """Characters read, whatever became of them."""
    opened: int = 0
    """Calls opened so far in this output, earlier pieces included: the number of the next one."""
    begun: bool = False
    """Content was given out before this piece's calls, and no call before it."""

    def open_call(self, name: str, arguments: str = "", id: str | None = None) -> None:
        """The next call begins."""
        self.calls.append(CallPiece(self.opened, name, [arguments], id))
        self.opened += 1

    def add_arguments(self, text: str) -> None:
        """More arguments, as JSON text, for the call that was opened last."""
        if not text or not self.opened:
            return
        index = self.opened - 1
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].parts.append(text)
        else:
            self.calls.append(CallPiece(index, None, [text]))
