"""Fixtures for real servers. One RabbitMQ and one Redis serve a whole run; each test gets its own corner of them.

`vhost` and `redis_db` are what nearly every test wants. `private_rabbitmq` and `private_redis` may be stopped,
killed and started again; they belong to one test module.
"""

import logging
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import settings

from tests.servers import RabbitMQ, Redis, open_rabbitmq, open_redis, shared_rabbitmq, shared_redis

# How long an example takes says something about the machine only.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, _end_in_order)


def _end_in_order(number: int, frame: FrameType | None) -> None:
    # By default SIGTERM (a time limit in CI) would end Python at once and leave the servers running.
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """A test that runs a command leaves no log handler of the command's behind."""
    yield
    logger = logging.getLogger("headrace")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ with the management API, shared by all tests."""
    if shared := shared_rabbitmq():
        yield shared
        return
    with open_rabbitmq() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """A Redis without persistence and without eviction, shared by all tests."""
    if shared := shared_redis():
        yield shared
        return
    with open_redis() as server:
        yield server


@pytest.fixture
def vhost(rabbitmq: RabbitMQ) -> Iterator[RabbitMQ]:
    """RabbitMQ narrowed to a virtual host of the test's own: `vhost.url` to connect, `vhost.api` to look and meddle."""
    with rabbitmq.fresh_vhost() as narrowed:
        yield narrowed


@pytest.fixture
def redis_db(redis_server: Redis) -> Iterator[Redis]:
    """Redis narrowed to an empty database of the test's own."""
    with redis_server.fresh_database() as narrowed:
        yield narrowed


@pytest.fixture(scope="module")
def private_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that the module's tests may stop(), kill(), start() and ctl()."""
    with open_rabbitmq() as server:
        yield server


@pytest.fixture(scope="module")
def private_redis() -> Iterator[Redis]:
    """A Redis that the module's tests may stop(), kill() and start(); it keeps what it acknowledged."""
    with open_redis(append_only=True) as server:
        yield server
