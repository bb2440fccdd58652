"""Is it up? Each probe connects once, within two seconds, and says yes or no."""

import http.client
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable

LOOPBACK = "127.0.0.1"
START_LIMIT = 90.0  # seconds; a cold Erlang on a busy two-core machine takes about 15


class NotReadyError(RuntimeError):
    """The server did not answer in time, or ended; the message carries the end of its log."""


def wait_until_ready(name: str, ready: Callable[[], bool], ended: Callable[[], bool], log: Callable[[], str]) -> None:
    """Probe until `ready`; NotReadyError when the server has `ended` or START_LIMIT is over."""
    deadline = time.monotonic() + START_LIMIT
    while not ready():
        if ended() or time.monotonic() > deadline:
            raise NotReadyError(f"{name} {'ended' if ended() else 'does not answer'}:\n{log()[-2000:]}")
        time.sleep(0.05)


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def redis_answers(host: str, port: int) -> bool:
    return _exchange(host, port, b"PING\r\n", b"+PONG")


def rabbitmq_answers(host: str, port: int, management_port: int) -> bool:
    # The server's half of the AMQP greeting is a method frame (type 1); it comes once the node has booted.
    return _exchange(host, port, b"AMQP\x00\x00\x09\x01", b"\x01") and _speaks_http(host, management_port)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _exchange(host: str, port: int, greeting: bytes, start_of_reply: bytes) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.sendall(greeting)
            return connection.recv(16).startswith(start_of_reply)
    except OSError:
        return False


def _speaks_http(host: str, port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://{host}:{port}/api/overview", timeout=2).close()
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return refusal.code == http.HTTPStatus.UNAUTHORIZED  # it is up, and asks who we are
    except (OSError, http.client.HTTPException):
        return False
    return True
