"""Builds and installs the package as a user would, from a copy of the tree, into virtual environments of its own."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(command: Sequence[str | pathlib.Path], **options: Any) -> str:
    """Runs a command to its end and returns what it printed; fails with all of it."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        **options,
    )
    assert done.returncode == 0, (
        f"{' '.join(str(word) for word in command)}: exit code {done.returncode}\n{done.stdout}"
    )
    return done.stdout


def copy_source(directory: pathlib.Path) -> pathlib.Path:
    """Copies what a clone would have: no build output can help a build from it."""
    # safe.directory: a checkout may belong to another user than the one who tests it.
    git = ["git", "-c", f"safe.directory={ROOT}"]
    listed = run([*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return directory


def new_environment(directory: pathlib.Path) -> pathlib.Path:
    """Makes a virtual environment and returns its Python."""
    run([sys.executable, "-m", "venv", directory])
    return directory / "bin" / "python"


@pytest.fixture(scope="session")
def build_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which builds of equal sources find what other builds compiled, where ccache is the launcher.

    Each build finds the headers of CUDA and pybind11 as a user's does, in the environment that pip makes for it.
    """
    base = tmp_path_factory.getbasetemp()
    temporary = base / "tmp"
    temporary.mkdir()
    return os.environ | {"CCACHE_BASEDIR": str(base), "TMPDIR": str(temporary)}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the source tree."""
    return copy_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def wheel(
    source: pathlib.Path, build_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The wheel that `pip wheel .` builds; beside it, in `debug`, what debug_symbols.py makes of that build."""
    directory = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", directory], cwd=source, env=build_environment)
    (build,) = (source / "build").iterdir()
    run([sys.executable, ROOT / "scripts/debug_symbols.py", build, directory / "debug"])
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The Python of a fresh environment with the wheel installed."""
    python = new_environment(tmp_path_factory.mktemp("installed"))
    run([python, "-m", "pip", "install", wheel])
    return python


@pytest.fixture
def outside(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Runs Python code far from the source tree, so that only what is installed can be found."""

    def run_code(python: pathlib.Path, code: str, **options: Any) -> str:
        return run([python, "-c", code], **({"cwd": tmp_path} | options)).strip()

    return run_code
