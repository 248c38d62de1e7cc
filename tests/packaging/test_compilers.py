"""Where a build cannot succeed, it stops at once and says how it can."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def refused(build: pathlib.Path, *options: str, **environment: str) -> str:
    """Configures, without the compilers that the environment names, and returns CMake's complaint."""
    cmake = shutil.which("cmake")
    assert cmake is not None
    command = [cmake, "-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", *options]
    others = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    done = subprocess.run(command, capture_output=True, text=True, env=others | environment, timeout=300)
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def test_no_compiler(tmp_path: pathlib.Path) -> None:
    said = refused(tmp_path / "build", "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", PATH=str(tmp_path))
    assert "no C++ compiler on the PATH" in said
    assert "apt install g++" in said


def test_an_old_compiler(tmp_path: pathlib.Path) -> None:
    for name, macros in {"gcc": "", "g++": "-U__GNUC__ -D__GNUC__=11"}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} {macros} "$@"\n')
        (tmp_path / name).chmod(0o755)
    said = refused(tmp_path / "build", CC=str(tmp_path / "gcc"), CXX=str(tmp_path / "g++"))
    assert "needs GCC 12 or later" in said
    assert "is GCC 11." in said
    assert "CC=gcc-12 CXX=g++-12" in said


@pytest.mark.parametrize("processor", ["riscv64", "armv7l", "ppc64le"])
def test_another_processor(processor: str, tmp_path: pathlib.Path) -> None:
    said = refused(tmp_path / "build", "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={processor}")
    assert f"cudasched runs on Linux x86-64 and arm64; this is Linux {processor}." in said


def test_a_program_with_an_old_toolkit(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cuda.h").write_text("#define CUDA_VERSION 12020\n")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{tmp_path}", f"-I{ROOT}/include", "-x", "c++", "-"]
    source = "#include <cudasched/graphs.hpp>\n"
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=300)
    first = next(line for line in done.stderr.splitlines() if "error" in line)
    assert "graphs.hpp needs the cuda.h of CUDA 12.4 or later" in first
