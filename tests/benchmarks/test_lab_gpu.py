"""A GPU that others use or that lowers its clock, through a stand-in for nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_cells import META

from benchmarks import meta
from benchmarks.colocation.cells import Cell
from benchmarks.lab import gpu
from benchmarks.lab import run as lab
from benchmarks.lab.session import Session

CELL = Cell("latency_alone", "bert_graph", "", "poisson", "60", 1.0, 0.0, 0)
SAYS = """#!/bin/sh
echo "$*" >> {directory}/asked
case "$*" in
  *compute-apps*) cat {directory}/processes ;;
  *utilization*) echo {used} ;;
  *clocks.sm*) echo 1200 ;;
  *slowdown*) echo "Not Active, {slow}" ;;
esac
"""
Fake = Callable[..., None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """NVML's answers."""

    def says(processes: str = "", used: int = 0, slow: str = "Not Active") -> None:
        (tmp_path / "processes").write_text(processes)
        script = tmp_path / "nvidia-smi"
        script.write_text(SAYS.format(directory=tmp_path, used=used, slow=slow))
        script.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    monkeypatch.setattr(gpu, "LOOK_S", 0.0)
    return says


@pytest.fixture
def session(tmp_path: Path) -> Session:
    declared = lab.Benchmark(about="", groups={"a": lambda session: None}, settings={"seconds": 1.0})
    return Session("x", lab.parse("x", declared, ["--out", str(tmp_path / "x.json")]), META)


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process of this user that no process here has started: its parent has ended."""
    started = subprocess.run(["sh", "-c", "sleep 60 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
    pid = int(started.stdout)
    while not (Path("/proc") / str(pid) / "cmdline").read_bytes().startswith(b"sleep"):
        time.sleep(0.01)
    yield pid
    os.kill(pid, 9)


def test_a_gpu_that_is_busy_before_the_run_is_refused_and_named(fake: Fake, tmp_path: Path) -> None:
    fake()
    gpu.refuse_busy()
    assert "-i GPU-7 " in (tmp_path / "asked").read_text(), "other GPUs of the machine may be busy"
    fake("71, /usr/bin/python3\n9, trainer, of two\n")
    with pytest.raises(
        gpu.BusyGpuError, match=r"busy with process 9 \(trainer, of two\), process 71 \(/usr/bin/python3"
    ):
        gpu.refuse_busy()
    fake(used=97)
    with pytest.raises(gpu.BusyGpuError, match="97% busy with processes that are not seen"):
        gpu.refuse_busy()


def test_a_run_on_a_busy_gpu_measures_nothing(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("71, trainer\n")
    monkeypatch.setattr(meta, "describe", lambda *_: META)
    called = []
    monkeypatch.setattr(lab, "load_benchmark", lambda name: lab.Benchmark(about="", groups={"a": called.append}))
    assert lab.run("x", ["--out", str(tmp_path / "x.json")]) == 1 and not called
    assert "x: the GPU is busy with process 71 (trainer)" in capsys.readouterr().err


def test_a_process_that_comes_later_stops_the_run_before_the_next_cell(
    fake: Fake, session: Session, stranger: int
) -> None:
    fake(f"{os.getpid()}, {sys.executable}\n4000000, elsewhere\n7, nvidia-cuda-mps-server\n")
    session.measure_cell(CELL, dict)
    fake(f"{stranger}, /usr/bin/sleep\n")
    session.measure_cell(CELL, dict)  # without one of its own, the numbers may be of another namespace
    fake(f"{os.getpid()}, {sys.executable}\n{stranger}, /usr/bin/sleep\n")
    with pytest.raises(gpu.BusyGpuError, match=rf"process {stranger} \(/usr/bin/sleep\), which the benchmark did not"):
        session.measure_cell(CELL, dict)
    assert session.cells.outcomes[CELL].result == {}


def test_a_cell_at_a_lowered_clock_is_measured_again(fake: Fake, session: Session) -> None:
    fake(slow="Active")
    session.measure_cell(CELL, lambda: {"latency": {}})
    assert session.cells.missing([CELL]) and session.failed == 1
    assert session.cells.outcomes[CELL].error == "the GPU lowered its clock to 1200 MHz, for heat or a power brake"
    fake()
    session.measure_cell(CELL, lambda: {"latency": {}})
    assert not session.cells.missing([CELL])


def test_without_nvml_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    gpu.refuse_busy()
    gpu.refuse_strangers()
    gpu.refuse_slow()
