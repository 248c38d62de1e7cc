"""The benchmark of what it costs to be seen, rehearsed with few clients and few rounds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.lab.run import run
from benchmarks.observe.benchmark import BENCHMARK
from benchmarks.results.schema import FigureRow, load

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
