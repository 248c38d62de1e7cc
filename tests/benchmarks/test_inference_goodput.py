"""Goodput beside Triton: the search, runs that are put together, and a rehearsal with the server of cudasched."""

import json
from pathlib import Path

import pytest

from benchmarks.inference import goodput
from benchmarks.inference.goodput import GRID, OURS, RATES, find, merge
from benchmarks.lab.run import run
from benchmarks.meta import describe
from benchmarks.results.schema import load

ONE, APART = OURS
META = describe(True, "0", torch_needed=False)


def test_a_figure_is_over_tritons_best_setting() -> None:
    done = {APART: {"poisson": [900, 1100, 1000], "bursts": [500]}, ONE: {"poisson": [990], "bursts": [600]}}
    assert find(done) == {}, "Triton is missing"
    done |= {arm: {"poisson": [rate], "bursts": [0]} for arm, rate in zip(GRID, (500, 800, 700), strict=False)}
    found = find(done)
    assert found["goodput_of_triton_poisson"] == (1000 / 800, 900 / 800, 1100 / 800, 3)
    assert found["triton_poisson_per_s"] == (800, 500, 800, 3)
    assert found[f"{ONE}_poisson_per_s"][0] == 990 and found[f"{APART}_bursts_per_s"][0] == 500
    assert "goodput_of_triton_bursts" not in found, "no rate at all was served in time"


def test_runs_are_put_together(tmp_path: Path) -> None:
    paths = []
    for number, done in enumerate(
        ({ONE: {"poisson": [600]}}, {ONE: {"poisson": [800]}, "triton_0_0": {"poisson": [500]}})
    ):
        paths.append(tmp_path / f"{number}.cells")
        every = {arm: {"bursts": [100], **rates} for arm, rates in done.items()}
        paths[-1].write_text(json.dumps({"meta": META.model_dump(), "done": every}))
    merge(paths, tmp_path / "inference.json")
    rows = {row.figure: row for row in load(tmp_path / "inference.json").rows}
    assert (rows[f"{ONE}_poisson_per_s"].low, rows[f"{ONE}_poisson_per_s"].high) == (600, 800)
    assert rows["goodput_of_triton_poisson"].value == 700 / 500 and rows["goodput_of_triton_bursts"].value == 1
    assert len(json.loads((tmp_path / "inference.cells").read_text())["done"][ONE]["bursts"]) == 2


@pytest.mark.parametrize("capacity", [0, RATES[0], RATES[7] + 1, 10 * RATES[-1]])
def test_the_search_ends_at_the_highest_rate_that_is_met(capacity: int) -> None:
    expected = max((rate for rate in RATES if rate <= capacity), default=0)
    assert goodput.highest(RATES, lambda rate: rate <= capacity) == expected


def test_a_low_rate_that_is_missed_ends_no_search() -> None:
    assert goodput.highest(RATES, lambda rate: RATES[3] < rate < RATES[9]) == RATES[8]


@pytest.mark.parametrize("arm", OURS)
def test_a_rehearsal_serves_four_models(arm: str, tmp_path: Path) -> None:
    for needed in ("fastapi", "uvicorn", "tritonclient.grpc"):
        pytest.importorskip(needed)
    out = tmp_path / "goodput.json"
    assert run("goodput", ["--rehearse", "--only", arm, "--seconds", "0.1", "--out", str(out)]) == 0
    kept = json.loads(out.with_suffix(".cells").read_text())["done"][arm]
    assert set(kept) == set(goodput.BURSTS) and all(rate in (0, *RATES) for (rate,) in kept.values())
