from __future__ import annotations

import pytest
from test_cells import META

from benchmarks.figures import best_effort_of_time_slices, few_requests, p50_of_alone
from benchmarks.results.schema import ColocationRow, Latency, Results


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
    assert best_effort_of_time_slices(results, theirs[-1]) is None, "time slices are not compared with themselves"


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
