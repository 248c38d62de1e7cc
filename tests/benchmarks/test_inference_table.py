"""The table of the goals: how many processes fit, and the figures by their arms."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.inference.table import ARMS, BENCHMARK, find, fit


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (1, 1), (2, 1), (3, 2), (5.9, 2), (6, 3), (100, 3)])
def test_the_smallest_fit_first(limit: float, count: int) -> None:
    assert fit([3, 1, 2], limit) == count


def test_figures_are_against_the_better_of_both_others() -> None:
    def arm(goodput: int, ms: float, used: list[int]) -> dict[str, Any]:
        return {"goodput": goodput, "latency_ms": [ms] * 3, "used_mib": used, "weights_mib": 50}

    done = {
        "together": arm(300, 4.0, [100]),
        "apart": arm(100, 8.0, [80, 90, 100, 130]),
        "mps": arm(200, 5.0, [40, 50, 60, 50]),
    }
    found = find(done)
    assert found["table_throughput"] == (1.5, 1.5, 3.0, 2)
    assert found["table_latency"] == (0.8, 0.5, 0.8, 3)
    assert found["table_models"] == (2.0, 2.0, 4.0, 2)
    assert found["table_memory_points"] == (25.0, 25.0, 37.5, 2)
    assert set(found) == set(BENCHMARK.goals)
    assert find({arm: done[arm] for arm in ARMS[:2]}) == {}


def test_without_a_gpu_there_is_no_memory_to_compare() -> None:
    one = {"goodput": 0, "latency_ms": [1.0], "used_mib": [0], "weights_mib": 50}
    assert set(find(dict.fromkeys(ARMS, one))) == {"table_latency"}
