"""What events add is rehearsed on the simulated driver; CUPTI has no part in that."""

from __future__ import annotations

import re

import pytest

from benchmarks.lab.run import run
from benchmarks.predictor import events


@pytest.mark.usefixtures("simulated_driver")
def test_all_cases_are_timed_and_written(tmp_path, capsys, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(events, "WAITS_NS", (1_000,))
    out = tmp_path / "new" / "events.parquet"
    assert run("events", ["--rehearse", "--out", str(tmp_path / "events.json"), "--launches", str(out)]) == 0
    said = capsys.readouterr().out
    for case in events.CASES:
        assert re.search(rf"^  {case}: events add: -?\d+ ns .*; 40 launches\)$", said, re.M), said
    table = pq.read_table(out)
    assert table["case"].to_pylist() == [case for case in events.CASES for _ in range(40)]
    assert min(table["call_ns"].to_pylist()) > 0
    behind = dict(zip(table["case"].to_pylist(), table["behind"].to_pylist(), strict=True))
    assert (behind["queued"], behind["waited"]) == (True, False)


def test_what_a_kernel_lasts_longer_in_one_process_is_no_part_of_what_events_add():
    def cases(elapsed: int) -> dict[str, events.Case]:
        return {"queued": events.Case([elapsed] * 3, [1] * 3, [True] * 3)}

    found = events.same_in_the_queue([(1_000, cases(3_700)), (3_000, cases(5_700)), (10_000, cases(12_820))])
    assert [kernel for kernel, _ in found] == [1_000, 3_000, 10_120]


def test_what_events_add_is_said_as_median_and_spread(capsys):
    elapsed = [22_700] * 50 + [22_500] * 25 + [23_300] * 25
    events.show("starved", events.Case(elapsed, [1_500] * 100, [True] * 20 + [False] * 80), 20_000)
    assert capsys.readouterr().out.splitlines() == [
        "  starved: events add: 2700 ns (2500 to 3300; 100 launches)",
        "  starved, less the launch call: 1200 ns (1000 to 1800; 100 launches)",
        "    of 20.0% the first event was not complete after the second call",
    ]


@pytest.mark.usefixtures("simulated_driver")
def test_a_program_that_fails_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(events, "SOURCE", tmp_path / "none.c")
    assert run("events", ["--rehearse", "--out", str(tmp_path / "events.json")]) == 1
    assert "does not compile" in capsys.readouterr().out
