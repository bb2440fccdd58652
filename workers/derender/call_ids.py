"""Ids of tool calls, in the style of the model's family."""

from __future__ import annotations

import hashlib
import string
from typing import Final

from headrace.workers.derender.formats.tools import CallIds

_ALPHANUMERIC: Final = string.digits + string.ascii_letters
_MISTRAL_LENGTH: Final = 9


def tool_call_id(run: str, choice: int, index: int, name: str = "", style: CallIds = "openai") -> str:
    """The id of a choice's call number `index`, of the function `name`, where the model gave none itself.

    The same whenever and wherever the run is derendered.
    """
    if style == "kimi":
        return f"functions.{name}:{index}"
    digest = hashlib.blake2b(f"{run}\0{choice}\0{index}".encode(), digest_size=8)
    return _alphanumeric(digest.digest()) if style == "mistral" else f"chatcmpl-tool-{digest.hexdigest()}"


def _alphanumeric(data: bytes) -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    number, text = int.from_bytes(data, "big"), ""
    for _ in range(_MISTRAL_LENGTH):
        number, place = divmod(number, len(_ALPHANUMERIC))
        text += _ALPHANUMERIC[place]
    return text
