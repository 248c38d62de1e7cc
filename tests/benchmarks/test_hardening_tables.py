"""The short version of the figure `damaged_tables_failed`."""

from __future__ import annotations

from benchmarks.hardening.tables import measure


def test_damaged_tables_harm_nobody() -> None:
    row = measure(count=40, seed=1, patience_s=120.0, goal_s=None)
    assert (row["value"], row["n"], row["limited_by"]) == (0, 40, "")
