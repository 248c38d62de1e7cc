"""The tuner on a GPU: configurations that hang, fault or are wrong, its tools, and a server beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import PATIENCE_S, Start, finish, line_of
from cudasched.tune import Settings, read, tune
from cudasched.tune.measurement import Measurement
from cudasched.tune.quiet import LONGEST_PAUSE_MS
from cudasched.tune.workers import Limits, Live, Request

pytest.importorskip("sklearn")

SOURCE = """
extern "C" __global__ void twice(float* y, const float* x, int n) {
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) y[i] = (WAY == 1 ? 3 : 2) * x[i];
#if WAY == 2
  if (blockIdx.x == 0 && threadIdx.x == 0) y[n] = 1;
#elif WAY == 3
  if (blockIdx.x == 0 && threadIdx.x == 0) *(volatile int*)nullptr = 1;
#elif WAY == 4
  while (*(volatile const float*)x < 1e30f) {}
#elif WAY == 5
  this does not compile;
#endif
}
"""
SPACE = """
kernel = "twice"
source = "twice.cu"
work = "8 * n"
[shape]
n = 1048576
[parameters]
WAY = [0]
THREADS = [64, 256]
[launch]
block = "THREADS"
grid = "sms * 4"
[[arguments]]
name = "y"
role = "output"
size = "n"
[[arguments]]
name = "x"
role = "input"
size = "n"
[[arguments]]
name = "n"
role = "scalar"
type = "int32"
value = "n"
[check]
reference = "twice.py:twice"
"""
REFERENCE = 'def twice(inputs, shape):\n    return {"y": 2 * inputs["x"]}\n'


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the kernel and its reference; the tuner's table is the test's own."""
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "twice.cu").write_text(SOURCE)
    (tmp_path / "twice.py").write_text(REFERENCE)
    (tmp_path / "twice.toml").write_text(SPACE)
    return tmp_path


def test_what_hangs_faults_or_is_wrong_costs_one_configuration(twice: Path) -> None:
    (twice / "twice.toml").write_text(SPACE.replace("WAY = [0]", "WAY = [0, 1, 2, 3, 4, 5]"))
    space = read(twice / "twice.toml")
    assert space.source is not None
    with Live(space, space.source, limits=Limits(run_s=5.0)) as live:
        configurations = live.problem.configurations
        found: dict[object, set[str]] = {}
        for request, made in live.measure([Request(i, 3) for i in range(len(configurations))]):
            found.setdefault(configurations[request.index]["WAY"], set()).add(made.status)
    assert found == {
        0: {"ok"},
        1: {"wrong"},
        2: {"out_of_bounds"},
        3: {"fault"},
        4: {"hang"},
        5: {"compile_error"},
    }


def test_tools_look_at_the_winner(twice: Path) -> None:
    if shutil.which("ncu") is None or shutil.which("compute-sanitizer") is None:
        pytest.skip("needs ncu and compute-sanitizer on the PATH")
    command = [sys.executable, "-m", "cudasched", "tune", "--space", "twice.toml", "--database", "d.sqlite"]
    done = subprocess.run(
        [*command, "--sanitize", "--profile", "-o", "tuned.json"],
        cwd=twice,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    first = json.loads((twice / "tuned.json").read_text())["configurations_by_time"][0]
    assert 0 < first["profile"]["l2_hit_percent"] <= 100, first


def test_beside_a_server_it_ends_with_samples_of_which_none_was_taken_beside_a_request(
    twice: Path, start: Start
) -> None:
    server = start(
        "server.py", "100000", client_class="latency", settings={"CUDASCHED_RUN_DIR": os.environ["CUDASCHED_RUN_DIR"]}
    )
    line_of(server, "ready")
    tuned = tune(space=twice / "twice.toml", database=twice / "d.sqlite", settings=Settings(warm=False))
    assert isinstance(tuned.measurements[tuned.index], Measurement)
    assert {one.status for one in tuned.measurements.values()} <= {"ok", "disturbed"} and tuned.time_us > 0


@pytest.mark.alone
def test_a_training_pauses_while_a_quiet_tuner_samples_and_runs_in_between(start: Start) -> None:
    trainer = start("trainer.py", client_class="best-effort")
    line_of(trainer, "")
    ended: list[int] = []  # when steps of the training had ended

    def read() -> None:
        assert trainer.stdout is not None
        ended.extend(int(line.split()[0]) for line in trainer.stdout if line[0].isdigit())  # else of the log

    reader = threading.Thread(target=read)
    reader.start()
    pauses = json.loads(finish(start("quiet.py")).splitlines()[-1])
    trainer.kill()
    reader.join()
    first, last = pauses[0][0], pauses[-1][1]
    longest_ns = round(1e6 * LONGEST_PAUSE_MS)
    held = [(begin + 1_000_000, min(end, begin + longest_ns)) for begin, end in pauses]  # a gate opens then
    during = [at for at in ended for begin, end in held if begin < at < end]
    assert len(pauses) == 10 and not during, (pauses, during)
    assert len([at for at in ended if first < at < last]) > 10
