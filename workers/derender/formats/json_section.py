"""Where in a section of JSON calls the scanner is, and how much of it is held."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from headrace.workers.derender.formats.argument_text import ArgumentText
from headrace.workers.derender.formats.json_value import ValueState

MAX_NAME: Final = 1024
"""Characters of a key or a name, as JSON text. Longer ones are not read."""
MAX_KEPT: Final = 1 << 16
"""Characters of arguments that may wait for a name that comes after them."""
MAX_UNSURE: Final = 4096
"""Characters that may be held for a start that is not yet sure to be a call; MAX_KEPT more if arguments come first."""

At = Literal["calls", "key", "value", "name", "id", "arguments"]
Reading = Literal["", "key", "name", "id", "arguments", "other", "lost"]


class JsonSection(ArgumentText, omit_defaults=True, tag="json", tag_field="body"):
    """Where in the calls the scanner is: between values (`at`), or inside of one (`reading`)."""

    done: bool = False
    refused: str = ""
    unsure: Annotated[str, Meta(max_length=MAX_UNSURE + MAX_KEPT)] | None = None
    """All that is content if this is no call after all; None once it is sure to be one."""
    at: At = "calls"
    listed: bool = False
    """A list of calls is open."""
    reading: Reading = ""
    value: ValueState = field(default_factory=ValueState)
    raw: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """A key, name or id so far, as JSON text; between key and value the key itself; arguments that are undecided."""
    kept: Annotated[str, Meta(max_length=MAX_KEPT)] = ""
    """Arguments that wait for their name."""
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """A name that waits for its arguments to be sure."""
    id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    announced: bool = False
    argued: bool = False

    @property
    def room(self) -> int:
        """Characters that may be unsure."""
        return MAX_UNSURE + (MAX_KEPT if self.argued else 0)

    def refuse(self) -> None:
        """It was no call: what was unsure is content."""
        self.done, self.refused, self.unsure = True, self.unsure or "", None
