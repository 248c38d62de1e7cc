"""Work queues and graphs of a program's own, on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S, Start, finish, gpus, run_program
from cudasched.errors import Error
from cudasched.tune import compile as compilation

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("capture_and_update", "conditional", "device_launch", "dynamic_parallelism", "pool")


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        compilation.choose()
    except Error as error:
        pytest.skip(str(error))


def test_a_queue_gives_each_item_once() -> None:
    assert "done" in run_program("work_queues.py")


@pytest.mark.parametrize("part", PARTS)
def test_graphs(part: str) -> None:
    assert "done" in run_program("own_graphs.py", part)


@pytest.mark.parametrize("part", PARTS)
def test_graphs_of_a_best_effort_program(start: Start, part: str) -> None:
    """Through the shim, deferred where that may be: the same results."""
    assert "done" in finish(start("own_graphs.py", part, client_class="best-effort"))


def test_graphs_over_two_gpus() -> None:
    if gpus() < 2:
        pytest.skip("needs two GPUs")
    assert "done" in run_program("own_graphs.py", "two_gpus")


def test_the_example_and_what_measures_queues_run() -> None:
    command = [sys.executable, str(ROOT / "examples" / "persistent_queue.py"), "--numbers", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "launch 2" in done.stdout, done
    command = [sys.executable, "-m", "benchmarks.device.queues", "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == {"queue_severe", "queue_moderate", "queue_balanced"}
