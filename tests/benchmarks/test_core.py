"""benchmarks/core: a rehearsal of every group, and what follows from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms
from benchmarks.core.benchmark import GOALS, find
from benchmarks.lab.run import TIME_RAN_OUT, run
from benchmarks.lab.session import judged
from benchmarks.results.schema import FigureRow, load

TRIES = 5
LAUNCHER = {"launches_per_s": 1e4, "seconds": 8.0}


def measured() -> dict[str, Any]:
    """Each group measured, with round figures."""
    return {
        "readme_example/latency_alone/0": {"latency_ms": [1.0] * 100, "per_s": None},
        "readme_example/best_effort_alone/0": {"latency_ms": [], "per_s": 100.0},
        "readme_example/both/0": {"latency_ms": [1.1] * 100, "per_s": 94.0},
        "readme_example/both/1": {"latency_ms": [1.3] * 100, "per_s": 90.0},
        "backlog/kernels": [[1000.0, 10]],
        "backlog/start/0": {"latency_ms": [1.0] * 99 + [2.0], "alone_ms": [1.0] * 60, "untracked": 0, "launches": 5},
        "backlog/start/1": {"latency_ms": [4.0] * 100, "alone_ms": [1.0] * 40, "untracked": 3, "launches": 5},
        "launcher/busy": LAUNCHER | {"cpu": 0.5},
        "launcher/sleeps/0": LAUNCHER | {"cpu": 0.1, "latency_ms": [1.0] * 90 + [3.0] * 10},
        "launcher/spins/0": LAUNCHER | {"cpu": 0.9, "latency_ms": [1.0] * 90 + [2.0] * 10},
        "launcher/spins/1": LAUNCHER | {"cpu": 1.0, "latency_ms": [1.0] * 90 + [4.0] * 10},
        "launcher/sleeps/1": LAUNCHER | {"cpu": 0.3, "latency_ms": [1.02] * 90 + [3.0] * 10},
    }


def by_name(done: dict[str, Any]) -> dict[str, FigureRow]:
    return {row.figure: row for row in judged(GOALS, find(done), {})}


def test_every_figure_has_its_goal_and_follows_from_what_was_measured() -> None:
    rows = by_name(measured())
    assert list(rows) == list(GOALS)
    example = rows["readme_example_p99_ratio"]
    assert (example.value, example.low, example.high, example.n) == pytest.approx((1.2, 1.1, 1.3, 200))
    # 60 requests of 1 ms leave 94% of the time.
    assert rows["readme_example_best_effort"].value == pytest.approx(0.92 / 0.94)
    bound = bound_p99_ms([1.0], [(1000.0, 1)], 1.0, CONTEXT_SWITCH_MS)
    assert rows["backlog_worst_p99_over_bound"].value == pytest.approx(4.0 / bound, rel=0.01)
    assert rows["backlog_pooled_p99_over_bound"].n == 200
    assert (rows["backlog_untracked"].value, rows["backlog_untracked"].n) == (3, 2)
    asleep = rows["launcher_cpu_gated"]
    assert (asleep.value, asleep.low, asleep.high, asleep.n) == pytest.approx((0.2, 0.1, 0.3, 16))
    assert (rows["launcher_cpu_busy"].value, rows["launcher_cpu_spinning"].value) == pytest.approx((0.5, 0.95))
    # Of all requests, and the least and the most of the pairs of turns.
    tail = rows["launcher_p99_of_spinning"]
    assert (tail.value, tail.low, tail.high, tail.n) == pytest.approx((3 / 4, 3 / 4, 3 / 2, 200))
    assert rows["launcher_p50_of_spinning"].high == pytest.approx(1.02)


def test_what_was_not_measured_has_no_row() -> None:
    done = measured()
    del done["backlog/kernels"], done["launcher/busy"]
    missing = {"launcher_cpu_busy"} | {n for n in GOALS if n.startswith("backlog")}
    assert set(GOALS) - set(by_name(done)) == missing
    # A turn without its twin is no comparison.
    del done["launcher/spins/0"], done["launcher/sleeps/1"]
    missing |= {"launcher_p50_of_spinning", "launcher_p99_of_spinning"}
    assert set(GOALS) - set(by_name(done)) == missing
    assert find({}) == {}


def test_a_rehearsal_has_every_figure_and_a_rerun_does_what_is_missing(
    tmp_path: Path, simulated_driver: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "core.json"
    common = ["--rehearse", "--out", str(out)]
    short = ["--seconds", "1.5", "--starts", "2", "--batch", "1"]
    assert run("core", [*common, *short, "--minutes", "0.1"]) == TIME_RAN_OUT, "nothing fits"
    assert not out.exists()
    # A busy machine starves a program until there is nothing to count; that group is tried again.
    assert 0 in (run("core", [*common, *short]) for _ in range(TRIES)), capsys.readouterr().out
    rows = load(out).rows
    assert {row.figure for row in rows} == set(GOALS)
    untracked = next(row for row in rows if row.figure == "backlog_untracked")
    assert untracked.n == 2
    # Nothing is measured twice.
    before = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert run("core", [*common, *short]) == 0
    assert json.loads(out.with_suffix(".cells").read_text())["done"] == before
