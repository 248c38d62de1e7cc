"""`cudasched.metrics()` and `cudasched.observe.clients()`: what processes have counted."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import cudasched
import pytest
from cudasched import hook, observe
from cudasched.observe import Times, names
from cudasched.observe._metrics import bucket_begin_ns
from cudasched.status import Counted
from support import Run

WORKS = """
import json, sys, cudasched, launcher
gpu = launcher.Gpu()
for i in range(20):
    with cudasched.region("latency", slo_ms=60_000, name="kept"):
        gpu.launch()
        gpu.synchronize()
with cudasched.region("latency", slo_ms=0.001, name="missed \\"{x}\\""):
    gpu.launch(3)
    gpu.synchronize()
with cudasched.region("best_effort"):
    gpu.launch(100)
    gpu.synchronize()
m = cudasched.metrics()
kept, missed = m.regions
print(json.dumps({
    "launches": m.launches, "kept": [kept.name, kept.met, kept.missed, kept.attainment, kept.requests, kept.slo_ms],
    "missed": [missed.name, missed.met, missed.missed], "p99": kept.times.p99_ms, "queue": m.queue_wait.count,
    "active": m.latency_active_s, "gpu": m.best_effort_gpu_s,
}), flush=True)
sys.stdin.read()
"""


def test_a_program_has_metrics_that_others_can_read(simulated: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout
        said = json.loads(program.stdout.readline())
        assert said["launches"] == {"normal": 0, "latency": 23, "best_effort": 100}
        assert said["kept"] == ["kept", 20, 0, 1.0, 20, 60_000.0]
        assert said["missed"] == ['missed "{x}"', 0, 1]
        assert said["p99"] > 0.02  # a kernel takes 20 us
        assert said["active"] > 20 * 20e-6
        # The table follows within a tick.
        for _ in range(500):
            devices, processes = observe.clients()
            (process,) = processes
            if process.metrics and process.metrics.launches == said["launches"]:
                break
        assert process.metrics and process.metrics.launches == said["launches"]
        assert [region.name for region in process.metrics.regions] == ["kept", 'missed "{x}"']
        assert process.pid == program.pid and process.number != 0
        assert sorted(client.client_class for _, client in process.clients) == ["best_effort", "latency"]
        (device,) = devices
        assert {uuid for uuid, _ in process.clients} == {device.uuid} and not device.error
        program.stdin.close()
    assert observe.clients()[1] == []


def test_without_the_hook_all_is_zero(no_driver: Path, python: Run) -> None:
    done = python(
        "import cudasched; m = cudasched.metrics(); print(m.launches, m.gate_wait.p99_ms, m.predictions.error)"
    )
    assert done.stdout == "{'normal': 0, 'latency': 0, 'best_effort': 0} None None\n", done.stderr


def test_a_table_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "GPU-0.arbiter").write_bytes(b"not a table")
    devices, processes = observe.clients(tmp_path)
    assert processes == [] and "is not a client table" in devices[0].error
    assert observe.clients(tmp_path / "missing") == ([], [])


def test_quantiles_are_within_an_eighth() -> None:
    draw = random.Random(1)
    times_ns = sorted(int(math.exp(draw.gauss(13, 2))) for _ in range(5_000))
    begins = [bucket_begin_ns(bucket) for bucket in range(98)]
    buckets = [0] * 98
    for ns in times_ns:
        buckets[max(i for i, begin in enumerate(begins) if begin <= ns)] += 1
    times = Times(tuple(buckets), sum(times_ns) / 1e9)
    assert times.count == 5_000
    for share, shown in ((0.5, times.p50_ms), (0.95, times.p95_ms), (0.99, times.p99_ms)):
        assert shown == pytest.approx(times_ns[int(share * 5_000)] / 1e6, rel=0.125)
    assert Times().p50_ms is None
    # One beyond all buckets is said to be where they end.
    assert Times((0,) * 97 + (1,)).p99_ms == pytest.approx(2**34 / 1e6)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "x" * 64, "é" * 32, "\ud800", 7, None])
def test_names_that_cannot_be_shown_are_refused(name: object) -> None:
    with pytest.raises(cudasched.ConfigError, match="63 bytes"):
        cudasched.region("latency", name=name)  # type: ignore[arg-type]


def test_importing_the_package_loads_none_of_it(python: Run) -> None:
    done = python("import sys, cudasched; print([m for m in sys.modules if 'observe' in m or 'prometheus' in m])")
    assert done.stdout == "[]\n"


def test_each_line_of_the_table_is_read_and_exported_in_its_unit() -> None:
    """include/cudasched/counts.inc, by which C, C++ and Python know what is counted."""
    core = hook.load_core()
    counted, numbers = core.counted(), set(core.counts().numbers)
    assert set(counted) == numbers | set(names._LISTS) | set(names._TIMES)
    assert {each.name for each in fields(Counted)} <= numbers
    for name, (metric, text) in counted.items():
        is_time = name.endswith("_ns") or name in names._TIMES
        assert text.endswith(".") and (not metric or metric.endswith("_seconds") is is_time), name
    exported = [each.name for each in names.exports()]
    assert len(exported) == len(set(exported))
