"""What every wire type shares: unknown fields survive, and a refusal names its field."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

JsonObject = dict[str, JsonValue]

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1


class WireModel(BaseModel):
    """A JSON object of the protocol. Fields that we do not know are kept and written out again."""

    model_config = ConfigDict(
        extra="allow",
        protected_namespaces=(),
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class Request(WireModel):
    """What a client fills in. A null for a field that has another default counts as not sent."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_sent(cls, data: object) -> object:
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = cls.model_fields
        return {k: v for k, v in data.items() if v is not None or k not in known or known[k].default is None}


def new_request_id() -> str:
    """A random request id of 32 hexadecimal characters."""
    return secrets.token_hex(16)


def unix_now() -> int:
    """The `created` of a response that nobody dated: Unix seconds."""
    return int(time.time())


def refusal(message: str, *, field: str | int | None = None) -> PydanticCustomError:
    """The error that a validator raises; `field` is added to the path that the client is told."""
    return PydanticCustomError("refused", "{message}", {"message": message, "field": field})


def _no_negative(ids: list[int], info: ValidationInfo) -> list[int]:
    if ids and min(ids) < 0:
        first = next(i for i, token_id in enumerate(ids) if token_id < 0)
        raise refusal(f"{info.field_name} must not contain negative values", field=first)
    return ids


TokenIds = Annotated[list[int], AfterValidator(_no_negative)]


def _usable_salt(salt: object) -> object:
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise refusal("Parameter 'cache_salt' must be a non-empty string if provided.")


# Keeps one client's prefixes out of another's cache hits; 1 to 1024 characters.
CacheSalt = Annotated[Annotated[str, Field(max_length=1024)] | None, BeforeValidator(_usable_salt)]

Priority = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


def absent(value: object) -> bool:
    """For `exclude_if`: a null that is left out of a dump."""
    return value is None


def empty(value: list[object]) -> bool:
    """For `exclude_if`: an empty list that is left out of a dump."""
    return not value
