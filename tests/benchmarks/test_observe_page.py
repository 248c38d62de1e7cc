"""The benchmark of the page of `cudasched serve`, with one browser."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.observe import page
from benchmarks.results.schema import FigureRow, Results, load

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("chromium-browser")), reason="needs Chromium")
def test_figures_are_written_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_COMMIT", "0" * 12)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)  # else of the whole test run
    path = tmp_path / "observe.json"
    assert page.main(["--out", str(path), "--rounds", "1"]) == 0
    first = load(path)
    kept = FigureRow(figure="counters_ns", value=1, goal=2, better="less", low=1, high=1, n=1, limited_by="")
    Results(meta=first.meta, rows=[*first.rows, kept]).write(path)
    monkeypatch.setattr(page, "first_paints", lambda *_: [0.25, 0.5])
    assert page.main(["--out", str(path)]) == 0
    rows = {row.figure: row for row in load(path).rows if isinstance(row, FigureRow)}
    assert set(rows) == {*page.GOALS, "counters_ns"}
    assert (rows["page_first_paint_s"].low, rows["page_first_paint_s"].high) == (0.25, 0.5)
    assert 0 < rows["page_kB"].value <= 300 and rows["page_kB"].met


def test_without_chromium_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> list[float]:
        raise page.BenchmarkError("needs Chromium: apt-get install chromium")

    monkeypatch.setattr(page, "first_paints", none)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    assert page.main(["--out", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err == "page: needs Chromium: apt-get install chromium\n"
    assert not (tmp_path / "x.json").exists()
