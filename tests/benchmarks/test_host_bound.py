"""The host-bound benchmark: paired ratios, what --only takes, and a rehearsal on the simulated driver."""

from __future__ import annotations

import pytest

from benchmarks.colocation.cells import Cell, CellFile, Outcome, cells_path
from benchmarks.colocation.rows import results
from benchmarks.host_bound import __main__ as host_bound
from benchmarks.results.schema import ColocationRow, Meta, Results, load
from benchmarks.tables import table_of

META = Meta(
    gpu="some GPU",
    driver=None,
    cuda=None,
    torch=None,
    python="3.12",
    commit=None,
    date="2026-01-01T00:00:00+00:00",
    sm_clock_mhz=None,
    command="python -m benchmarks.host_bound",
)


def test_ratios_are_of_the_pairs_of_a_repeat(tmp_path):
    cells = CellFile(tmp_path / "run.cells", META)

    def keep(arm: str, repeat: int, ms: float) -> None:
        cell = Cell(arm, "bert_eager", "gemm", "poisson", "60", 8.0, 0.0, repeat)
        served = {"latency_ms": [ms] * 400, "wait_ms": [], "unserved": 0}
        result = {"latency": {"bert_eager": served}, "best_effort_per_s": {"gemm": 500.0}}
        cells.add(Outcome(cell, result, None, "2026-01-01T00:00:00+00:00"))

    # A machine that slows down: each repeat is 10% slower than alone, and medians of unpaired times say 32%.
    for repeat, alone_ms in enumerate((5.0, 6.0, 9.0)):
        keep("latency_alone", repeat, alone_ms)
        if repeat:
            keep("cudasched_mps", repeat, 1.1 * alone_ms)
    rows = {row.arm: row for row in results(cells, arms=host_bound.ARMS, paired=True).rows}
    row = rows["cudasched_mps"]
    assert row.policy == "harvest" and row.p50_ratio == pytest.approx(1.1)
    assert row.latency_ms.p99 == pytest.approx(9.9) and row.latency_ms.n == 800
    unpaired = {row.arm: row for row in results(cells, arms=host_bound.ARMS).rows}
    assert unpaired["cudasched_mps"].p50_ratio == pytest.approx(1.375)


def test_the_figures_say_what_is_met_and_what_is_not():
    def row(arm: str, server: str, beside: str, p50: float, kept: float) -> ColocationRow:
        alone = {"p50": 1.0, "p95": 1.0, "p99": 1.0, "mean": 1.0, "n": 2000}
        mode = "two_processes" if arm == "processes" else arm.removeprefix("cudasched_").removesuffix("_strict")
        return ColocationRow(
            arm=arm,
            mode=mode,
            latency_load=server,
            best_effort_load=beside,
            arrivals="poisson",
            rate_hz=60.0,
            policy="harvest",
            lead_us=20.0,
            repeats=4,
            latency_ms=alone,
            alone_ms=alone,
            p50_ratio=p50,
            p99_ratio=1.1,
            bound_p99_ms=None,
            best_effort_per_s=1.0,
            best_effort_alone_per_s=1.0,
            duty=0.3,
            best_effort_ratio=1.0,
            best_effort_gpu_ratio=kept,
            attainment=None,
        )

    rows = [
        row("cudasched_mps", "bert_eager", "transformer", 1.02, 0.94),
        row("cudasched_two_processes", "bert_eager", "transformer", 1.2, 0.8),
        row("processes", "bert_eager", "transformer", 1.1, 0.9),
        row("cudasched_two_processes", "recommender", "transformer", 1.2, 0.8),
        row("cudasched_two_processes_strict", "recommender", "transformer", 1.2, 0.8),
    ]
    table = table_of(Results(meta=META, rows=rows), "figures")
    assert "1.02 (<= 1.05) met | 1.1 (<= 1.15) met | 0.94 (>= 0.95) **missed**" in table
    assert "time slices: **worse in both**" in table
    assert "strict: 0.8 (>= 0.8) met" in table


def test_the_new_policy_has_the_plain_names_and_strict_a_suffix():
    for mode in host_bound.MODES:
        assert host_bound.ARMS[f"cudasched_{mode}"].policy == "harvest"
        assert host_bound.ARMS[f"cudasched_{mode}_strict"].policy == "strict"


def test_only_takes_a_server_a_pair_or_a_cell():
    assert host_bound.wanted([], "bert_eager", "gemm", "processes")
    for only in ("bert_eager", "bert_eager/gemm", "bert_eager/gemm/processes"):
        assert host_bound.wanted([only], "bert_eager", "gemm", "processes")
    assert not host_bound.wanted(["bert_eager/gemm/processes"], "bert_eager", "gemm", "mps_priority")
    assert not host_bound.wanted(["decode_eager"], "bert_eager", "gemm", "processes")
    with pytest.raises(SystemExit):
        host_bound.parse(["--out", "x.json", "--only", "bert_eager/elementwise"])


def test_programs_have_cores_of_their_own_where_there_are_any():
    assert host_bound.halves([0, 1, 2, 3]) == {"latency": [0, 1], "best_effort": [2, 3], "both": [0, 1, 2, 3]}
    assert host_bound.halves([5]) == {"latency": [5], "best_effort": [5], "both": [5]}


def test_it_rehearses_and_goes_on_where_it_stopped(simulated_driver, tmp_path):
    out = tmp_path / "rehearsal.json"
    common = ["--simulate", "--simulated-driver", str(simulated_driver), "--no-plots", "--out", str(out)]
    first = [*common, "--only", "decode_eager/transformer/latency_alone"]
    assert host_bound.main(first) == 0
    names = ("best_effort_alone_hooked", "cudasched_two_processes", "cudasched_one_process")
    more = [part for name in names for part in ("--only", f"decode_eager/transformer/{name}")]
    assert host_bound.main([*first, *more]) == 0
    rows = {row.arm: row for row in load(out).rows}
    assert set(rows) == {"latency_alone", *names}
    for name in names[1:]:
        row = rows[name]
        assert row.latency_load == "decode_eager" and row.policy == "harvest"
        assert row.p50_ratio and row.gpu_duty and row.best_effort_gpu_ratio
    # Latencies are of tokens: three between the four of a request.
    cells = CellFile(cells_path(out)).outcomes
    alone = next(known.result for cell, known in cells.items() if cell.arm == "latency_alone")
    served = alone["latency"]["decode_eager"]
    assert len(served["latency_ms"]) == 3 * len(served["request_ms"])
