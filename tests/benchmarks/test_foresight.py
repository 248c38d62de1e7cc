"""Forecasts of `cudasched advise --beside` against measurements: figures, what is committed, a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest
from cudasched.advise import beside

from benchmarks.advise import committed
from benchmarks.advise.foresight import Compared, figures, share_within, tau
from benchmarks.lab.run import run
from benchmarks.results.schema import RESULTS, load

pytest.importorskip("pyarrow", reason="forecasts read recordings with pyarrow")


def cell(program: str, p99: float, costs: tuple[float, float] | None = None) -> Compared:
    return Compared("server", program, "time_slices", {"p99": p99, "best_effort": 1.0}, costs)


def test_a_ranking_counts_pairs_in_one_order() -> None:
    forecast = [1.0, 2.0, 3.0, 4.0]
    assert tau(list(zip([1, 2, 3, 4], forecast, strict=True))) == 1
    assert tau(list(zip([4, 3, 2, 1], forecast, strict=True))) == -1
    assert tau(list(zip([2, 1, 3, 4], forecast, strict=True))) == pytest.approx(2 / 3)
    assert tau([(1, 1), (1, 2)]) == tau([(1, 1), (2, 1)]) == 0, "equal ones are in neither order"


def test_figures_are_of_the_cells_that_were_measured() -> None:
    cells = [cell("a", 1.1, (1, 1)), cell("b", 1.2, (2, 3)), cell("c", 0.9, (3, 2)), cell("d", 1.0, (4, 4))]
    found = figures([*cells, Compared("other", "a", "time_slices", {}, None)], [0.5, 2.0])
    assert found["advisor_p99_within_15"] == (0.75, 0.0, 1.0, 4), "1.2 is 17% more than forecast"
    assert found["advisor_tau"][0] == pytest.approx(2 / 3)
    assert found["advisor_seconds"] == (2.0, 0.5, 2.0, 2)
    assert figures([], []) == {} and share_within([], "p99", 0.15) is None


def test_intervals_are_of_what_was_measured() -> None:
    cells = list(committed.committed())
    for mode, known in beside.MODES.items():
        for figure, (least, _, most) in committed.errors_of(cells, mode).items():
            low, value, high = known.errors[figure]
            assert low == pytest.approx(least, abs=0.011) and high == pytest.approx(most, abs=0.011), (mode, figure)
            assert low <= value <= high


def test_a_pair_is_recorded_and_compared(tmp_path: Path, simulated_driver: Path) -> None:
    out = tmp_path / "foresight.json"
    command = ["--rehearse", "--out", str(out), "--programs", "cupy_persistent", "--servers", "bert_graph"]
    assert 0 in (run("foresight", [*command, "--seconds", "1.5"]) for _ in range(3)), "a busy machine starves programs"
    assert sorted(path.stem for path in (tmp_path / "recordings").iterdir()) == ["bert_graph", "cupy_persistent"]
    assert {row.arm for row in load(tmp_path / "foresight_pairs.json").rows} >= {"processes", "slices"}
    told = {row.figure: row for row in load(out).rows}
    assert told["advisor_seconds"].n == told["advisor_best_effort_within_8"].n == 2


def test_the_bound_holds_for_each_program_that_training_has_not_seen(tmp_path: Path) -> None:
    pytest.importorskip("xgboost")
    out = tmp_path / "foresight.json"
    assert run("foresight_committed", ["--only", "coverage", "--out", str(out)]) == 0
    kept = {row.figure: row for row in load(RESULTS / "foresight.json").rows}
    for row in load(out).rows:
        assert row.value == pytest.approx(kept[row.figure].value) and row.value >= 0.87
