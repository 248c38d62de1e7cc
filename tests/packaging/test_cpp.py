"""A C++ program builds with the installed wheel, by find_package(cudasched), and its CUDA calls come to the shim."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from conftest import ROOT, run
from test_install import located, over_simulated_driver

HERE = pathlib.Path(__file__).resolve().parent


def build(source: pathlib.Path, python: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Builds a program as a user would. Returns its build directory."""
    package = run([python, "-m", "cudasched", "--cmake-dir"], cwd=directory).strip()
    binary = directory / "build"
    run(["cmake", "-S", source, "-B", binary, f"-Dcudasched_DIR={package}"])
    run(["cmake", "--build", binary])
    return binary


def test_the_example_runs(installed: pathlib.Path, outside: Callable[..., str], tmp_path: pathlib.Path) -> None:
    binary = build(ROOT / "examples/cpp", installed, tmp_path)
    environment = over_simulated_driver(located(outside, installed), tmp_path)
    printed = run([binary / "shared_gpu"], cwd=tmp_path, env=environment)
    assert "simulated GPU: 50 requests" in printed
    assert "launches: 50 latency" in printed and "scheduling: on" in printed


def test_a_program_that_links_the_driver_links_the_shim(
    installed: pathlib.Path, outside: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    binary = build(HERE / "links_the_driver", installed, tmp_path)
    files = located(outside, installed)
    environment = over_simulated_driver(files, tmp_path)
    assert run([binary / "with_shim"], cwd=tmp_path, env=environment).strip() == "attached"
    # The real driver's place is taken by the simulated one, which the loader finds before the program's first line.
    environment["LD_LIBRARY_PATH"] = str(files["simulated_driver"].parent)
    refused = run([binary / "without_shim"], cwd=tmp_path, env=environment).strip()
    assert refused.startswith(f"CUDA is loaded already ({files['simulated_driver']})")
    # The same program under `cudasched run`, as it is.
    environment.pop("LD_LIBRARY_PATH")
    command = [installed.parent / "cudasched", "run", "--", binary / "without_shim"]
    assert run(command, cwd=tmp_path, env=environment).strip() == "attached"


@pytest.mark.parametrize("option", ["--include-dir", "--cmake-dir"])
def test_the_command_says_what_the_package_says(
    installed: pathlib.Path, outside: Callable[..., str], tmp_path: pathlib.Path, option: str
) -> None:
    function = {"--include-dir": "get_include", "--cmake-dir": "get_cmake_dir"}[option]
    printed = run([installed, "-m", "cudasched", option], cwd=tmp_path).strip()
    assert printed == outside(installed, f"import cudasched; print(cudasched.{function}())")
    held = {path.name for path in pathlib.Path(printed).iterdir()}
    assert held >= ({"cudasched"} if option == "--include-dir" else {"cudaschedConfig.cmake"})


def test_a_region_that_nothing_keeps_is_warned_of() -> None:
    command = ["g++", "-std=c++20", "-Wall", "-fsyntax-only", f"-I{ROOT}/include", "-x", "c++", "-"]
    region = "cudasched::Region(cudasched::Class::kLatency);"  # ends where it begins
    printed = run(command, input=f"#include <cudasched/scheduler.hpp>\nint main() {{ {region} }}\n")
    assert "nodiscard" in printed
