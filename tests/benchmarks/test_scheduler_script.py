"""benchmarks/scheduler.sh: what it runs is what the benchmark takes, and each part runs once, on whatever GPU."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.colocation.__main__ import parse
from benchmarks.figures import figures_table
from benchmarks.results.schema import RESULTS, load

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "scheduler.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], env=os.environ | environment, capture_output=True, text=True)


def test_every_part_is_a_run_of_the_benchmark() -> None:
    done = run("out", DRY="1", LIMIT_S="500", COMMIT="0123456789ab")
    assert done.returncode == 0, done.stderr
    runs = [parse(shlex.split(line)[3:]) for line in done.stdout.splitlines()]
    assert len(runs) == 8 and {len(run.best_effort) for run in runs} == {1}
    # What the committed results say of was all measured by them.
    measured = {(arm, one.latency[0], one.best_effort[0], one.arrivals[0]) for one in runs for arm in one.arms}
    for row in load(RESULTS / "scheduler.json").rows:
        loads = "+".join(filter(None, (row.latency_load, row.other_latency)))
        ways = {loads, "+".join(reversed(loads.split("+")))}
        assert any((row.arm, way, row.best_effort_load, row.arrivals) in measured for way in ways), row.arm
    assert "?" not in figures_table(load(RESULTS / "scheduler.json"))


def test_an_unknown_part_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = run(str(tmp_path / "out"), "transformer", "nonsense")
    assert (done.returncode, done.stdout) == (2, "") and "no part nonsense" in done.stderr
    assert not (tmp_path / "out").exists()
    assert run().returncode == 2


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = run(str(tmp_path / "out"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2 and "no GPU" in done.stderr


@pytest.mark.parametrize("failing", ["", "gemm", "four"])
def test_each_part_runs_once_and_what_is_there_is_put_together(tmp_path: Path, failing: str) -> None:
    tools, log, out = tmp_path / "tools", tmp_path / "log", tmp_path / "out"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    (tools / "python").write_text(
        f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >> {log}\n'
        'while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done\n'
        f"case $out in */{failing or 'nothing'}.json) exit 3;; esac\n"
        'touch "${out%.json}.cells"\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    parts = ["gemm", "periodic", "offload", "four"]
    done = run(str(out), *parts, PATH=f"{tools}:{os.environ['PATH']}", PYTHON="python")
    assert done.returncode == (3 if failing else 0), done.stderr
    *runs, merge = log.read_text().splitlines()
    assert sorted(Path(line.split("--out ")[1].split()[0]).stem for line in runs) == sorted(parts)
    assert {line.split()[0] for line in runs} <= {"GPU-a", "GPU-b"}
    cells = [f"{out}/{part}.cells" for part in parts if part != failing]
    assert merge.strip() == f"-m benchmarks.colocation merge --out {out}/scheduler.json {' '.join(cells)}"
