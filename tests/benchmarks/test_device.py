"""The benchmark of work queues and graphs, as far as it goes without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cudasched.errors import Error
from cudasched.tune import compile as compilation

from benchmarks.device import benchmark as device
from benchmarks.device import queues
from benchmarks.device.gpu import INCLUDE, ROOT
from benchmarks.lab.run import run
from benchmarks.lab.session import judged
from benchmarks.results.schema import load

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
    made = queues.ratio_of(times | {"queue_thread": [3.0, 3.0], "queue_lanes": [2.0, 2.0]})
    assert (made["static"], made["queue"], made["value"]) == ("cyclic", "queue_lanes", 2.5)
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_graphs_are_rehearsed_over_the_simulated_driver(tmp_path: Path) -> None:
    assert run("device", ["--rehearse", "--out", str(tmp_path / "kernels.json")]) == 0
    made = {row.figure for row in load(tmp_path / "kernels.json").rows if row.kind == "figures"}
    assert made == {"graph_pipeline", "conditional_loop"}
    done = json.loads((tmp_path / "kernels.cells").read_text())["done"]
    others = {row.figure for row in load(tmp_path / "device.json").rows if row.kind == "figures" and row.only_reported}
    assert others == {"graph_update", "graph_pool"}
    pool = done["graphs/pool"]
    assert done["graphs/pipeline"]["kernels"] == 96 and pool["pool_bytes"] * 16 == pool["array_bytes"]


def test_figures_and_what_they_are_made_of() -> None:
    def way(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 1, "high": value + 1, "n": 3}

    ways = {"decided_by_the_one_before": way(4.0), "fire_and_forget_latency": way(3.0)}
    found = device.find({"queues": {"queue_severe": way(1.5)}, "graphs/device": ways})
    assert found == {"queue_severe": (1.5, 0.5, 2.5, 3), "device_launch": (3.0, 2.0, 5.0, 6)}


def test_figures_without_a_goal_are_shown_in_the_document() -> None:
    way = {"value": 4.0, "low": 3.0, "high": 5.0, "n": 9}
    queue = {"n": 5, "queue": "queue_lanes", "ms": {"cyclic_flat": 9.6, "cyclic_flat_4": 9.0, "queue_lanes": 6.0}}
    done = {
        "queues": {"queue_severe": queue},
        "graphs/device": {"child_kernels": way},
        "graphs/peers": {"captured_sums": way},
    }
    made = judged(device.NO_GOALS, device.find_reported(done), {})
    assert [(row.figure, row.value) for row in made] == [
        ("queue_severe_of_flat", 1.5),
        ("child_kernels", 4.0),
        ("captured_sums", 4.0),
    ]
    assert all(row.only_reported for row in made)
    assert "<!-- table:device if measured -->\n" in (ROOT / "docs" / "device.md").read_text()


def test_the_kernels_of_graphs_compile_relocatable() -> None:
    try:
        assert device.relocatable("sm_90")[:4] == b"\x7fELF"
    except Error as error:
        pytest.skip(str(error))
