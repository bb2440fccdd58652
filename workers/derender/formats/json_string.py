"""What a JSON string says, whole or in pieces."""

from __future__ import annotations

import json
import re
from typing import Final

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_DECIDED: Final = re.compile(
    r"""(?: [^\\] | \\[^u] | \\u(?![dD][89abAB]).{4}
    | \\u[dD][89abAB].{2} (?: \\u[dD][c-fC-F].{2} | (?= [^\\] | \\[^u] | \\u[^dD] | \\u[dD][^c-fC-F] )) )*""",
    re.DOTALL | re.VERBOSE,
)
"""Characters and escapes; a first half of a surrogate pair waits for what follows it."""


def string_of(text: str) -> str | None:
    """The string that this JSON text is; None where it is none. Half a surrogate pair becomes U+FFFD."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return _LONE_SURROGATE.sub("\ufffd", value) if isinstance(value, str) else None


def unescaped(text: str) -> tuple[str, str]:
    """What this text from within a JSON string says, and its end that more text decides: part of an escape.

    Text with an escape that JSON does not know is left as it is.
    """
    decided = _DECIDED.match(text)
    at = decided.end() if decided else 0
    return string_of(f'"{text[:at]}"') or text[:at], text[at:]
