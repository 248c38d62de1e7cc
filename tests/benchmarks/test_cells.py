from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.colocation.cells import Cell, CellFile, Outcome
from benchmarks.colocation.rows import results
from benchmarks.results.schema import Meta

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


def cell(arm: str, repeat: int = 0, lead_us: float | str = 0.0) -> Cell:
    return Cell(arm, "bert_graph", "gemm", "poisson", "60", 10.0, lead_us, repeat)


def outcome(of: Cell, result: dict | None, error: str | None = None) -> Outcome:
    return Outcome(of, result, error, "2025-01-01T00:00:00+00:00")


def served(ms: float, wait_ms: float = 0.0, requests: int = 1000) -> dict:
    return {"latency_ms": [ms] * requests, "wait_ms": [wait_ms] * 120, "unserved": 0}


def latency(ms: float, wait_ms: float = 0.0) -> dict:
    return {"latency": {"bert_graph": served(ms, wait_ms)}, "best_effort_per_s": {}}


def best_effort(per_s: float) -> dict:
    return {"best_effort_per_s": {"gemm": per_s}}


def keep(
    cells: CellFile,
    of: Cell,
    ms: float | None = None,
    per_s: float | None = None,
    requests: int = 600,
    **more: object,
) -> None:
    """Keeps an outcome of a cell: what each of its servers' requests took, and what each program did."""
    latency = {} if ms is None else {name: served(ms, requests=requests) for name in of.latency.split("+")}
    rates = {} if per_s is None else dict.fromkeys(of.best_effort.split("+"), per_s)
    cells.add(outcome(of, {"latency": latency, "best_effort_per_s": rates, **more}))


def filled(path: Path) -> CellFile:
    cells = CellFile(path, META)
    cells.add(outcome(cell("latency_alone"), latency(0.5)))
    cells.add(outcome(cell("best_effort_alone"), best_effort(700.0)))
    cells.add(outcome(cell("processes"), latency(2.0, wait_ms=1.0) | best_effort(650.0)))
    cells.add(outcome(cell("cudasched_two_processes", 0, 20.0), latency(1.3, wait_ms=0.25) | best_effort(600.0)))
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


def test_rows_are_of_a_repeat_against_alone(tmp_path):
    rows = {row.arm: row for row in results(filled(tmp_path / "run.cells")).rows}
    managed = rows["cudasched_two_processes"]
    assert (managed.repeat, managed.requests, managed.p50) == (0, 1000, 1.3)
    assert managed.p50_ratio == managed.p99_ratio == pytest.approx(1.3 / 0.5)
    assert managed.wait_ms == 0.25
    assert managed.duty == pytest.approx(60 * 0.5e-3)
    assert managed.best_effort_ratio == pytest.approx(600 / 700 / (1 - 0.03))
    assert (managed.policy, managed.lead_us) == ("strict", 20.0)
    assert managed.attainment == 0.0, "1.7 x 0.5 ms is less"
    plain = rows["processes"]
    assert (plain.policy, plain.lead_us) == (None, None)
    # 98% busy: all but 1% of requests wait for at most 98.98% of a GEMM, and for the switch.
    assert plain.bound_from == "alone"
    assert plain.bound_p99_ms == pytest.approx(0.5 + 0.13 + 1.4 * (1 - 0.01 / 0.98), abs=0.01)
    assert rows["latency_alone"].best_effort_per_s is None and rows["latency_alone"].bound_p99_ms is None
    assert rows["best_effort_alone"].latency_ms is None
    assert rows["best_effort_alone"].best_effort_ratio == pytest.approx(1)


def test_the_bound_starts_from_the_hinted_arm_and_hinted_arms_are_compared_with_one(tmp_path):
    cells = filled(tmp_path / "run.cells")
    cells.add(outcome(cell("latency_alone_hint"), latency(0.55)))
    cells.add(outcome(cell("cudasched_two_processes_hint", 0, 20.0), latency(0.66) | best_effort(500.0)))
    rows = {row.arm: row for row in results(cells).rows}
    hinted, plain = rows["cudasched_two_processes_hint"], rows["cudasched_two_processes"]
    assert hinted.p99_ratio == pytest.approx(0.66 / 0.55) and hinted.alone_ms.p99 == 0.55
    # The hinted arm's switch of contexts was paid ahead.
    assert plain.bound_from == "hint"
    assert plain.bound_p99_ms == pytest.approx(0.66 + 0.13 + 1.4 * (1 - 0.01 / 0.98), abs=0.01)
    assert plain.p99_ratio == pytest.approx(1.3 / 0.5)


def test_a_target_that_the_regions_were_given_is_what_attainment_counts_against(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)
    for arm, ms in (("latency_alone", 1.0), ("cudasched_mps_slack", 1.9)):
        cells.add(outcome(dataclasses.replace(cell(arm), slo_ms=2.0), latency(ms)))
    (_, row) = results(cells).rows
    assert (row.policy, row.slo_ms, row.attainment) == ("slack", 2.0, 1.0)


def test_several_clients_have_a_row_each_and_share_the_gpu(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)
    for program, per_s in (("transformer", 10.0), ("resnet50", 20.0)):
        alone = Cell("best_effort_alone", "", program, "poisson", "", 4.0, 0.0, 0)
        cells.add(outcome(alone, {"latency": {}, "best_effort_per_s": {program: per_s}}))
    both = Cell("latency_alone", "bert_graph+mlp", "transformer+resnet50", "poisson", "30+100", 4.0, 0.0, 0)
    alone_ms = {"bert_graph": served(0.5), "mlp": served(0.1)}
    cells.add(outcome(both, {"latency": alone_ms, "best_effort_per_s": {}}))
    beside = {"bert_graph": served(0.75), "mlp": served(0.2)}
    rates = {"transformer": 9.0, "resnet50": 16.0}
    cells.add(
        outcome(dataclasses.replace(both, arm="cudasched_one_process"), {"latency": beside, "best_effort_per_s": rates})
    )
    made = results(cells)
    rows = {row.latency_load: row for row in made.rows if row.arm == "cudasched_one_process"}
    assert rows["bert_graph"].p99_ratio == pytest.approx(1.5) and rows["mlp"].p99_ratio == pytest.approx(2.0)
    assert (rows["mlp"].rate_hz, rows["mlp"].other_latency) == (100.0, "bert_graph")
    for row in rows.values():
        # Nine tenths and eight tenths of what they do alone, beside requests that take 2.5% of the time.
        assert row.best_effort_per_s == pytest.approx(1.7) and row.best_effort_alone_per_s == pytest.approx(2.0)
        assert row.best_effort_ratio == pytest.approx(1.7 / 2.0 / (1 - 0.015 - 0.01))


def test_best_effort_is_also_judged_by_the_gpu_time_that_requests_leave(tmp_path):
    cells = filled(tmp_path / "run.cells")
    assert all(row.gpu_duty is None and row.best_effort_gpu_ratio is None for row in results(cells).rows)
    cells.add(outcome(Cell.busy("bert_graph"), {"busy_us": 250.0}))
    only_busy = {row.arm: row for row in results(cells).rows}
    assert only_busy["processes"].gpu_duty == pytest.approx(60 * 250e-6)
    assert only_busy["processes"].best_effort_gpu_ratio is None
    cells.add(outcome(cell("best_effort_alone_hooked", 0, 20.0), best_effort(800.0)))
    made = results(cells)
    rows = {row.arm: row for row in made.rows}
    assert rows["processes"].best_effort_gpu_ratio == pytest.approx(650 / 800 / (1 - 0.015))
    assert rows["processes"].best_effort_ratio == pytest.approx(650 / 700 / (1 - 0.03))
    assert rows["best_effort_alone_hooked"].best_effort_gpu_ratio == pytest.approx(1)
    assert rows["best_effort_alone"].best_effort_gpu_ratio == pytest.approx(700 / 800)
    assert rows["latency_alone"].best_effort_gpu_ratio is None


def test_best_effort_under_mps_is_also_compared_with_mps_alone_and_builds_have_a_p99(tmp_path):
    cells = filled(tmp_path / "run.cells")
    cells.add(outcome(cell("best_effort_alone_mps", 0, 20.0), best_effort(500.0)))
    building = {"building": {"latency_ms": [1.5, 2.5], "builds": 1}}
    cells.add(outcome(cell("cudasched_mps", 0, 20.0), latency(0.6) | best_effort(480.0) | building))
    rows = {row.arm: row for row in results(cells).rows}
    row = rows["cudasched_mps"]
    assert row.best_effort_ratio == pytest.approx(480 / 700 / (1 - 0.03))
    assert row.best_effort_mps_ratio == pytest.approx(480 / 500 / (1 - 0.03))
    assert row.building_p99_ms == pytest.approx(2.49) and row.building_requests == 2
    assert rows["processes"].best_effort_mps_ratio is None and rows["processes"].building_p99_ms is None


def test_an_arm_without_its_baseline_has_figures_but_no_ratios(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)
    cells.add(outcome(cell("processes"), latency(2.0) | best_effort(650.0)))
    (row,) = results(cells).rows
    assert row.latency_ms.p99 == 2.0 and row.best_effort_per_s == 650.0
    assert (row.p99_ratio, row.best_effort_ratio, row.bound_p99_ms, row.attainment) == (None, None, None, None)
