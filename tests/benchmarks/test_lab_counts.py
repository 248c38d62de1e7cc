"""benchmarks/lab/counts.py: lines against a commit, and the time of a repeat by its cells."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest
from test_cells import META

from benchmarks.colocation.cells import Cell, CellFile, Outcome
from benchmarks.lab import counts
from benchmarks.lab.run import run
from benchmarks.results.schema import load


def test_lines_are_those_of_the_tracked_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "a.py").write_text("1\n2\n3\n")
    (tmp_path / "benchmarks" / "a.json").write_text("1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "benchmarks" / "a.py").write_text("1\n")
    assert (counts.lines("benchmarks", "HEAD"), counts.lines("benchmarks")) == (3, 1)
    with pytest.raises(counts.HarnessError, match="a clone with the commit"):
        counts.lines("benchmarks", "0000000")


def test_the_time_of_a_repeat_leaves_out_what_lies_between_runs_and_gpus(tmp_path: Path) -> None:
    cells = CellFile(tmp_path / "main.cells", META)
    began = datetime.datetime(2026, 11, 27, tzinfo=datetime.timezone.utc)
    # Two GPUs at once; the second one's last cell is of a run an hour later.
    for repeat, seconds in ((0, 0), (0, 60), (0, 120), (0, 0), (0, 90), (1, 3600), (1, 3720)):
        cell = Cell("processes", "bert_graph", f"gemm{len(cells.outcomes)}", "poisson", "60", 1.0, 0.0, repeat)
        date = (began + datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")
        cells.add(Outcome(cell, {}, None, date))
    cells.save()
    out = tmp_path / "lab.json"
    assert run("lab", ["--out", str(out), "--only", "main", "--main-cells", str(cells.path)]) == 0
    (row,) = load(out).figures
    assert (row.figure, row.value, row.low, row.n) == ("main_gpu_minutes", 3.5, 2.0, 7)
    assert run("lab", ["--out", str(out), "--only", "main", "--main-cells", str(tmp_path / "none.cells")]) == 1
