"""What the code imports, pyproject.toml declares: no part lives on a package that another part happens to bring."""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"headrace", "tests", "ops"}
REFERENCE = {"tests/golden/record.py", "tests/golden/record_handover.py", "ops/bench/derender_reference.py"}
"""Scripts that run under the reference implementation, which the project never installs."""
ENGINES = Path("headrace/workers/generate/engines")


def declared(*extras: str) -> set[str]:
    """Names of the distributions that the package and the extras ask for."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    names = {normal(re.split(r"[\[<>=;!~ ]", line, maxsplit=1)[0]) for line in lines}
    return names | {"pydantic-core"}  # pydantic asks for the one version that fits it


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def sources(folder: str) -> Iterator[Path]:
    for place, names, files in os.walk(ROOT / folder, followlinks=True):
        names[:] = [name for name in names if name not in {"__pycache__", "node_modules"}]
        yield from ((Path(place) / name).relative_to(ROOT) for name in files if name.endswith(".py"))


def imported(source: Path) -> set[str]:
    """Distributions that a file imports from, wherever in the file it does."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return {distribution(module) for module in modules - set(sys.stdlib_module_names) - OURS}


@cache
def distributions() -> dict[str, set[str]]:
    return {module: {normal(each) for each in names} for module, names in packages_distributions().items()}


def distribution(module: str) -> str:
    known = distributions().get(module, {normal(module)})
    return min(known, key=lambda name: (name != normal(module), name))


@pytest.mark.parametrize(
    ("folder", "extras"), [("headrace", ("generate",)), ("tests", ("generate", "dev")), ("ops", ("generate", "dev"))]
)
def test_every_import_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    allowed = declared(*extras)
    undeclared = {f"{source}: {name}" for source in sources(folder) for name in imported(source) if name not in allowed}
    undeclared -= {f"{script}: vllm" for script in REFERENCE}
    assert undeclared == set()


def test_only_the_engines_import_what_the_generate_extra_brings() -> None:
    extra = declared("generate") - declared()
    users = {source for source in sources("headrace") if imported(source) & extra}
    assert users
    assert {source for source in users if not source.is_relative_to(ENGINES)} == set()
