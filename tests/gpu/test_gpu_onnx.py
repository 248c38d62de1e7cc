"""ONNX Runtime's CUDA provider in a batcher: on the region's stream, all of it latency work."""

from __future__ import annotations

import io
from typing import Any

import cudasched  # before torch
import numpy as np
import pytest
import torch
from cudasched.inference import Batcher
from cudasched.inference.onnx import Model

runtime = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in runtime.get_available_providers():
    pytest.skip("needs onnxruntime-gpu", allow_module_level=True)

WIDTH = 512


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)), torch.nn.GELU()).eval()


@pytest.fixture(scope="module")
def file(network: torch.nn.Module) -> bytes:
    written = io.BytesIO()
    names: Any = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    torch.onnx.export(network, (torch.zeros(1, WIDTH),), written, dynamo=False, **names)
    return written.getvalue()


def test_requests_run_on_the_regions_stream_and_are_right(network: torch.nn.Module, file: bytes) -> None:
    torch.zeros(1, device="cuda")  # so that the provider is given PyTorch's stream
    model = Model(file, np.zeros(WIDTH, np.float32), sizes=(1, 4))
    rows = np.random.default_rng(0).standard_normal((32, WIDTH), np.float32)
    before = cudasched.metrics().launches
    with Batcher(model, model.sizes, slo_ms=None, name="onnx") as batcher:
        found = [each.result(60) for each in [batcher.submit_future(row) for row in rows]]
        batches = sum(batcher.statistics().batches.values())
    assert model._session.get_providers()[0] == "CUDAExecutionProvider"
    launched = {name: count - before.get(name, 0) for name, count in cudasched.metrics().launches.items()}
    with torch.no_grad():
        expected = network(torch.from_numpy(rows)).numpy()
    assert np.allclose(found, expected, atol=2e-3)  # the provider computes in TF32
    assert launched["latency"] >= 8 * batches and not launched.get("best_effort"), launched
