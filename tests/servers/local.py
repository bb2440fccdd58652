"""RabbitMQ and Redis as private child processes: own ports, own data folder, own cookie, loopback only."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.servers.probes import LOOPBACK, free_ports, listens, rabbitmq_answers, redis_answers, wait_until_ready

STOP_LIMIT = 30.0  # seconds; an orderly shutdown of RabbitMQ takes about six


def die_with_parent() -> list[str]:
    """What to start a program with so that the kernel ends it when this process is gone, were it by SIGKILL.

    The kernel watches the thread that started it: from another thread than the main one it would end too early.
    """
    watched = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
    return ["setpriv", "--pdeathsig", "KILL", "--"] if watched and shutil.which("setpriv") else []


class NotInstalledError(RuntimeError):
    """A server's program is not on this machine: install it with the system's package manager, or start Docker."""


def find_rabbitmq() -> Path:
    """The folder of RabbitMQ's own scripts.

    Debian's /usr/sbin/rabbitmq-server is a wrapper that insists on the system's account and folders; the scripts
    that it calls run as anybody.
    """
    for folder in sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"), reverse=True):
        if (folder / "rabbitmq-server").exists():
            return folder
    return _find("rabbitmq-server").parent


def find_redis() -> Path:
    """The redis-server program."""
    return _find("redis-server")


def _find(program: str) -> Path:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
    found = shutil.which(program, path=path)
    if found is None:
        raise NotInstalledError(f"{program} is not installed: apt-get install {program}, or start Docker")
    return Path(found)  # not resolved: redis-server is a link whose name tells the program what to be


class Process:
    """One child process with a log file, that is started, awaited and ended within bounds."""

    def __init__(self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._name = str(command[0])
        self._command = [str(part) for part in command]
        self._log = log
        self._env = env
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, "not started"
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self, ready: Callable[[], bool]) -> None:
        assert not self.running, "already started"
        with self._log.open("ab") as log:
            # Its own session: a Ctrl-C at the terminal is for pytest, which then ends its servers in order.
            self._child = subprocess.Popen(
                [*die_with_parent(), *self._command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until_ready(self._name, ready, lambda: not self.running, self._read_log)

    def end(self, number: signal.Signals) -> None:
        if self._child is None or not self.running:
            return
        self._child.send_signal(number)
        try:
            self._child.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(STOP_LIMIT)

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace")


def redis_options(*, append_only: bool) -> list[str]:
    """How every Redis of the tests is set, wherever it runs: a database for each test, and nothing evicted."""
    settings = {
        "databases": "4096",
        "maxmemory-policy": "noeviction",
        "save": "",
        "appendonly": "yes" if append_only else "no",
        "appendfsync": "always",
    }
    return [part for key, value in settings.items() for part in (f"--{key}", value)]


class LocalRedis:
    """One redis-server. With `append_only`, a restart finds every acknowledged write again; else it finds nothing."""

    def __init__(self, folder: Path, *, append_only: bool) -> None:
        self.host = LOOPBACK
        (self.port,) = free_ports(1)
        self._program = find_redis()
        place = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(folder)]
        command: list[str | Path] = [self._program, *place, *redis_options(append_only=append_only)]
        self._process = Process(command, folder / "redis.log")

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process.start(lambda: redis_answers(self.host, self.port))

    def stop(self) -> None:
        self._process.end(signal.SIGTERM)

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def close(self) -> None:
        self.kill()

    def ctl(self, *args: str) -> str:
        return _output([self._program.with_name("redis-cli"), "-h", self.host, "-p", str(self.port), *args])


class LocalRabbit:
    """One RabbitMQ node with the management API, and an epmd of its own so that none is left behind."""

    def __init__(self, folder: Path) -> None:
        self.host = LOOPBACK
        self.port, self.management_port, distribution_port, epmd_port = free_ports(4)
        self._scripts = find_rabbitmq()
        self._epmd_port = epmd_port
        self._env = _rabbit_environment(folder, self.port, distribution_port, epmd_port)
        _write_rabbit_configuration(folder, self.port, self.management_port)
        # In the foreground, as our child: the node would start it as a daemon that outlives everything.
        self._epmd = Process([_find("epmd"), "-port", str(epmd_port), "-address", LOOPBACK], folder / "epmd.log")
        self._process = Process([self._scripts / "rabbitmq-server"], folder / "rabbitmq.log", self._env)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        if not self._epmd.running:
            self._epmd.start(lambda: listens(self.host, self._epmd_port))
        self._process.start(lambda: rabbitmq_answers(self.host, self.port, self.management_port))

    def stop(self) -> None:
        self._process.end(signal.SIGTERM)  # the Erlang VM takes it as an orderly shutdown

    def kill(self) -> None:
        self._process.end(signal.SIGKILL)

    def close(self) -> None:
        self.kill()  # not in order: the folder goes with the node
        self._epmd.end(signal.SIGTERM)

    def ctl(self, *args: str) -> str:
        return _output([self._scripts / "rabbitmqctl", *args], self._env)


def _rabbit_environment(folder: Path, port: int, distribution_port: int, epmd_port: int) -> dict[str, str]:
    settings = {
        "RABBITMQ_NODENAME": f"headrace{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_BASE": str(folder),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),  # absent: the machine's own is not ours
        "HOME": str(folder),  # the Erlang cookie lives there
        "RUNNING_UNDER_SYSTEMD": "1",  # the script then becomes the Erlang VM, so that our child is the node itself
        "LANG": "C.UTF-8",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none +sbwtdcpu none +sbwtdio none"
        ),
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
    return inherited | settings


def _write_rabbit_configuration(folder: Path, port: int, management_port: int) -> None:
    lines = [
        f"listeners.tcp.1 = {LOOPBACK}:{port}",
        f"management.tcp.ip = {LOOPBACK}",
        f"management.tcp.port = {management_port}",
        "disk_free_limit.absolute = 50MB",
        "raft.wal_max_size_bytes = 33554432",  # the default of 512 MB is kept in memory, per node
        "log.console = false",
        "log.file.level = warning",
    ]
    (folder / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
    (folder / "enabled_plugins").write_text("[rabbitmq_management].\n")


def _output(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, check=False, env=env, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout
