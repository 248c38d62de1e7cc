"""The benchmark of what it costs to be seen, with few clients and few rounds."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from benchmarks.observe import __main__ as observe
from benchmarks.results.schema import FigureRow, Results, load

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_figures_are_written_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_COMMIT", "0" * 12)
    monkeypatch.setattr(observe, "build", functools.partial(observe.build, together=True))
    path = tmp_path / "observe.json"
    assert observe.main(["--out", str(path), "--rounds", "1", "--clients", "3"]) == 0
    first = load(path)
    kept = FigureRow(figure="page_kB", value=1, goal=2, better="less", low=1, high=1, n=1, limited_by="")
    Results(meta=first.meta, rows=[*first.rows, kept]).write(path)
    measured = [row for row in first.rows if isinstance(row, FigureRow)]
    monkeypatch.setattr(observe, "counters", lambda *_: measured[0])
    monkeypatch.setattr(observe, "trace", lambda *_: measured[1:3])
    monkeypatch.setattr(observe, "scrape", lambda *_: measured[3])
    assert observe.main(["--out", str(path)]) == 0
    rows = {row.figure: row for row in load(path).rows if isinstance(row, FigureRow)}
    assert set(rows) == {*observe.GOALS, "page_kB"}
    for figure in observe.GOALS:
        row = rows[figure]
        assert 0 < row.low <= row.value <= row.high
        assert (row.limited_by == "") == row.met


def test_what_keeps_it_from_running_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert observe.main(["--out", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == "observe: needs g++\n"
    assert not (tmp_path / "x.json").exists()
