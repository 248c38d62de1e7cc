"""The examples at their full size; tests/python/test_examples.py runs them in little."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def is_here(package: str) -> bool:
    module = package.removesuffix("-gpu")  # of the same name without a GPU, too
    if find_spec(module) is None:
        return False
    return module == package or "CUDAExecutionProvider" in import_module(module).get_available_providers()


@pytest.mark.parametrize(
    ("command", "said", "needs"),
    [
        ("serve_and_finetune.py --seconds 5", "training steps", "torch"),
        ("two_processes.py --seconds 5", "served", "torch"),
        ("decode_beside_training.py", "ms a token", "torch"),
        ("async_server.py", "twice the same", "torch"),
        ("onnx_server.py --seconds 5", "CUDAExecutionProvider: served", "onnxruntime-gpu"),
        ("library_trainers.py transformers", "trained: 10 steps", "transformers"),
        ("library_trainers.py lightning", "trained: 10 steps", "lightning"),
        ("fractions_with_ray.py --seconds 5", "served", "ray"),
    ],
    ids=lambda value: value.split(".")[0] if ".py" in value else None,
)
def test_it_runs(command: str, said: str, needs: str, tmp_path: Path) -> None:
    if not is_here(needs):
        pytest.skip(f"needs {needs}")
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / script), *arguments],
        env={**os.environ, "CUDASCHED_RUN_DIR": str(tmp_path / "run")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    assert "scheduling is off" not in done.stderr, done.stderr
