"""The layers are looked at through the links, and what must start light does not load a model library."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]

LIGHT = [
    "headrace",
    "headrace.cli",
    "headrace.client",
    "headrace.protocol",
    "headrace.broker.embedded",
    "headrace.broker.rabbitmq",
    "headrace.broker.redis",
    "headrace.workers.render",
    "headrace.workers.derender",
    "headrace.workers.control",
]


def test_the_import_graph_reaches_through_the_links() -> None:
    graph = grimp.build_graph("headrace", cache_dir=None)
    for folder in ("protocol", "broker", "workers"):
        files = {path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"}
        names = {".".join(("headrace", *path.relative_to(ROOT).with_suffix("").parts)) for path in files}
        assert names and names <= graph.modules
    assert "headrace.protocol.jobs" in graph.find_modules_directly_imported_by("headrace.workers.runtime")


@pytest.mark.parametrize("module", LIGHT)
def test_it_starts_without_a_model_library(module: str) -> None:
    heavy = ["torch", "transformers", "vllm"]
    script = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_each_module_has_one_identity() -> None:
    script = (
        "import sys, headrace.protocol.jobs, headrace.broker.ports, headrace.workers.runtime\n"
        "print(*[name for name in sys.modules if name.split('.')[0] in ('protocol', 'broker', 'workers')])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
