"""What a request costs in a batcher, and without Triton what is missing."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.inference import program, triton
from benchmarks.inference.benchmark import LOAD
from benchmarks.lab.run import run
from benchmarks.results.schema import load


def test_a_request_costs_time(tmp_path):
    out = tmp_path / "inference.json"
    assert run("inference", ["--only", "submit", "--rehearse", "--requests", "3", "--out", str(out)]) == 0
    rows = load(out).rows
    assert [row.figure for row in rows] == ["submit_us", "submit_handed_us"]
    assert all(row.value > 0 and row.n == 3 for row in rows)


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


def test_every_figure_is_found_on_the_simulated_driver(tmp_path):
    out = tmp_path / "load.json"
    assert run("inference_load", ["--rehearse", "--seconds", "0.02", "--out", str(out)]) == 0
    found = {row.figure: row for row in load(out).rows}
    assert set(found) == set(LOAD.goals)
    assert found["unseen_batch_error"].n == 80 and 0 <= found["unseen_batch_coverage"].value <= 1


def test_bounds_between_sizes_that_have_run():
    taken = {size: [1.0 + 0.1 * size] * program.RUNS for size in program.SIZES}
    found = program.unseen(taken)
    assert found["unseen_batch_error"][0] < 0.01 and found["unseen_batch_coverage"][0] == 1
