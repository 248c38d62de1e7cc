"""Serving: the cost of a request, goodput beside Triton, the table of the goals, and requests beside a training."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inference import beside, goodput, program, table, triton
from benchmarks.inference.benchmark import LOAD
from benchmarks.inference.goodput import GRID, OURS, RATES
from benchmarks.lab.run import main, run
from benchmarks.meta import describe
from benchmarks.results.schema import load

ONE, APART, _ = OURS
META = describe(True, "0", torch_needed=False)


@pytest.fixture
def serving() -> None:
    """Skips where a server of ours, or its callers, cannot run."""
    for needed in ("fastapi", "uvicorn", "grpc", "tritonclient.grpc"):
        pytest.importorskip(needed)


def test_a_request_costs_time(tmp_path: Path) -> None:
    out = tmp_path / "inference.json"
    assert run("inference", ["--only", "submit", "--rehearse", "--requests", "3", "--out", str(out)]) == 0
    rows = load(out).rows
    assert [row.figure for row in rows] == ["submit_us", "submit_handed_us"]
    assert all(row.value > 0 and row.n == 3 for row in rows)


def test_triton_that_is_missing_is_named(
    serving: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "inference.json"
    assert run("inference", ["--only", "grpc", "--rehearse", "--out", str(out)]) == 1
    assert "Triton Inference Server is not installed: pip install nvidia-pytriton" in capsys.readouterr().out


def test_the_server_that_is_compared_starts_and_ends(serving: None, tmp_path: Path) -> None:
    with triton.cudasched(tmp_path) as started:
        assert started.http > 0 and started.grpc > 0 and len(started.token) >= 32


def test_every_figure_is_found_on_the_simulated_driver(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    assert run("inference_load", ["--rehearse", "--seconds", "0.02", "--out", str(out)]) == 0
    found = {row.figure: row for row in load(out).rows}
    assert set(found) == set(LOAD.goals)
    assert found["unseen_batch_error"].n == 80 and 0 <= found["unseen_batch_coverage"].value <= 1


def test_bounds_between_sizes_that_have_run() -> None:
    taken = {size: [1.0 + 0.1 * size] * program.RUNS for size in program.SIZES}
    found = program.unseen(taken)
    assert found["unseen_batch_error"][0] < 0.01 and found["unseen_batch_coverage"][0] == 1


def test_a_figure_is_over_tritons_best_setting() -> None:
    done = {APART: {"poisson": [900, 1100, 1000], "bursts": [500]}, ONE: {"poisson": [990], "bursts": [600]}}
    assert goodput.find(done) == {}, "Triton is missing"
    done |= {arm: {"poisson": [rate], "bursts": [0]} for arm, rate in zip(GRID, (500, 800, 700), strict=False)}
    found = goodput.find(done)
    assert found["goodput_of_triton_poisson"] == (1000 / 800, 900 / 800, 1100 / 800, 3)
    assert found["triton_poisson_per_s"] == (800, 500, 800, 3)
    assert found[f"{ONE}_poisson_per_s"][0] == 990 and found[f"{APART}_bursts_per_s"][0] == 500
    assert "goodput_of_triton_bursts" not in found, "no rate at all was served in time"


def test_runs_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number, done in enumerate(
        ({ONE: {"poisson": [600]}}, {ONE: {"poisson": [800]}, "triton_0_0": {"poisson": [500]}})
    ):
        paths.append(tmp_path / f"{number}.cells")
        every = {arm: {"bursts": [100], **rates} for arm, rates in done.items()}
        paths[-1].write_text(json.dumps({"meta": META.model_dump(), "done": every}))
    given = ["--out", str(tmp_path / "inference.json"), *map(str, paths)]
    assert main(["merge", "goodput", *given]) == 0
    rows = {row.figure: row for row in load(tmp_path / "inference.json").rows}
    assert (rows[f"{ONE}_poisson_per_s"].low, rows[f"{ONE}_poisson_per_s"].high) == (600, 800)
    assert rows["goodput_of_triton_poisson"].value == 700 / 500 and rows["goodput_of_triton_bursts"].value == 1
    assert len(json.loads((tmp_path / "inference.cells").read_text())["done"][ONE]["bursts"]) == 2
    paths[0].write_text("{}")
    assert main(["merge", "goodput", *given]) == 1 and "not from this benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("capacity", [0, RATES[0], RATES[7] + 1, 10 * RATES[-1]])
def test_the_search_ends_at_the_highest_rate_that_is_met(capacity: int) -> None:
    expected = max((rate for rate in RATES if rate <= capacity), default=0)
    assert goodput.highest(RATES, lambda rate: rate <= capacity) == expected


def test_a_low_rate_that_is_missed_ends_no_search() -> None:
    assert goodput.highest(RATES, lambda rate: RATES[3] < rate < RATES[9]) == RATES[8]


@pytest.mark.parametrize("arm", OURS)
def test_a_rehearsal_serves_four_models(arm: str, serving: None, tmp_path: Path) -> None:
    out = tmp_path / "goodput.json"
    assert run("goodput", ["--rehearse", "--only", arm, "--seconds", "0.1", "--out", str(out)]) == 0
    kept = json.loads(out.with_suffix(".cells").read_text())["done"][arm]
    found = {0, *RATES, *(round(goodput.HALF_STEP * rate) for rate in RATES)}
    assert set(kept) == set(goodput.BURSTS) and all(rate in found for (rate,) in kept.values())


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (1, 1), (2, 1), (3, 2), (5.9, 2), (6, 3), (100, 3)])
def test_the_smallest_fit_first(limit: float, count: int) -> None:
    assert table.fit([3, 1, 2], limit) == count


def test_figures_of_the_table_are_against_the_better_of_both_others() -> None:
    def arm(goodput: int, ms: float, used: list[int]) -> dict[str, Any]:
        return {"goodput": goodput, "latency_ms": [ms] * 3, "used_mib": used, "weights_mib": 50}

    done = {
        "together": arm(300, 4.0, [100]),
        "apart": arm(100, 8.0, [80, 90, 100, 130]),
        "mps": arm(200, 5.0, [40, 50, 60, 50]),
    }
    found = table.find(done)
    assert found["table_throughput"] == (1.5, 1.5, 3.0, 2)
    assert found["table_latency"] == (0.8, 0.5, 0.8, 3)
    assert found["table_models"] == (2.0, 2.0, 4.0, 2)
    assert found["table_memory_points"] == (25.0, 25.0, 37.5, 2)
    assert set(found) == set(table.BENCHMARK.goals)
    assert table.find({arm: done[arm] for arm in table.ARMS[:2]}) == {}


def test_without_a_gpu_there_is_no_memory_to_compare() -> None:
    one = {"goodput": 0, "latency_ms": [1.0], "used_mib": [0], "weights_mib": 50}
    assert set(table.find(dict.fromkeys(table.ARMS, one))) == {"table_latency"}


def test_figures_are_of_the_same_repeat() -> None:
    kept = {"time_slices_steps": [10.0, 20.0, 0.0], "cudasched_steps": [9.0, 30.0, 1.0], "goodput": [0.9]}
    for arm, factor in zip(beside.ARMS, (4.0, 1.5), strict=True):
        kept |= {f"{arm}_alone_ms": [1.0] * 100, f"{arm}_beside_ms": [factor] * 50}
    found = beside.find({"beside": kept})
    assert found["beside_training_best_effort"] == (1.2, 0.9, 1.5, 2), "no steps at all bear no share"
    assert found["beside_training_goodput"][0] == 0.9
    assert found["beside_training_p99_time_slices"] == (4.0, 4.0, 4.0, 50)
    assert found["beside_training_p99_cudasched"][0] == 1.5 and set(found) == set(beside.BENCHMARK.goals)
    assert beside.find({}) == {} and "beside_training_goodput" not in beside.find({"beside": {**kept, "goodput": []}})


def test_a_rehearsal_has_all_cells(serving: None, tmp_path: Path) -> None:
    out = tmp_path / "inference.json"
    assert run("inference_beside", ["--rehearse", "--seconds", "0.5", "--out", str(out)]) == 0
    kept = json.loads(out.with_suffix(".cells").read_text())["done"]["beside"]
    assert all(len(kept[f"{arm}_steps"]) == 1 and kept[f"{arm}_beside_ms"] for arm in beside.ARMS)
