"""Every setting, from the environment: HEADRACE_ and the field's name in capitals."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace.broker.tls import context
from headrace.protocol.base import refusal
from headrace.protocol.jobs import Via

PREFIX: Final = "HEADRACE_"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]

_PASSWORD: Final = re.compile(r"(?<=://)([^/@:\s]*):\S*@")
_BETWEEN_URLS: Final = re.compile(r",(?=\w+://)")
_SERVERS: Final = {
    "amqp_url": (("amqp", "amqps"), "amqp://user:password@host:port/vhost"),
    "redis_url": (("redis", "rediss", "unix"), "redis://user:password@host:port/db"),
}
"""Schemes and form of the URLs that name a server."""


class SettingsError(Exception):
    """A setting has a value that it cannot have: names the variable, never the value."""


def masked(urls: str) -> str:
    """The URL, or list of URLs, with every password replaced by ***."""
    return ",".join(_PASSWORD.sub(r"\1:***@", url) for url in _BETWEEN_URLS.split(urls))


class Settings(BaseSettings):
    """What a process of Headrace can be told. Without amqp_url and redis_url everything runs in one process."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, hide_input_in_errors=True)

    amqp_url: Annotated[str | None, Field(repr=False)] = Field(
        default=None, description="RabbitMQ, amqp://user:password@host:port/vhost; several separated by commas"
    )
    redis_url: Annotated[str | None, Field(repr=False)] = Field(
        default=None, description="Redis, redis://user:password@host:port/db"
    )
    tls_ca: Path | None = Field(
        default=None,
        description="file of the authorities that vouch for amqps:// and rediss://; the system's if not set",
    )
    tls_cert: Path | None = Field(default=None, description="file of this process's own certificate, for both servers")
    tls_key: Path | None = Field(default=None, description="file of its key, if that is not in tls_cert")
    client: str = Field(
        default="local",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="name of this client: first word of its topics, and the scope of its request ids",
    )
    via: Via = Field(
        default="amqp",
        description="what brings events to this client: amqp (RabbitMQ's topic exchange) or redis (streams)",
    )
    model: str = Field(
        default="demo",
        min_length=1,
        description="model asked for where a request names none: demo, a folder or a hub name",
    )
    deadline: float = Field(
        default=24 * 3600.0, gt=0, description="seconds from submit until a request without an answer is given up"
    )
    replay_ttl: float = Field(
        default=600.0,
        ge=1,
        le=7 * 24 * 3600,
        description="seconds that an outcome and its chunks stay readable",
    )
    max_request_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=1024,
        le=512 * 1024 * 1024,
        description="bytes of the largest request that is taken",
    )
    max_message_bytes: int = Field(
        default=16 * 1024 * 1024, ge=1024, description="bytes of the largest message that RabbitMQ is sent"
    )
    inline_bytes: int = Field(
        default=1024 * 1024, ge=1024, description="bytes above which a request waits in Redis, and not in its queue"
    )
    queue_limit: int = Field(
        default=100_000, ge=1, description="requests that wait in a queue at most; the same for every process"
    )
    stream_buffer: int = Field(
        default=1024, ge=1, description="chunks of one stream held for a reader that is behind; later ones are replayed"
    )
    silence: float = Field(
        default=5.0, gt=0, description="seconds without an event after which a stream's result is looked up"
    )
    batch_in_flight: int = Field(default=256, ge=1, description="requests that a batch has under way at a time")
    batch_attempts: int = Field(default=5, ge=1, description="tries of a batch line whose failure is retryable")
    batch_replay_ttl: float = Field(
        default=3600.0,
        ge=1,
        le=7 * 24 * 3600,
        description="seconds within which a killed batch finds the answers of the lines that it had under way",
    )
    heartbeat: float = Field(
        default=6.0, gt=0, description="seconds after which a worker that gives no sign of life is replaced"
    )
    max_attempts: int = Field(default=5, ge=1, description="failures after which a request is given up")
    max_rescues: int = Field(
        default=3, ge=1, description="worker processes that a request may take down before it is given up"
    )
    consumer_timeout: float = Field(
        default=1800.0, gt=0, description="seconds that RabbitMQ lets a worker hold a message: its consumer_timeout"
    )
    memory_limit: float = Field(
        default=0.85, gt=0, le=1, description="share of Redis' memory in use above which no request is begun"
    )
    lag_limit: float = Field(
        default=5.0, gt=0, description="seconds that derendering may be behind before no request is begun"
    )
    client_weights: dict[str, float] = Field(
        default={}, description='shares of clients that wait at the same time, as {"evals": 0.5}; 1 unless named'
    )
    client_requests: int = Field(
        default=0, ge=0, description="requests that one client may have under way; 0 for no limit"
    )
    client_tokens: int = Field(
        default=0, ge=0, description="tokens of prompts and answers that one client may have under way; 0 for no limit"
    )
    verify_clients: bool = Field(
        default=False, description="take a request only from the RabbitMQ user that is named as its client"
    )
    trusted_users: list[str] = Field(
        default=[], description="RabbitMQ users that may send for any client, as workers and gateways do"
    )
    grace: float = Field(default=30.0, ge=0, description="seconds that a stopping worker has to finish what it holds")
    health_host: str = Field(default="127.0.0.1", description="address on which a worker answers /live and /ready")
    health_port: int | None = Field(
        default=None, ge=0, le=65535, description="port on which it does; it does not if not set"
    )
    log_level: LogLevel = Field(default="info", description="least severe log event that is written")
    log_format: LogFormat = Field(default="json", description="form of log events: json lines, or console for people")

    @field_validator("amqp_url", "redis_url")
    @classmethod
    def _names_a_server(cls, urls: str | None, info: ValidationInfo) -> str | None:
        """An empty variable is one that is not set."""
        if urls is None or not urls.strip():
            return None
        schemes, form = _SERVERS[info.field_name or ""]
        if not all(_usable(url, schemes) for url in _BETWEEN_URLS.split(urls)):
            raise refusal(f"must be {form}, special characters of the password percent-encoded")
        return urls

    @classmethod
    def load(cls) -> Settings:
        """The settings of this process's environment. Raises SettingsError."""
        try:
            return cls()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise SettingsError(f"{PREFIX}{str(first['loc'][0]).upper()}: {first['msg']}.") from None

    def tls(self) -> ssl.SSLContext | None:
        """What encrypted connections go by; None for the system's authorities. Raises SettingsError."""
        if self.tls_ca is None and self.tls_cert is None:
            return None
        try:
            return context(self.tls_ca, self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            named = " or ".join(
                f"{PREFIX}{name.upper()}" for name in ("tls_ca", "tls_cert", "tls_key") if getattr(self, name)
            )
            raise SettingsError(f"{named} cannot be used: {error.strerror or error}.") from None

    @property
    def embedded(self) -> bool:
        """Whether the broker is in this process: no server is named."""
        return self.amqp_url is None and self.redis_url is None

    def require_both_urls_or_none(self) -> None:
        """Raises SettingsError where only one server is named."""
        if (self.amqp_url is None) != (self.redis_url is None):
            given, missing = ("AMQP", "REDIS") if self.redis_url is None else ("REDIS", "AMQP")
            raise SettingsError(f"{PREFIX}{missing}_URL is not set while {PREFIX}{given}_URL is: set both or none.")

    @property
    def amqp_urls(self) -> list[str]:
        """The URLs of RabbitMQ's nodes."""
        return [] if self.amqp_url is None else _BETWEEN_URLS.split(self.amqp_url)

    def shown(self) -> list[Shown]:
        """Every setting as it may be printed: passwords masked."""
        return [
            Shown(
                variable=f"{PREFIX}{name.upper()}",
                value=_printable(getattr(self, name)),
                default=_printable(field.default),
                description=field.description or "",
            )
            for name, field in type(self).model_fields.items()
        ]


@dataclass(frozen=True, slots=True)
class Shown:
    """One setting for people."""

    variable: str
    value: str
    default: str
    description: str


def _usable(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in schemes and port != 0 and (parts.scheme == "unix" or bool(parts.hostname))


def _printable(value: object) -> str:
    return "not set" if value is None else masked(value) if isinstance(value, str) else f"{value}"
