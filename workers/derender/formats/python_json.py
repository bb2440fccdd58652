"""The arguments of a call as JSON text while they are being written, and where among them the reader is.

Python does not say at once what its brackets hold: a dictionary or a set, a tuple or one value in parentheses. The
first element waits until that is known.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

from msgspec import Meta, Struct

from headrace.workers.derender.formats.found import Found

WINDOW: Final = 128
"""Characters of a name, a number or a lookahead. What is longer is text."""
MAX_DEPTH: Final = 200
"""Containers within each other, the bound of Python's own parser. What is deeper is text."""
MAX_KEPT: Final = 1 << 14
"""Characters of JSON text that may wait to learn what container they are in. A longer first element decides it."""

At = Literal["argument", "key", "colon", "value", "string", "joint", "text", "after"]
Quote = Literal["", "'", '"', "'''", '"""']


class Container(NamedTuple):
    """How a kind of container is written in JSON, and what each member begins with."""

    opens: str
    closes: str
    member: At


CONTAINERS: Final = {
    "f": Container("{", "}", "argument"),
    "k": Container("", "", "key"),
    "d": Container("{", "}", "key"),
    "l": Container("[", "]", "value"),
    "s": Container("[", "]", "value"),
    "t": Container("[", "]", "value"),
    "p": Container("", "", "value"),
    "{": Container("", "", "value"),
    "(": Container("", "", "value"),
}
"""A function's arguments, those that stand in a dictionary, dictionary, list, set, tuple, mere parentheses; and the

brackets that their first element decides: a dictionary or a set, a tuple or parentheses.
"""
_OPENED: Final = {"[": "l", "{": "{", "(": "("}
_CLOSED: Final = {"]": "l", "}": "kds{", ")": "ft("}


class CallState(Struct, omit_defaults=True):
    """Where in a call's arguments the reader is: `at` names what comes next, `within` the containers it is in."""

    at: At = "argument"
    within: Annotated[str, Meta(max_length=MAX_DEPTH, pattern=r"^[fkdlst{(]*$")] = ""
    """Kinds of containers, innermost last. Empty: no call is open."""
    begun: bool = False
    """The innermost container has a member."""
    kept: Annotated[str, Meta(max_length=MAX_KEPT)] = ""
    """The JSON text of the first element of a container that is not decided."""
    name: Annotated[str, Meta(max_length=WINDOW)] = ""
    """The function that is called."""
    placed: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Arguments that came without a name."""
    quote: Quote = ""
    verbatim: bool = False
    """The string has no escapes."""
    keyed: bool = False
    """The string is a key."""
    depth: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Brackets that are open in text that is passed on as it is."""

    @property
    def quoted(self) -> bool:
        """White space counts here, and markers do not."""
        return self.at == "text" or self.quote != ""


class Writer:
    """The arguments' JSON text, on its way into `found`."""

    def __init__(self, state: CallState, found: Found) -> None:
        self.state = state
        self.found = found

    def open(self, name: str) -> None:
        """A call begins."""
        state = self.state
        state.at, state.within, state.begun, state.name, state.placed = "argument", "f", False, name, 0
        self.found.open_call(name, "{")

    def key(self, key: str) -> None:
        """A member begins with this key, which is JSON text."""
        self.say(f", {key}" if self.state.begun else key)
        self.state.begun, self.state.at = True, "colon"

    def element(self) -> None:
        """A value begins here."""
        if self.state.within[-1] in "lst":
            self.say(", " if self.state.begun else "")
            self.state.begun = True

    def enter(self, bracket: str) -> None:
        """A container begins here. If it is the first element of another one, that is no dictionary."""
        self.settle("s", "t")
        self.element()
        kind = _OPENED[bracket]
        self.state.within, self.state.begun, self.state.at = self.state.within + kind, False, "value"
        self.say(CONTAINERS[kind].opens)

    def leave(self) -> None:
        """The innermost container ends."""
        state = self.state
        self.settle("s" if state.kept else "d", "p" if state.kept else "t")
        kind = state.within[-1]
        self.say(CONTAINERS[kind].closes)
        state.within, state.at = state.within[:-1], "after"
        state.begun = state.begun or kind != "k"

    def close(self, bracket: str) -> bool:
        """The innermost container of this bracket's kind ends, with all within, or else the innermost of all.

        False where nothing but the call is open and the bracket cannot be its own.
        """
        within = self.state.within
        place = max(within.rfind(kind) for kind in _CLOSED[bracket])
        if place < 0 and len(within) == 1:
            return False
        for _ in within[place:]:
            self.leave()
        return True

    def settle(self, brace: str, parenthesis: str) -> None:
        """Decide what the innermost container is, if that was open."""
        kind = self.state.within[-1]
        if kind in "{(":
            self.decide(brace if kind == "{" else parenthesis)

    def decide(self, kind: str) -> None:
        """The innermost container is of this kind."""
        state = self.state
        kept, state.kept = state.kept, ""
        state.within, state.begun = state.within[:-1] + kind, bool(kept)
        self.found.add_arguments(CONTAINERS[kind].opens + kept)

    def say(self, text: str) -> None:
        """More JSON text of the innermost container."""
        state = self.state
        if state.within[-1] in "{(":
            if len(state.kept) + len(text) <= MAX_KEPT:
                state.kept += text
                return
            state.keyed = state.within[-1] == "{"
            self.settle("d", "t")
        self.found.add_arguments(text)
