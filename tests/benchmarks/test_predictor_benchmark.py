"""What a prediction costs, of the model that ships; and what events add, on the simulated driver, without CUPTI."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.run import run
from benchmarks.predictor import benchmark, events
from benchmarks.predictor.benchmark import COSTS
from benchmarks.results.schema import RESULTS


@pytest.fixture(scope="module")
def built_once() -> Iterator[None]:
    """Compiling is nearly all that a run takes."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    build = benchmark.build
    built: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "build", lambda session: built.get(0) or built.setdefault(0, build(session)))
        yield


@pytest.mark.usefixtures("built_once")
def test_miss_and_hit_are_written_beside_the_other_figures(tmp_path: Path) -> None:
    committed, path = RESULTS / "predictor_figures.json", tmp_path / "figures.json"
    shutil.copy(committed, path)
    assert run("predictor_figures", ["--rehearse", "--out", str(path)]) == 0
    before, after = ({row["figure"]: row for row in json.loads(one.read_text())["rows"]} for one in (committed, path))
    assert set(after) == set(before) | set(COSTS.goals) and after["repeat"] == before["repeat"] | {"interval": None}
    for name in COSTS.goals:
        row = after[name]
        assert 0 < row["value"] <= row["high"] and (row["limited_by"] == "") == (row["value"] <= row["goal"])


@pytest.mark.usefixtures("built_once")
def test_a_model_that_is_none_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.ubj").write_bytes(b"nothing")
    options = ["--rehearse", "--out", str(tmp_path / "f.json"), "--model", str(tmp_path / "model.ubj")]
    assert run("predictor_figures", options) == 1
    assert "cannot be walked" in capfd.readouterr().out and not (tmp_path / "f.json").exists()


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
