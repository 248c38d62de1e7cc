"""Requests beside a training: figures, and a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.inference.beside import ARMS, BENCHMARK, find
from benchmarks.lab.run import run


def test_figures_are_of_the_same_repeat() -> None:
    kept = {"time_slices_steps": [10.0, 20.0, 0.0], "cudasched_steps": [9.0, 30.0, 1.0], "goodput": [0.9]}
    for arm, factor in zip(ARMS, (4.0, 1.5), strict=True):
        kept |= {f"{arm}_alone_ms": [1.0] * 100, f"{arm}_beside_ms": [factor] * 50}
    found = find({"beside": kept})
    assert found["beside_training_best_effort"] == (1.2, 0.9, 1.5, 2), "no steps at all bear no share"
    assert found["beside_training_goodput"][0] == 0.9
    assert found["beside_training_p99_time_slices"] == (4.0, 4.0, 4.0, 50)
    assert found["beside_training_p99_cudasched"][0] == 1.5 and set(found) == set(BENCHMARK.goals)
    assert find({}) == {} and "beside_training_goodput" not in find({"beside": {**kept, "goodput": []}})


def test_a_rehearsal_has_all_cells(tmp_path: Path) -> None:
    for needed in ("fastapi", "uvicorn", "tritonclient.grpc"):
        pytest.importorskip(needed)
    out = tmp_path / "inference.json"
    assert run("inference_beside", ["--rehearse", "--out", str(out)]) == 0
    kept = json.loads(out.with_suffix(".cells").read_text())["done"]["beside"]
    assert all(len(kept[f"{arm}_steps"]) == 1 and kept[f"{arm}_beside_ms"] for arm in ARMS)
