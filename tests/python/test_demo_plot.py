"""The demo's plot shows the percentiles that its requests bear, as its table does."""

from __future__ import annotations

from pathlib import Path

import pytest
from cudasched import demo
from cudasched.demo.plot import plot


@pytest.mark.parametrize(
    ("requests", "shown", "left_out"), [(69, {"P50", "P95"}, {"P99"}), (300, {"P50", "P95", "P99"}, set())]
)
def test_a_percentile_that_requests_do_not_bear_is_not_drawn(
    tmp_path: Path, requests: int, shown: set[str], left_out: set[str]
) -> None:
    pytest.importorskip("matplotlib")
    latency = {"p50": 0.5, "p95": 0.9, "p99": 1.1, "n": requests}
    rows = [{"arm": arm, "latency_ms": latency, "best_effort_ratio": 0.9} for arm in ("alone", "managed")]
    assert plot(rows, tmp_path / "plot.svg", "a title", demo.percentiles(requests))
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in drawn for name in shown)
    assert not any(f"<!-- {name} -->" in drawn for name in left_out)


def test_what_best_effort_keeps_of_the_gpu_time_left_is_drawn_where_it_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    latency = {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    row = {"arm": "managed", "latency_ms": latency, "best_effort_ratio": 0.9}
    assert plot([row], tmp_path / "old.svg", "a title")
    assert plot([row | {"best_effort_gpu_ratio": 0.8}], tmp_path / "new.svg", "a title")
    old, new = ((tmp_path / name).read_text(encoding="utf-8") for name in ("old.svg", "new.svg"))
    assert "GPU duty" not in old and "GPU duty" in new
