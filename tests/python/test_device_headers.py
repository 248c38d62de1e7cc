"""The headers for kernels come with the package, and the example that uses them runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cudasched
import pytest
from cudasched.errors import Error
from cudasched.tune import compile as compilation
from support import PATIENCE_S, ROOT


def test_the_package_has_the_work_queue() -> None:
    installed = Path(cudasched.get_include()) / "cudasched" / "device" / "work_queue.cuh"
    assert installed.read_text() == (ROOT / "include/cudasched/device/work_queue.cuh").read_text()


def test_the_example_runs(tmp_path: Path) -> None:
    try:
        compilation.choose()
    except Error as error:
        pytest.skip(str(error))
    command = [sys.executable, str(ROOT / "examples" / "persistent_queue.py"), "--numbers", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and ("launch 2" in done.stdout or "compiled for sm_90" in done.stdout), done
