"""The benchmark of traced training, for seconds on the simulated driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cells import META

from benchmarks.lab import run as lab
from benchmarks.observe import tracing
from benchmarks.results.schema import TracingRow, load, merge


def test_the_training_is_traced_once(tmp_path: Path) -> None:
    results = tmp_path / "traced" / "tracing.json"
    arguments = ["--rehearse", "--out", str(results)]
    assert lab.run("tracing", arguments) == 0
    traced = json.loads(results.with_suffix(".cells").read_text())["done"]["traced"]
    assert traced["steps"] > 0
    assert traced["launches_kept"] > 0
    assert traced["dropped"] == 0
    assert traced["samples"], "memory was looked at"
    assert (tmp_path / "traced" / "traced.pftrace").stat().st_size > 0
    assert "<title>GPU time: traced.pftrace</title>" in (tmp_path / "traced" / "traced.html").read_text()
    assert lab.run("tracing", arguments) == 0
    (row,) = load(results).rows
    assert isinstance(row, TracingRow)
    assert row.steps == traced["steps"] and row.limit_mb == 256 and 0 < len(row.resident_mb) <= 10
    done = json.loads(results.with_suffix(".cells").read_text())["done"]
    assert done["traced"] == traced, "not again"


def test_what_another_gpu_measured_stays(tmp_path: Path) -> None:
    found = {
        "seconds": 3.0,
        "steps_per_s": 3.0,
        "resident_growth_mb": 0.0,
        "limit_mb": 64,
        "samples": [(1.0, 5.0, 0.1)],
    }
    found |= {"most_parts_mb": 1.0, "dropped": 0, "rotated_away": 0, "launches_kept": 9, "converted_s": 1.0}
    path = tmp_path / "tracing.json"
    for gpu, steps in (("simulated", 9), ("NVIDIA H200", 8), ("NVIDIA H200", 7)):
        merge(path, META.model_copy(update={"gpu": gpu}), [tracing.row_of(gpu, {**found, "steps": steps})])
    results = load(path)
    rows = {row.gpu: row.steps for row in results.rows if isinstance(row, TracingRow)}
    assert rows == {"simulated": 9, "NVIDIA H200": 7} and len(results.rows) == 2
    assert set(results.meta_by_kind) == set(rows) and results.meta.gpu == "NVIDIA H200"


def test_memory_that_grows_and_dropped_records_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"steps_per_s": 1.0, "resident_growth_mb": 99.0, "flat": False, "most_parts_mb": 1.0, "dropped": 0}
    monkeypatch.setattr(tracing, "run", lambda *_: found)
    monkeypatch.setattr(tracing, "merge", lambda *_: None)
    monkeypatch.setattr(tracing, "row_of", lambda *_: None)
    assert lab.run("tracing", ["--rehearse", "--out", str(tmp_path / "a.json")]) == 1
    found.update(flat=True, dropped=1)
    assert lab.run("tracing", ["--rehearse", "--out", str(tmp_path / "b.json")]) == 1
