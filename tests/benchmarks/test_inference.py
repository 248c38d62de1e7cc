"""What a request costs in a batcher, and without Triton what is missing."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.inference import triton
from benchmarks.lab.run import run
from benchmarks.results.schema import load


def test_a_request_costs_time(tmp_path):
    out = tmp_path / "inference.json"
    assert run("inference", ["--only", "submit", "--rehearse", "--requests", "3", "--out", str(out)]) == 0
    (row,) = load(out).rows
    assert row.figure == "submit_us" and row.value > 0 and row.n == 3


def test_triton_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    for needed in ("fastapi", "grpc", "tritonclient.grpc"):
        pytest.importorskip(needed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "inference.json"
    assert run("inference", ["--only", "grpc", "--rehearse", "--out", str(out)]) == 1
    assert "Triton Inference Server is not installed: pip install nvidia-pytriton" in capsys.readouterr().out


def test_the_server_that_is_compared_starts_and_ends(tmp_path):
    for needed in ("fastapi", "uvicorn", "grpc"):
        pytest.importorskip(needed)
    with triton.cudasched(tmp_path) as serving:
        assert serving.http > 0 and serving.grpc > 0 and len(serving.token) >= 32
