"""Real RabbitMQ and Redis for the tests: given by URL, else in containers, else as local processes."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from docker.errors import DockerException

from tests.servers.addresses import Node, RabbitMQ, Redis
from tests.servers.containers import ContainerRabbit, ContainerRedis, docker_answers
from tests.servers.local import LocalRabbit, LocalRedis

__all__ = ["RabbitMQ", "Redis", "open_rabbitmq", "open_redis", "shared_rabbitmq", "shared_redis"]

AnyNode = TypeVar("AnyNode", bound=Node)


def shared_rabbitmq() -> RabbitMQ | None:
    """The running server that HEADRACE_TEST_AMQP_URL (and HEADRACE_TEST_MANAGEMENT_URL) name, if set."""
    url = os.environ.get("HEADRACE_TEST_AMQP_URL")
    return RabbitMQ.at(url, os.environ.get("HEADRACE_TEST_MANAGEMENT_URL")) if url else None


def shared_redis() -> Redis | None:
    """The running server that HEADRACE_TEST_REDIS_URL names, if set."""
    url = os.environ.get("HEADRACE_TEST_REDIS_URL")
    return Redis.at(url) if url else None


@contextmanager
def open_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ of the caller's own, ended with the block."""
    with ExitStack() as stack:
        node = _in_docker(stack, ContainerRabbit) or _started(stack, LocalRabbit(_folder(stack)))
        yield RabbitMQ(node.host, node.port, node, management_port=node.management_port)


@contextmanager
def open_redis(*, append_only: bool = False) -> Iterator[Redis]:
    """A Redis of the caller's own, ended with the block; with `append_only` its data outlives a restart."""
    with ExitStack() as stack:
        contained = _in_docker(stack, lambda: ContainerRedis(append_only=append_only))
        node = contained or _started(stack, LocalRedis(_folder(stack), append_only=append_only))
        yield Redis(node.host, node.port, node)


def _in_docker(stack: ExitStack, make: Callable[[], AnyNode]) -> AnyNode | None:
    if not docker_answers():
        return None
    try:
        return _started(stack, make())
    except DockerException as refusal:  # an engine that may not pull the image, for one
        sys.stderr.write(f"no test server in Docker, trying this machine's own programs: {refusal}\n")
        return None


def _started(stack: ExitStack, node: AnyNode) -> AnyNode:
    stack.callback(node.close)
    node.start()
    return node


def _folder(stack: ExitStack) -> Path:
    # The Erlang VM may still write its last lines when the folder goes.
    folder = tempfile.TemporaryDirectory(prefix="headrace-test-", ignore_cleanup_errors=True)
    return Path(stack.enter_context(folder))
