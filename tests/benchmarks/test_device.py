"""The benchmark of work queues and graphs, as far as it goes without a GPU."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cudasched.errors import Error
from cudasched.tune import compile as compilation

from benchmarks import tables
from benchmarks.device import __main__ as device
from benchmarks.device import queues
from benchmarks.device.gpu import INCLUDE, ROOT
from benchmarks.results.schema import load, merge_figures

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


def test_a_run_without_a_gpu_says_so_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device", "--out", str(tmp_path), "--limit-s", "100"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    if done.returncode == device.NO_GPU:
        assert "queues: needs a GPU" in done.stderr and "graphs: needs a GPU" in done.stderr
    else:
        assert load(tmp_path / "kernels.json").rows, done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_graphs_are_rehearsed_over_the_simulated_driver(tmp_path: Path) -> None:
    assert device.main(["--simulate", "--out", str(tmp_path), "--limit-s", "100"]) == 0
    made = {row.figure for row in load(tmp_path / "kernels.json").rows if row.kind == "figures"}
    assert made == {"graph_pipeline", "conditional_loop"}
    graphs = json.loads((tmp_path / "parts.json").read_text())["graphs"]
    others = {row.figure for row in load(tmp_path / "device.json").rows if row.kind == "figures" and row.only_reported}
    assert others == {"graph_update", "graph_pool"}
    assert graphs["pipeline"]["kernels"] == 96 and graphs["pool"]["pool_bytes"] * 16 == graphs["pool"]["array_bytes"]


def test_figures_and_what_they_are_made_of(tmp_path: Path) -> None:
    def way(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 1, "high": value + 1, "n": 3}

    graphs = {"device": {"decided_by_the_one_before": way(4.0), "fire_and_forget_latency": way(3.0)}}
    found = device.figures({"queues": {"queue_severe": way(1.5)}, "graphs": graphs})
    made = device.rows(found, {"queue_severe": "the longest item"})
    assert [(row.figure, row.value, row.low, row.high, row.limited_by) for row in made] == [
        ("queue_severe", 1.5, 0.5, 2.5, "the longest item"),
        ("device_launch", 3.0, 2.0, 5.0, ""),
    ]
    described = device.describe(device_options())
    merge_figures(tmp_path / "a.json", described, made)
    merge_figures(tmp_path / "a.json", described, device.rows({"queue_severe": way(9.0)}, {}))
    assert device.merge([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    values = {row.figure: row.value for row in load(tmp_path / "b.json").rows if row.kind == "figures"}
    assert values == {"device_launch": 3.0, "queue_severe": 9.0}


def test_figures_without_a_goal_are_shown_in_the_document(tmp_path: Path) -> None:
    way = {"value": 4.0, "low": 3.0, "high": 5.0, "n": 9}
    queue = {
        "value": 6.7,
        "n": 5,
        "queue": "queue_lanes",
        "ms": {"cyclic_flat": 9.6, "cyclic_flat_4": 9.0, "queue_lanes": 6.0},
    }
    parts = {
        "queues": {"queue_severe": queue},
        "graphs": {"device": {"child_kernels": way}, "peers": {"captured_sums": way}},
    }
    made = device.rows(device.reported(parts), {}, device.NO_GOALS)
    assert [(row.figure, row.value) for row in made] == [
        ("queue_severe_of_flat", 1.5),
        ("child_kernels", 4.0),
        ("captured_sums", 4.0),
    ]
    described = device.describe(device_options())
    merge_figures(tmp_path / "from.json", described, made)
    assert device.merge([str(tmp_path / "from.json"), str(tmp_path / "device.json")]) == 0
    marker = "<!-- table:device if measured -->\n"
    assert marker in (device.ROOT / "docs" / "device.md").read_text()
    text = tables.rendered(f"{marker}<!-- end -->\n", tmp_path)
    assert "| `captured_sums` | 4 | 3 to 5 | 9 | none |  |" in text


def device_options() -> argparse.Namespace:
    return argparse.Namespace(commit="c0ffee", simulate=True)


def test_the_kernels_of_graphs_compile_relocatable() -> None:
    try:
        assert device.relocatable("sm_90")[:4] == b"\x7fELF"
    except Error as error:
        pytest.skip(str(error))
