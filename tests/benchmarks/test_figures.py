from __future__ import annotations

import itertools

import pytest
from test_cells import META

from benchmarks import tables
from benchmarks.figures import (
    FIGURES,
    MODES,
    OVERHEADS,
    Figure,
    best_effort_of_time_slices,
    few_requests,
    figures_table,
    judged,
    p50_of_alone,
    ratio_cell,
    worst,
)
from benchmarks.results.schema import ColocationRow, Latency, OverheadRow, Results

#: What a row lacks whose server was not measured alone.
UNKNOWN = ("alone_ms", "p50_ratio", "p99_ratio", "best_effort_ratio")


def row(arm: str, beside: str, mode: str = "two_processes", **fields: object) -> ColocationRow:
    latency = Latency(p50=0.6, p95=0.7, p99=0.8, mean=0.6, n=1000)
    return ColocationRow.model_validate(
        {
            "arm": arm,
            "mode": mode,
            "latency_load": "bert_graph",
            "best_effort_load": beside,
            "arrivals": "poisson",
            "rate_hz": 60.0,
            "policy": "strict",
            "lead_us": "auto",
            "repeats": 5,
            "latency_ms": latency,
            "alone_ms": latency,
            "p50_ratio": 1.2,
            "p95_ratio": 1.25,
            "p99_ratio": 1.3,
            "bound_p99_ms": 0.8,
            "best_effort_per_s": 100.0,
            "best_effort_alone_per_s": 100.0,
            "duty": 0.03,
            "best_effort_ratio": 0.98,
            "attainment": 0.995,
            "wait_ms": 0.1,
        }
        | fields
    )


def lines(rows: list[ColocationRow]) -> dict[str, list[str]]:
    table = figures_table(Results(meta=META, rows=rows)).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: rest for name, *rest in cells}


def everything() -> list[ColocationRow]:
    """A row for whatever a figure needs."""
    rows = []
    for mode, beside in itertools.product(MODES, ("transformer", "resnet50", "gemm", "elementwise")):
        rows.append(row(f"cudasched_{mode}", beside, mode))
        rows.append(row(f"cudasched_{mode}_hint", beside, mode, p99_ratio=1.08))
    for beside in ("transformer", "resnet50", "gemm", "elementwise", "bert_training"):
        slow = Latency(p50=2.0, p95=4.0, p99=6.0, mean=2.0, n=1000)
        rows.append(row("processes", beside, latency_ms=slow, wait_ms=1.0))
        rows.append(row("latency_alone", beside))
        rows.append(row("best_effort_alone", beside, latency_ms=None))
        rows.append(row("best_effort_alone_hooked", beside, latency_ms=None, best_effort_per_s=112.0))
    for mode in MODES:
        rows.append(row(f"cudasched_{mode}", "gemm", mode, arrivals="periodic", rate_hz=30.0, p99_ratio=1.05))
        decode = {"latency_load": "gpt_decode", "arrivals": "periodic", "policy": "slack"}
        rows.append(row(f"cudasched_{mode}_slack", "transformer", mode, best_effort_ratio=1.25, **decode))
        for load, other, ratio in (("bert_graph", "mlp", 1.4), ("mlp", "bert_graph", 1.45)):
            two = {"latency_load": load, "other_latency": other, "p99_ratio": ratio}
            rows.append(row(f"cudasched_{mode}", "transformer+resnet50", mode, **two))
    return rows


def test_every_figure_is_found_where_everything_was_measured():
    found = lines(everything())
    assert set(found) == {figure.name for figure in FIGURES}
    assert not [name for name, cells in found.items() if any("?" in cell for cell in cells)]
    assert found["transformer: P99 / alone"] == ["1.3 (<= 1.42) met", "1.3 (<= 1.32) met", "1.3 (<= 1.28) **missed**"]
    assert found["two and two clients: P99 / without best effort"][2] == "1.45 (<= 1.5) met"
    assert found["GPT decode, half busy, SLO 2 x: attained"][0] == "0.995 (>= 0.99) met"
    for loads in ("all but GEMMs", "GEMMs"):
        assert found[f"{loads}: P95, less than time slices by"][0] == "0.825 (>= 0.5) met"
        assert found[f"{loads}: queue wait, less than time slices by"][0] == "0.9 (>= 0.5) met"
    assert found["best effort of time slices, least of four loads"] == ["1", "1", "1"]
    assert found["resnet50 alone, offloaded: faster than bare by"] == ["0.12 (>= 0.1) met", "", ""]


def test_the_worst_load_counts():
    rows = [each for each in everything() if (each.arm, each.best_effort_load) != ("cudasched_mps", "gemm")]
    found = lines([*rows, row("cudasched_mps", "gemm", "mps", best_effort_ratio=0.9)])
    assert found["best effort, least of four loads"] == [
        "0.98 (>= 0.97) met",
        "0.9 (>= 0.97) **missed**",
        "0.98 (>= 0.97) met",
    ]


def test_what_was_not_measured_is_neither_met_nor_missed():
    found = lines([row("cudasched_mps", "transformer", "mps")])
    assert found["transformer: P99 / alone"] == ["? (<= 1.42)", "1.3 (<= 1.32) met", "? (<= 1.28)"]
    assert found["best effort, least of four loads"][1] == "? (>= 0.97)"


def test_a_figure_without_a_target_in_a_mode_says_nothing_there():
    figure = Figure("x", {"mps": 1.0}, lambda rows, mode: 2.0)
    assert [bool(figure.cell(None, mode)) for mode in MODES] == [False, True, False]  # type: ignore[arg-type]


def test_a_gain_of_offload_has_the_spread_of_its_pairs():
    bare, hooked = {"best_effort_per_s_per_repeat": [100.0, 80.0]}, {"best_effort_per_s_per_repeat": [98.0, 96.0]}
    rows = [
        row("best_effort_alone", "resnet50", best_effort_per_s=90.0, **bare),
        row("best_effort_alone_hooked", "resnet50", best_effort_per_s=97.0, **hooked),
    ]
    (cell, *_) = lines(rows)["resnet50 alone, offloaded: faster than bare by"]
    assert cell == "0.0778 (-0.02 to 0.2; >= 0.1) **missed**"


def test_best_effort_of_time_slices_is_of_the_same_requests_scene_and_repeat():
    ours = row("cudasched_mps", "gemm", "mps", best_effort_per_s=90.0, repeat=1)
    theirs = [
        row("processes", "gemm", best_effort_per_s=50.0, repeat=0),
        row("processes", "gemm", best_effort_per_s=60.0, repeat=1, rate_hz=30.0),
        row("processes", "resnet50", best_effort_per_s=70.0, repeat=1),
    ]
    assert best_effort_of_time_slices(Results(meta=META, rows=[ours, *theirs]), ours) is None
    theirs.append(row("processes", "gemm", best_effort_per_s=100.0, repeat=1))
    results = Results(meta=META, rows=[ours, *theirs])
    assert best_effort_of_time_slices(results, ours) == 0.9
    assert ratio_cell(results, ours) == "1.20/1.30x · 98% (90%)"
    assert ratio_cell(results, theirs[-1]) == "1.20/1.30x · 98%", "time slices are not compared with themselves"
    assert ratio_cell(results, ours.model_copy(update=dict.fromkeys(UNKNOWN))) == "0.80 ms"
    assert ratio_cell(results, None) == ""


def test_a_row_of_before_has_the_ratio_of_its_medians():
    slow = Latency(p50=1.5, p95=2.0, p99=3.0, mean=1.5, n=1000)
    assert p50_of_alone(row("mps", "gemm", "mps")) == 1.2
    assert p50_of_alone(row("mps", "gemm", "mps", p50_ratio=None, latency_ms=slow)) == pytest.approx(2.5)
    assert p50_of_alone(row("mps", "gemm", "mps", p50_ratio=None, alone_ms=None)) is None


@pytest.mark.parametrize(("numbers", "said"), [([1000, 2000], ""), ([244, 1000], "244 to 1000"), ([361, 361], "361")])
def test_a_table_of_few_requests_says_so(numbers, said):
    few = Latency(p50=0.6, p95=0.7, p99=0.8, mean=0.6, n=10)
    rows = [row("cudasched_mps", "gemm", latency_ms=few.model_copy(update={"n": n})) for n in numbers]
    rows.append(row("latency_alone", "gemm", latency_ms=few))
    assert (f"P99 is of {said} requests a cell" in few_requests(rows)) if said else not few_requests(rows)


def test_judging():
    assert judged(1.0, 1.0) == "1 (<= 1) met" and judged(0.9, 1.0, at_least=True) == "0.9 (>= 1) **missed**"
    assert worst([1.0, 3.0, 2.0]) == 3.0 and worst([1.0, 3.0], at_least=True) == 1.0
    assert worst([1.0, None]) is None and worst([]) is None


def test_overheads_are_judged_too(tmp_path):
    rows = [
        OverheadRow(what=what, ns_median=250.0, ns_p99=1.0, baseline_ns_median=300.0, added_ns_median=-50.0)
        for _, what, _, _ in OVERHEADS[1:]
    ]
    Results(meta=META, rows=rows).write(tmp_path / "overhead.json")
    text = tables.rendered("<!-- table:overhead:figures -->\n<!-- end -->\n", tmp_path)
    assert "| offloaded launch | ? (<= 300) |" in text
    assert "| latency launch, added | -50 (<= 100) met |" in text
    assert tables.rendered(text, tmp_path) == text
