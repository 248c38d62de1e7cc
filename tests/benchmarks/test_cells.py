from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.colocation.cells import Cell, CellFile, Outcome, cells_path
from benchmarks.colocation.rows import results
from benchmarks.results.schema import Meta
from benchmarks.tables import colocation_table

META = Meta(
    gpu="some GPU",
    driver="580.1",
    cuda="13.0",
    torch="2.11",
    python="3.12",
    commit="abc",
    date="2025-01-01T00:00:00+00:00",
    sm_clock_mhz=1980,
    command="python -m benchmarks.colocation",
)


def cell(arm: str, repeat: int = 0, lead_us: float = 0.0) -> Cell:
    return Cell(arm, "bert_graph", "gemm", "poisson", 60.0, 10.0, lead_us, repeat)


def outcome(of: Cell, result: dict | None, error: str | None = None) -> Outcome:
    return Outcome(of, result, error, "2025-01-01T00:00:00+00:00")


def latency(ms: float) -> dict:
    return {"latency_ms": [ms] * 600, "unserved": 0}


def best_effort(per_s: float) -> dict:
    return {"best_effort_per_s": per_s}


def filled(path: Path) -> CellFile:
    cells = CellFile(path, META)
    for repeat in range(2):
        cells.add(outcome(cell("latency_alone", repeat), latency(0.5)))
        cells.add(outcome(cell("best_effort_alone", repeat), best_effort(700.0)))
        cells.add(outcome(cell("processes", repeat), latency(2.0) | best_effort(650.0)))
        managed = latency(0.8 + repeat) | best_effort(600.0)
        cells.add(outcome(cell("cudasched_two_processes", repeat, 20.0), managed))
    cells.add(outcome(Cell.kernels("gemm"), {"kernel_us": [[1400.0, 100]], "per_item_us": 1400.0}))
    return cells


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path):
    path = tmp_path / "run.cells"
    first = CellFile(path, META)
    planned = [cell(arm, repeat) for repeat in range(2) for arm in ("latency_alone", "processes")]
    first.add(outcome(planned[0], latency(0.5)))
    first.add(outcome(planned[1], None, "worker died"))
    first.save()
    again = CellFile(path, META)
    assert again.missing(planned) == planned[1:]
    again.add(outcome(planned[1], latency(2.0)))
    assert again.missing(planned) == planned[2:]


def test_an_error_does_not_replace_a_result(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)
    cells.add(outcome(cell("processes"), latency(2.0)))
    cells.add(outcome(cell("processes"), None, "worker died"))
    assert cells.missing([cell("processes")]) == []


def test_merging_takes_the_later_result_and_keeps_the_rest(tmp_path):
    older, newer = CellFile(tmp_path / "a.cells", META), CellFile(tmp_path / "b.cells", META.model_copy())
    older.add(outcome(cell("processes"), latency(2.0)))
    older.add(outcome(cell("mps"), latency(1.0)))
    newer.add(outcome(cell("processes"), latency(3.0)))
    newer.add(outcome(cell("mps"), None, "no MPS"))
    older.merge(newer)
    assert older.outcomes[cell("processes")].result == latency(3.0)
    assert older.outcomes[cell("mps")].result == latency(1.0)
    assert older.meta is newer.meta


def test_what_is_saved_is_what_is_read(tmp_path):
    cells = filled(tmp_path / "run.cells")
    cells.save()
    again = CellFile(cells.path)
    assert again.meta == META
    assert again.outcomes == cells.outcomes


def test_a_file_of_something_else_is_named(tmp_path):
    path = tmp_path / "run.cells"
    path.write_text('{"cells": [{"arm": 1}]}')
    with pytest.raises(ValueError, match=r"run\.cells: not a file of cells"):
        CellFile(path)


def test_cells_lie_beside_the_results():
    assert cells_path(Path("results/colocation.json")) == Path("results/colocation.cells")


def test_rows_pool_repeats_and_compare_with_alone(tmp_path):
    rows = {row.arm: row for row in results(filled(tmp_path / "run.cells")).rows}
    managed = rows["cudasched_two_processes"]
    assert managed.repeats == 2 and managed.latency_ms.n == 1200
    assert managed.p99_ms_per_repeat == [0.8, 1.8]
    assert managed.p99_ratio == pytest.approx(1.8 / 0.5)
    assert managed.duty == pytest.approx(60 * 0.5e-3)
    assert managed.best_effort_ratio == pytest.approx(600 / 700 / (1 - 0.03))
    assert (managed.policy, managed.lead_us) == ("strict", 20.0)
    # Within 1.7 x 0.5 ms: the first repeat is, the second is not.
    assert managed.attainment == 0.5
    plain = rows["processes"]
    assert (plain.policy, plain.lead_us) == (None, None)
    # 98% busy: all but 1% of requests wait for at most 98.98% of a GEMM, and for the switch.
    assert plain.bound_p99_ms == pytest.approx(0.5 + 0.13 + 1.4 * (1 - 0.01 / 0.98), abs=0.01)
    assert rows["latency_alone"].best_effort_per_s is None and rows["latency_alone"].bound_p99_ms is None
    assert rows["best_effort_alone"].latency_ms is None
    assert rows["best_effort_alone"].best_effort_ratio == pytest.approx(1)


def test_an_arm_without_its_baseline_has_figures_but_no_ratios(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)
    cells.add(outcome(cell("processes"), latency(2.0) | best_effort(650.0)))
    (row,) = results(cells).rows
    assert row.latency_ms.p99 == 2.0 and row.best_effort_per_s == 650.0
    assert (row.p99_ratio, row.best_effort_ratio, row.bound_p99_ms, row.attainment) == (None, None, None, None)


def test_the_table_has_a_line_an_arm_and_the_bound(tmp_path):
    table = colocation_table(results(filled(tmp_path / "run.cells")))
    assert "| processes | 2.00/2.00/2.00 (4.00x) · 650.0/s, 96% |" in table
    assert "| bound, two processes: P99 | 2.0" in table
