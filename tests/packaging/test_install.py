"""An installed package, wheel or editable, finds its libraries and puts the shim before the driver."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

import pytest
from conftest import new_environment, run

LOCATE = """
import dataclasses, json, cudasched.hook as hook
print(json.dumps({name: str(path) for name, path in dataclasses.asdict(hook.locate()).items()}))
"""

# Opens the driver as any CUDA program does and makes the first call, over the simulated driver.
FIRST_CALL = """
import ctypes
import cudasched
from cudasched import hook
driver = ctypes.CDLL("{name}")
assert driver.cuInit(0) == 0
assert hook.load_core().state().attached
print(hook.load_core().state().driver_path)
"""


def located(outside: Callable[..., str], python: pathlib.Path) -> dict[str, pathlib.Path]:
    return {name: pathlib.Path(path) for name, path in json.loads(outside(python, LOCATE)).items()}


def over_simulated_driver(files: dict[str, pathlib.Path], directory: pathlib.Path) -> dict[str, str]:
    """The environment of a program that runs on the simulated driver."""
    return os.environ | {
        "CUDASCHED_DRIVER": str(files["simulated_driver"]),
        "CUDASCHED_SIM_DIR": str(directory / "device"),
        "CUDASCHED_RUN_DIR": str(directory / "run"),
    }


@pytest.fixture(scope="session")
def editable(
    source: pathlib.Path, build_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The Python of a fresh environment with the source tree installed in place."""
    python = new_environment(tmp_path_factory.mktemp("editable"))
    run([python, "-m", "pip", "install", "-e", "."], cwd=source, env=build_environment)
    return python


@pytest.fixture(params=["installed", "editable"])
def python(request: pytest.FixtureRequest) -> pathlib.Path:
    return request.getfixturevalue(request.param)


def test_finds_every_library(python: pathlib.Path, outside: Callable[..., str]) -> None:
    files = located(outside, python)
    assert sorted(files) == ["core", "engine", "shim", "simulated_driver", "stub"]
    assert [str(path) for path in files.values() if not path.is_file()] == []


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda.so"])
def test_shim_stands_before_the_driver(
    python: pathlib.Path, outside: Callable[..., str], tmp_path: pathlib.Path, name: str
) -> None:
    files = located(outside, python)
    environment = over_simulated_driver(files, tmp_path)
    assert outside(python, FIRST_CALL.format(name=name), env=environment) == str(files["simulated_driver"])


def test_command_runs_an_unmodified_program(
    python: pathlib.Path, outside: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    """The program imports nothing of ours, and its first driver call comes to the shim all the same."""
    files = located(outside, python)
    program = "import ctypes; driver = ctypes.CDLL('libcuda.so.1'); print(driver.cuInit(0), driver._name)\n"
    program += "print(any(line.rstrip().endswith('hook/libcuda.so.1') for line in open('/proc/self/maps')))"
    printed = run(
        [python.parent / "cudasched", "run", "--class", "best-effort", "--", python, "-c", program],
        cwd=tmp_path,
        env=over_simulated_driver(files, tmp_path),
    )
    assert printed.split() == ["0", "libcuda.so.1", "True"]


def test_editable_install_runs_the_source_tree(
    editable: pathlib.Path, source: pathlib.Path, outside: Callable[..., str]
) -> None:
    assert outside(editable, "import cudasched; print(cudasched.__file__)").startswith(str(source))


def test_exceptions_find_their_handlers(installed: pathlib.Path, outside: Callable[..., str]) -> None:
    """One is thrown and caught in the engine, the next in the Python module: the unwinder finds the frames of both."""
    code = "import cudasched; from cudasched import hook\ntry: hook.load_core().set_process_class('latency', 0, -1.0)\n"
    assert "SLO" in outside(installed, code + "except cudasched.ConfigError as error: print(error)")


@pytest.mark.parametrize("home", ["/proc", "/nonexistent"])
def test_import_needs_no_writable_directory(installed: pathlib.Path, outside: Callable[..., str], home: str) -> None:
    """/proc takes no files, from root neither."""
    environment = os.environ | {"HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": "/proc"}
    environment.pop("CUDASCHED_DRIVER", None)
    assert outside(installed, "import cudasched; print(cudasched.__version__)", cwd="/proc", env=environment)


def test_wheel_needs_no_compiler_to_run(
    installed: pathlib.Path, outside: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    """Neither a compiler nor CUDA's header wheels come with the package."""
    listed = outside(installed, "from importlib.metadata import distributions as d; print(*(x.name for x in d()))")
    assert not any(name.startswith(("nvidia-", "pybind11", "scikit", "cmake", "ninja")) for name in listed.split())
