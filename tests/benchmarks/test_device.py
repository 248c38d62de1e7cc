"""The benchmark of work queues and graphs, as far as it goes without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cudasched.errors import Error
from cudasched.tune import compile as compilation

from benchmarks.device import queues
from benchmarks.device.gpu import INCLUDE, ROOT

np = pytest.importorskip("numpy")


def compiled(source: Path, target: str) -> bytes:
    try:
        compiler = compilation.choose()
    except Error as error:
        pytest.skip(str(error))
    return compilation.compile_source(source, (), target, compiler, [f"-I{INCLUDE}"]).image


@pytest.mark.parametrize("ratio", [64.0, 4.0, 1.0])
def test_lengths_are_as_imbalanced_as_they_should(ratio: float) -> None:
    drawn = queues.lengths(1 << 18, ratio)
    assert drawn.min() >= 1
    assert drawn.max() / drawn.mean() == pytest.approx(ratio, rel=0.1)
    assert drawn.mean() == pytest.approx(queues.MEAN, rel=0.1)


def test_the_figure_is_the_best_static_over_the_best_queue() -> None:
    times = {"blocked": [9.0, 9.0], "cyclic": [4.0, 6.0], "block_per_item": [50.0, 50.0], "cyclic_flat": [1.0, 1.0]}
    made = queues.ratio_of(times | {"queue_thread": [3.0, 3.0], "queue_shared_thread": [2.0, 2.0]})
    assert (made["static"], made["queue"], made["value"]) == ("cyclic", "queue_shared_thread", 2.5)
    assert (made["low"], made["high"], made["n"]) == (2.0, 3.0, 2)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120"])
def test_what_is_measured_compiles(target: str) -> None:
    assert compiled(queues.SOURCE, target)[:4] == b"\x7fELF"
    assert compiled(ROOT / "examples" / "persistent_queue.cu", target)[:4] == b"\x7fELF"


def test_it_says_that_it_needs_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device.queues"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    if done.returncode != 0:  # on a machine that has one, it measures
        assert done.returncode == 4 and "needs a GPU" in done.stderr, done.stderr
