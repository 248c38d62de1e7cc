"""The C++ example on a GPU, where its kernel is PTX and its CUDA calls reach the real driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PATIENCE_S
from cudasched import hook

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    libraries = hook.locate().engine.parent
    program = tmp_path / "shared_gpu"
    command = [compiler, "-std=c++20", "-O1", f"-I{ROOT}/include", f"{ROOT}/examples/cpp/shared_gpu.cpp", "-o", program]
    command += [f"-L{libraries}", "-lcudasched", f"-Wl,-rpath,{libraries}", "-pthread", "-ldl"]
    subprocess.run(command, check=True)
    environment = dict(os.environ, CUDASCHED_RUN_DIR=str(tmp_path / "run"), CUDASCHED_CACHE_DIR="off")
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "50 requests" in done.stdout and "simulated" not in done.stdout
    assert "launches: 50 latency" in done.stdout and "scheduling: on" in done.stdout
