"""Triton Inference Server under `cudasched run` on the simulated driver, through what the example does.

Triton's CUDA runtime does not run on the simulated driver. It is shown one that is too old, so that the server goes
without GPUs; the model's processes take the driver as it is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import PATIENCE_S, ROOT, Run

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("pytriton") is None, reason="needs nvidia-pytriton"),
    pytest.mark.skipif(int(numpy.__version__.partition(".")[0]) > 1, reason="Triton's Python back end needs NumPy 1"),
]

MODEL = f"""
import os, sys

os.environ.pop("CUDASCHED_SIM_DRIVER_VERSION")
sys.path.insert(0, {str(ROOT / "tests/python")!r})
import triton_python_backend_utils as triton
from program import Gpu

class TritonPythonModel:
    def initialize(self, args):
        self.gpu = Gpu()

    def execute(self, requests):
        self.gpu.use()
        self.gpu.launch(3)
        self.gpu.synchronize()
        inputs = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("y", 2 * x)]) for x in inputs]
"""
REQUESTS = 8
STUB = "triton_python_backend_stub"


@pytest.fixture
def example(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDASCHED_SIM_DRIVER_VERSION", "11080")
    spec = importlib.util.spec_from_file_location("triton_server", ROOT / "examples/triton_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stubs(directory: Path) -> list[int]:
    """The processes of the model."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if words[0] == os.fsencode(directory / "backends/python" / STUB):
            found.append(int(process.name))
    return found


def test_the_processes_of_its_models_are_scheduled(example: Any, cudasched: Run, tmp_path: Path) -> None:
    with example.serving(tmp_path, ["--class", "latency"], MODEL) as (process, url):
        for number in range(REQUESTS):
            assert example.ask(url, [float(number), 1.0]) == [2.0 * number, 2.0]
        devices = json.loads(cudasched("status", "--json").stdout)["data"]
        clients = [client for device in devices for client in device["clients"]]
        running = stubs(tmp_path)
        assert len(running) == 2 and {client["pid"] for client in clients} == set(running)
        assert {client["client_class"] for client in clients} == {"latency"}
        assert sum(client["launches"] for client in clients) == 3 * REQUESTS
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert stubs(tmp_path) == []


def test_coverage_names_the_processes_of_its_models(example: Any, tmp_path: Path) -> None:
    """The simulated driver has no CUPTI: the launches that cudasched saw are all known, those of the device are not."""
    with example.serving(tmp_path, ["--check-coverage", "--json"], MODEL) as (process, url):
        for number in range(REQUESTS):
            example.ask(url, [float(number)])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1  # not counted is not covered
    (said,) = (line for line in (tmp_path / "log").read_text().splitlines() if line.startswith('{"schema_version"'))
    rows = json.loads(said)["data"]
    assert sum(row["hook_launches"] for row in rows) == 3 * REQUESTS
    assert all(row["name"].startswith(STUB) and "CUPTI" in row["error"] for row in rows)
