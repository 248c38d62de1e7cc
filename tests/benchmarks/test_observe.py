"""The costs of being seen, rehearsed with few clients and few rounds; and training that is traced for seconds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from test_cells import META

from benchmarks.lab.run import run
from benchmarks.observe import tracing
from benchmarks.observe.benchmark import BENCHMARK
from benchmarks.results.schema import FigureRow, TracingRow, load, merge

GOALS = list(BENCHMARK.goals)


def figures(path: Path) -> dict[str, FigureRow]:
    return {row.figure: row for row in load(path).figures}


@pytest.fixture
def rehearsal(tmp_path: Path) -> list[str]:
    return ["--rehearse", "--out", str(tmp_path / "observe.json"), "--only"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_figures_are_measured_without_a_gpu(rehearsal: list[str], tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    assert run("observe", [*rehearsal, "counters,trace,scrape"]) == 0
    measured = figures(tmp_path / "observe.json")
    assert list(measured) == GOALS[:4]
    assert all(row.low <= row.value <= row.high for row in measured.values())
    assert measured["trace_bytes_a_record"].value == 48
    assert load(tmp_path / "observe.json").meta.gpu.startswith("none (")


def test_without_a_compiler_it_says_so(
    rehearsal: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert run("observe", [*rehearsal, "counters"]) == 1
    assert "no compiler /nowhere/g++" in capsys.readouterr().out


def test_the_page_is_painted(rehearsal: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    cores = os.sched_getaffinity(0)
    try:
        status = run("observe", [*rehearsal, "page"])
    finally:
        os.sched_setaffinity(0, cores)
    if status == 1:
        assert "needs Chromium" in capsys.readouterr().out
    else:
        assert list(figures(tmp_path / "observe.json")) == GOALS[4:]


def test_the_training_is_traced_once(tmp_path: Path) -> None:
    results = tmp_path / "traced" / "tracing.json"
    arguments = ["--rehearse", "--out", str(results)]
    assert run("tracing", arguments) == 0
    traced = json.loads(results.with_suffix(".cells").read_text())["done"]["training"]
    assert traced["row"]["steps"] > 0 and traced["row"]["launches_kept"] > 0 and traced["row"]["dropped"] == 0
    assert traced["samples"], "memory was looked at"
    assert (tmp_path / "traced" / "traced.pftrace").stat().st_size > 0
    assert "<title>GPU time: traced.pftrace</title>" in (tmp_path / "traced" / "traced.html").read_text()
    assert run("tracing", arguments) == 0
    (row,) = load(results).rows
    assert isinstance(row, TracingRow)
    assert row.model_dump() == traced["row"] and row.limit_mb == 256 and 0 < len(row.resident_mb) <= 10
    assert json.loads(results.with_suffix(".cells").read_text())["done"]["training"] == traced, "not again"


TRACED = TracingRow.model_validate(
    dict.fromkeys(TracingRow.model_fields, 1) | {"gpu": "simulated", "resident_mb": [5.0], "dropped": 0}
)


def test_what_another_gpu_measured_stays(tmp_path: Path) -> None:
    path = tmp_path / "tracing.json"
    for gpu, steps in (("simulated", 9), ("NVIDIA H200", 8), ("NVIDIA H200", 7)):
        row = TRACED.model_copy(update={"gpu": gpu, "steps": steps})
        merge(path, META.model_copy(update={"gpu": gpu}), [row])
    results = load(path)
    rows = {row.gpu: row.steps for row in results.rows if isinstance(row, TracingRow)}
    assert rows == {"simulated": 9, "NVIDIA H200": 7} and len(results.rows) == 2
    assert set(results.meta_by_kind) == set(rows) and results.meta.gpu == "NVIDIA H200"


@pytest.mark.parametrize("wrong", [{"growth_mb": 99.0}, {"dropped": 1}])
def test_memory_that_grows_and_dropped_records_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, float]
) -> None:
    row = TRACED.model_copy(update=wrong)
    monkeypatch.setattr(tracing, "run", lambda *_: {"row": row.model_dump()})
    assert run("tracing", ["--rehearse", "--out", str(tmp_path / "a.json")]) == 1
    assert load(tmp_path / "a.json").rows == [row], "it is kept"
