"""The lines of a batch: OpenAI's input form in, OpenAI's output form out. No I/O."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from headrace.client.door import ENDPOINTS, Request
from headrace.protocol.errors import HeadraceError

LONGEST_CUSTOM_ID: Final = 512

Code = Literal[
    "invalid_json_line",
    "line_too_long",
    "missing_required_parameter",
    "invalid_custom_id",
    "duplicate_custom_id",
    "invalid_method",
    "invalid_url",
]


class Refusal(Struct, kw_only=True):
    """Why a line was not sent: ``param`` names its field, ``line`` counts from 1."""

    code: Code
    message: str
    param: str | None = None
    line: int | None = None


class Reply(Struct, kw_only=True):
    """What the servers said to a line."""

    status_code: int
    request_id: str
    body: Raw


class Row(Struct, kw_only=True):
    """One line of the output or of the error file; either ``response`` or ``error`` is there."""

    id: str
    custom_id: str | None
    response: Reply | None = None
    error: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that may be sent. ``size`` is in bytes, ``digest`` stands for what it asks."""

    number: int
    custom_id: str
    url: str
    body: Raw
    size: int
    digest: str

    def request(self, batch: str) -> Request:
        """The request of this line in a batch: always under the same request_id, so that it runs once."""
        return Request(self.url, self.body, request_id=f"{batch}-{self.digest}", key=self)

    def answered(self, request_id: str, response: Raw) -> Row:
        """Its line in the output file."""
        return self._row(Reply(status_code=200, request_id=request_id, body=response))

    def failed(self, request_id: str, error: HeadraceError) -> Row:
        """Its line in the error file."""
        body = Raw(error.error.model_dump_json().encode())
        return self._row(Reply(status_code=error.status, request_id=request_id, body=body))

    def _row(self, reply: Reply) -> Row:
        return Row(id=row_id(self.digest), custom_id=self.custom_id, response=reply)


class Refused(Exception):
    """A line that cannot be sent."""

    def __init__(self, refusal: Refusal, custom_id: str | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.custom_id = custom_id

    def row(self, number: int, text: bytes) -> Row:
        """Its line in the error file."""
        self.refusal.line = number
        return Row(id=refused_id(text), custom_id=self.custom_id, error=self.refusal)


_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


def read_line(text: bytes, number: int) -> Line:
    """Reads one line of the input. What its body asks is checked when it is sent. Raises Refused."""
    try:
        fields = _fields.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Refusal(code="invalid_json_line", message=f"The line is not a JSON object: {error}.")) from None
    custom_id = _custom_id(fields)
    if _string(fields, "method", custom_id) != "POST":
        raise _refused("invalid_method", "method must be POST.", "method", custom_id)
    url = _string(fields, "url", custom_id)
    if url not in ENDPOINTS:
        raise _refused("invalid_url", f"url must be one of {', '.join(ENDPOINTS)}, got {url[:80]!r}.", "url", custom_id)
    body = fields.get("body")
    if body is None:
        raise _refused("missing_required_parameter", "body is required.", "body", custom_id)
    digest = _digest(custom_id.encode(), url.encode(), bytes(body))
    return Line(number, custom_id, url, body, len(text), digest)


def too_long(most: int) -> Refused:
    """The refusal of a line of more than ``most`` bytes."""
    return Refused(Refusal(code="line_too_long", message=f"The line has more than {most} bytes."))


def duplicate(line: Line) -> Refused:
    """The refusal of a line whose custom_id an earlier one has."""
    message = f"custom_id {line.custom_id[:80]!r} is that of an earlier line."
    return _refused("duplicate_custom_id", message, "custom_id", line.custom_id)


def encode_row(row: Row) -> bytes:
    """The row as a line of its file."""
    return _encode(row) + b"\n"


def refused_id(text: bytes) -> str:
    """The id of the row of a line that is refused, from what stands in it."""
    return row_id(_digest(text))


def row_id(digest: str) -> str:
    return f"batch_req_{digest}"


def _custom_id(fields: dict[str, Raw]) -> str:
    custom_id = _string(fields, "custom_id", None)
    if not 1 <= len(custom_id) <= LONGEST_CUSTOM_ID:
        message = f"custom_id must have 1 to {LONGEST_CUSTOM_ID} characters, got {len(custom_id)}."
        raise _refused("invalid_custom_id", message, "custom_id", None)
    return custom_id


def _string(fields: dict[str, Raw], name: str, custom_id: str | None) -> str:
    if name not in fields:
        raise _refused("missing_required_parameter", f"{name} is required.", name, custom_id)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        code: Code = (
            "invalid_custom_id" if name == "custom_id" else "invalid_url" if name == "url" else "invalid_method"
        )
        raise _refused(code, f"{name} must be a string.", name, custom_id) from None


def _refused(code: Code, message: str, param: str, custom_id: str | None) -> Refused:
    return Refused(Refusal(code=code, message=message, param=param), custom_id)


def _digest(*parts: bytes) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()
