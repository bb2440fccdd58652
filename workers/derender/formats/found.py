"""What scanning a piece of output finds."""

from __future__ import annotations

from msgspec import Struct


class CallPiece(Struct):
    """A piece of call number `index`: its name comes once, with the first piece."""

    index: int
    name: str | None
    arguments: str


class Found(Struct):
    """Text by kind, in pieces, in the order of the output within each kind."""

    reasoning: list[str] = []
    content: list[str] = []
    calls: list[CallPiece] = []
    length: int = 0
    """Characters read, whatever became of them."""

    def add_call(self, index: int, name: str, arguments: str) -> None:
        self.calls.append(CallPiece(index, name, arguments))

    def add_arguments(self, index: int, text: str) -> None:
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        else:
            self.calls.append(CallPiece(index, None, text))
