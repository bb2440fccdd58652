"""The same two servers as containers, for machines where a Docker engine answers."""

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

from testcontainers.core.container import DockerContainer

from tests.servers.local import redis_options
from tests.servers.probes import free_ports, rabbitmq_answers, redis_answers, wait_until_ready

RABBITMQ_IMAGE = os.environ.get("HEADRACE_TEST_RABBITMQ_IMAGE", "rabbitmq:4-management-alpine")
REDIS_IMAGE = os.environ.get("HEADRACE_TEST_REDIS_IMAGE", "redis:8-alpine")
STOP_LIMIT = 30  # seconds


@cache
def docker_answers() -> bool:
    """Whether `docker info` succeeds within five seconds."""
    try:
        return subprocess.run(["docker", "info"], check=False, capture_output=True, timeout=5).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


class Container(ABC):
    """One container; its ports on this machine are chosen here, so that they stay the same over stop and start."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the server inside is up."""

    def __init__(self, image: str, inside_ports: Sequence[int], command: Sequence[str] = ()) -> None:
        self._description = DockerContainer(image)
        for inside, outside in zip(inside_ports, free_ports(len(inside_ports)), strict=True):
            self._description.with_bind_ports(inside, outside)
        if command:
            self._description.with_command(list(command))
        self._created = False

    @property
    def host(self) -> str:
        return self._description.get_container_host_ip()

    @property
    def pid(self) -> int:
        container = self._description.get_wrapped_container()
        container.reload()
        return int(container.attrs["State"]["Pid"])

    def outside(self, inside_port: int) -> int:
        return self._description.get_exposed_port(inside_port)

    def start(self) -> None:
        if self._created:
            self._description.get_wrapped_container().start()
        else:
            self._description.start()
            self._created = True
        wait_until_ready(self._description.image, self.answers, lambda: self.pid == 0, self._read_log)

    def stop(self) -> None:
        self._description.get_wrapped_container().stop(timeout=STOP_LIMIT)

    def kill(self) -> None:
        self._description.get_wrapped_container().kill()
        self._description.get_wrapped_container().wait(timeout=STOP_LIMIT)

    def close(self) -> None:
        self._description.stop()

    def run(self, *command: str) -> str:
        done = self._description.exec(list(command))
        if done.exit_code != 0:
            raise RuntimeError(f"{command[0]} ended with {done.exit_code}: {done.output.decode()}")
        return done.output.decode()

    def _read_log(self) -> str:
        return b"".join(self._description.get_logs()).decode(errors="replace")


class ContainerRedis(Container):
    def __init__(self, *, append_only: bool) -> None:
        options = [*redis_options(append_only=append_only), "--protected-mode", "no"]  # callers come from outside it
        super().__init__(REDIS_IMAGE, [6379], ["redis-server", *options])

    @property
    def port(self) -> int:
        return self.outside(6379)

    def answers(self) -> bool:
        return redis_answers(self.host, self.port)

    def ctl(self, *args: str) -> str:
        return self.run("redis-cli", *args)


class ContainerRabbit(Container):
    def __init__(self) -> None:
        super().__init__(RABBITMQ_IMAGE, [5672, 15672])

    @property
    def port(self) -> int:
        return self.outside(5672)

    @property
    def management_port(self) -> int:
        return self.outside(15672)

    def answers(self) -> bool:
        return rabbitmq_answers(self.host, self.port, self.management_port)

    def ctl(self, *args: str) -> str:
        return self.run("rabbitmqctl", *args)
