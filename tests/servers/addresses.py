"""What a test knows of a running server: where it listens, and how to stop it and bring it back."""

import itertools
import json
import os
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import redis

_serial = itertools.count(1)


class Node(Protocol):
    """A server that this test run started, local process or container."""

    @property
    def pid(self) -> int:
        """Process id of the server as this machine sees it."""

    def start(self) -> None:
        """Start, or start again on the same port with the same data; returns once it answers."""

    def stop(self) -> None:
        """End in good order; returns once the process is gone."""

    def kill(self) -> None:
        """End by SIGKILL; returns once the process is gone."""

    def close(self) -> None:
        """End in any order and forget the data."""

    def ctl(self, *args: str) -> str:
        """Run the server's own command-line tool (rabbitmqctl, redis-cli) and return what it prints."""


@dataclass(frozen=True, slots=True)
class Server:
    host: str
    port: int
    node: Node | None = None  # None: somebody else's, shared by many test runs

    @property
    def _owned(self) -> Node:
        if self.node is None:
            raise RuntimeError(
                f"the server on port {self.port} is shared: use private_rabbitmq or private_redis to stop one"
            )
        return self.node

    @property
    def pid(self) -> int:
        return self._owned.pid

    def start(self) -> None:
        self._owned.start()

    def stop(self) -> None:
        self._owned.stop()

    def kill(self) -> None:
        self._owned.kill()

    def ctl(self, *args: str) -> str:
        return self._owned.ctl(*args)


@dataclass(frozen=True, slots=True)
class RabbitMQ(Server):
    management_port: int = 15672
    user: str = "guest"
    password: str = "guest"
    vhost: str = "/"

    @classmethod
    def at(cls, url: str, management_url: str | None) -> "RabbitMQ":
        """The shared server that the two URLs name."""
        parts = urlsplit(url)
        management_port = urlsplit(management_url).port if management_url else None
        return cls(
            host=parts.hostname or "127.0.0.1",
            port=parts.port or 5672,
            management_port=management_port or 15672,
            user=parts.username or "guest",
            password=parts.password or "guest",
        )

    @property
    def url(self) -> str:
        return f"amqp://{self.user}:{self.password}@{self.host}:{self.port}/{quote(self.vhost, safe='')}"

    @property
    def management_url(self) -> str:
        return f"http://{self.host}:{self.management_port}"

    def api(self, method: str, path: str, body: object = None, timeout: float = 10.0) -> Any:
        """Call the management HTTP API, e.g. api("GET", "/api/connections"); far quicker than rabbitmqctl."""
        token = b64encode(f"{self.user}:{self.password}".encode()).decode()
        request = urllib.request.Request(
            self.management_url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            content = reply.read()
        return json.loads(content) if content else None

    @contextmanager
    def fresh_vhost(self) -> Iterator["RabbitMQ"]:
        """The same server, narrowed to a virtual host that only the caller knows."""
        name = f"test-{os.getpid()}-{next(_serial)}"
        path = f"/api/vhosts/{quote(name, safe='')}"
        self.api("PUT", path, {})
        try:
            everything = {"configure": ".*", "write": ".*", "read": ".*"}
            self.api("PUT", f"/api/permissions/{quote(name, safe='')}/{self.user}", everything)
            yield replace(self, vhost=name)
        finally:
            self.api("DELETE", path)


@dataclass(frozen=True, slots=True)
class Redis(Server):
    db: int = 0

    @classmethod
    def at(cls, url: str) -> "Redis":
        """The shared server that the URL names."""
        parts = urlsplit(url)
        return cls(host=parts.hostname or "127.0.0.1", port=parts.port or 6379)

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/{self.db}"

    @contextmanager
    def fresh_database(self) -> Iterator["Redis"]:
        """The same server, narrowed to an empty database that only the caller uses.

        Numbers are dealt round by a counter in database 0, so that test runs side by side do not meet.
        Scripts and pub/sub channels are the server's, not the database's.
        """
        with redis.Redis(host=self.host, port=self.port, decode_responses=True) as root:
            databases = int(root.config_get("databases")["databases"])
            number = 1 + int(root.incr("test:databases")) % (databases - 1)
        with redis.Redis(host=self.host, port=self.port, db=number) as own:
            own.flushdb()
            yield replace(self, db=number)
            own.flushdb()
