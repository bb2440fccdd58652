"""compose.yaml starts what this code can run: its commands, settings and images exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import main
from headrace.cli.worker import ROLES
from headrace.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "ops" / "docker" / "Dockerfile").read_text()
WORKERS = ["render", "generate", "derender"]

Services = dict[str, dict[str, Any]]

VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


@pytest.fixture(scope="module")
def services() -> Services:
    """The services with every ${NAME:-default} replaced by its default."""
    text = VARIABLE.sub(r"\1", (ROOT / "compose.yaml").read_text())
    loaded: Services = yaml.safe_load(text)["services"]
    return loaded


def test_there_are_both_servers_and_every_role(services: Services) -> None:
    assert set(services) == {"rabbitmq", "redis", *WORKERS}


@pytest.mark.parametrize("role", WORKERS)
def test_the_command_of_each_worker_is_one_of_ours(services: Services, role: str) -> None:
    name, *arguments = services[role]["command"]
    context = main.commands[name].make_context(name, arguments)  # parsed, not run
    assert role in context.params["roles"]
    assert context.params["model"] == "demo"


def test_every_role_is_served_by_somebody(services: Services) -> None:
    served = {word for role in WORKERS for word in services[role]["command"]}
    assert set(ROLES) <= served


@pytest.mark.parametrize("role", WORKERS)
def test_each_variable_that_a_worker_gets_is_a_setting(services: Services, role: str) -> None:
    environment = services[role]["environment"]
    known = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    assert {"HEADRACE_AMQP_URL", "HEADRACE_REDIS_URL"} <= set(environment) <= known


@pytest.mark.parametrize("role", WORKERS)
def test_a_worker_is_given_longer_to_stop_than_it_takes(services: Services, role: str) -> None:
    seconds = float(services[role]["stop_grace_period"].removesuffix("s"))
    assert seconds > float(services[role]["environment"]["HEADRACE_GRACE"])


@pytest.mark.parametrize("role", WORKERS)
def test_the_image_of_each_worker_is_a_target_of_the_dockerfile(services: Services, role: str) -> None:
    build = services[role]["build"]
    assert ROOT / build["dockerfile"] == ROOT / "ops" / "docker" / "Dockerfile"
    assert re.search(rf"^FROM \S+ AS {build['target']}$", DOCKERFILE, re.MULTILINE)


def test_only_the_generate_worker_carries_torch(services: Services) -> None:
    assert {role: services[role]["build"]["target"] for role in WORKERS} == {
        "render": "cpu",
        "generate": "generate",
        "derender": "cpu",
    }


def test_every_service_restarts_is_bounded_and_is_seen_to_be_well(services: Services) -> None:
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert service["mem_limit"], name
        assert service["healthcheck"]["test"], name


def test_the_servers_are_published_on_the_loopback_only(services: Services) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_redis_never_evicts_and_keeps_a_file(services: Services) -> None:
    command = services["redis"]["command"].split()
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--maxmemory-policy"], options["--appendonly"]) == ("noeviction", "yes")


def test_all_that_the_dockerfile_copies_exists_and_is_let_into_the_build() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert any(source == each or source.startswith(f"{each}/") for each in admitted)
