"""How much shorter the benchmarks and their tests are than before the lab, and what a repeat of `main` takes."""

from __future__ import annotations

import datetime
import subprocess
from itertools import pairwise
from pathlib import Path

from cudasched.demo.harness import HarnessError

from benchmarks.colocation.cells import CellFile
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session

ROOT = Path(__file__).resolve().parents[2]
#: The last commit without the lab.
BEFORE = "6aacf46"
#: A longer time between two cells is another run's, or another GPU's.
LONGEST_GAP_S = 180.0


def lines(directory: str, commit: str | None = None) -> int:
    """Lines of the Python files below a directory: those of a commit, or those that git tracks. Raises HarnessError."""
    tree = ["ls-tree", "-r", "--name-only", commit] if commit else ["ls-files"]
    names = [name for name in _git(*tree, directory).splitlines() if name.endswith(".py")]
    texts = (_git("show", f"{commit}:{name}") if commit else (ROOT / name).read_text() for name in names)
    return sum(text.count("\n") for text in texts)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HarnessError(f"git {arguments[0]}: {done.stderr.strip()}: a clone with the commit {BEFORE} is needed")
    return done.stdout


def removed(session: Session) -> Found:
    """Lines of Python that are no more."""
    found = {name: lines(place, BEFORE) - lines(place) for name, place in PLACES.items()}
    return {name: (float(count),) * 3 + (1,) for name, count in found.items()}


def gpu_minutes(session: Session) -> Found:
    """What a repeat of `main` takes on all its GPUs together, by the times at which its cells ended."""
    path = session.options.main_cells
    if path is None:
        return {}
    by_repeat: dict[int, float] = {}
    outcomes = list(CellFile(path).outcomes.values())
    for before, after in pairwise(outcomes):
        began, ended = (datetime.datetime.fromisoformat(one.date) for one in (before, after))
        gap_s = (ended - began).total_seconds()
        if 0 <= gap_s <= LONGEST_GAP_S:
            by_repeat[after.cell.repeat] = by_repeat.get(after.cell.repeat, 0.0) + gap_s / 60
    if not by_repeat:
        raise HarnessError(f"{path}: no two cells of one run")
    least, most = min(by_repeat.values()), max(by_repeat.values())
    return {"main_gpu_minutes": (most, least, most, len(outcomes))}


PLACES = {"benchmarks_lines_removed": "benchmarks", "tests_lines_removed": "tests/benchmarks"}
BENCHMARK = Benchmark(
    about="lines removed since the lab, and the time of a repeat of main",
    groups={"lines": removed, "main": gpu_minutes},
    limits=dict.fromkeys(PLACES, "benchmarks that are new since: memory, inference, several GPUs, graphs, advice"),
    goals={
        "benchmarks_lines_removed": (5000.0, "more"),
        "tests_lines_removed": (1200.0, "more"),
        "main_gpu_minutes": (60.0, "less"),
    },
    settings={"main_cells": Path},
    gpu=False,
)
