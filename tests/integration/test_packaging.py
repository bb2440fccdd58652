"""What a user installs: the wheel, made from the sdist, in an environment of its own beside unlucky folder names."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("protocol", "broker", "workers")


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, run with nothing of this process's Python path."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_files() -> set[str]:
    """Every file that belongs in the package, as headrace/...; the three links are followed."""
    found = set()
    for folder, names, files in os.walk(ROOT / "headrace", followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        found |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in files}
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel, in a folder with the user's own workers/ and so on.

    Its dependencies are those of the running environment, by way of a path file: that is quick, needs no network,
    and does not bring the running environment's own Headrace along, since path files are not read at second hand.
    """
    home = tmp_path_factory.mktemp("user")
    venv.create(home / "venv", with_pip=False)
    python = home / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in LINKED:
        (home / name).mkdir()
        (home / name / "__init__.py").write_text(f"raise ImportError('the user has a {name} of their own')\n")
    return python


def home_of(python: Path) -> Path:
    return python.parents[2]


def test_the_wheel_holds_each_file_of_the_package_once_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        counts = Counter(name for name in archive.namelist() if ".dist-info/" not in name)
    assert set(counts) == package_files()
    assert set(counts.values()) == {1}


def test_the_wheel_carries_what_is_not_python(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"headrace/py.typed", "headrace/demo_model/model.safetensors", "headrace/demo_model/tokenizer.json"} <= names
    assert {f"headrace/broker/redis/{script}.lua" for script in ("claim", "append", "outcome")} <= names


def test_the_sdist_holds_each_file_of_the_package_once(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = Counter(member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile())
        assert not [member for member in archive.getmembers() if member.issym() or member.islnk()]
    assert {name for name in names if name.startswith("headrace/")} == package_files()
    assert not [name for name in names if name.startswith(LINKED)]
    assert set(names.values()) == {1}


def test_every_module_imports_beside_the_users_own_folders(installed: Path) -> None:
    script = """
import importlib, pkgutil, headrace
names = [found.name for found in pkgutil.walk_packages(headrace.__path__, "headrace.")]
for name in names:
    if name != "headrace.__main__":  # that one is the command itself
        importlib.import_module(name)
print(headrace.__file__, *names)
"""
    place, *names = run(installed, "-c", script, cwd=home_of(installed)).split()
    assert Path(place).is_relative_to(home_of(installed))
    modules = {Path(name).with_suffix("") for name in package_files() if name.endswith(".py")}
    expected = {".".join(m.parent.parts if m.name == "__init__" else m.parts) for m in modules} - {"headrace"}
    assert set(names) == expected


def test_all_but_the_engines_import_where_torch_and_transformers_are_missing(installed: Path) -> None:
    script = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # an import of either now fails
import headrace, headrace.cli, headrace.client, headrace.batch
import headrace.broker.embedded, headrace.broker.rabbitmq, headrace.broker.redis
import headrace.workers.render.worker, headrace.workers.derender.worker, headrace.workers.control
"""
    run(installed, "-c", script, cwd=home_of(installed))


def test_the_command_is_installed(installed: Path) -> None:
    assert "worker" in run(installed.with_name("headrace"), "--help", cwd=home_of(installed))
