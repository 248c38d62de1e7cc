"""The tensor-core instructions and matrix products of csrc/kernels: right on the host, emulated, and compiled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from cudasched.tune.compile import compile_source
from support import PATIENCE_S, ROOT
from synthetic_spaces import KERNELS
from test_kernels import a_compiler

EMULATED = ROOT / "tests" / "csrc" / "kernels"


def build(source: str, macros: Mapping[str, object], directory: Path, *options: str) -> Path:
    """A program of tests/csrc/kernels."""
    program = directory / "check"
    given = [f"-D{name}={value}" for name, value in macros.items()]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-w", f"-I{EMULATED}", f"-I{KERNELS}", *given]
    made = [*command, *options, str(EMULATED / source), "-o", str(program)]
    done = subprocess.run(made, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def test_the_emulated_instructions_do_what_their_documentation_says(tmp_path: Path) -> None:
    program = build("check_mma.cpp", {}, tmp_path)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_the_instructions_compile(target: str) -> None:
    probe = EMULATED / "probe_mma.cu"
    made = compile_source(probe, (), target, a_compiler(), [f"-I{KERNELS}"])
    assert made.image[:4] == b"\x7fELF"
