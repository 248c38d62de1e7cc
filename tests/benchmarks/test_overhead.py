from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.lab.run import run
from benchmarks.overhead import benchmark as overhead
from benchmarks.results.schema import load


def test_the_launch_loop_runs_on_the_null_driver(tmp_path):
    program, company, driver = overhead.build(tmp_path)
    environment = {"LD_LIBRARY_PATH": str(driver.parent)}
    done = subprocess.run([program, "3", "10"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(overhead.LOOP)
    assert all(len(line) == 4 and all(float(value) >= 0 for value in line[1:]) for line in lines)
    names = ["alone", *overhead.COMPANY]
    found = overhead.printed("beside", [str(company), "3", "10"], environment, names)
    assert list(found) == names and all(len(batches) == 3 and min(batches) > 0 for batches in found.values())
    with pytest.raises(overhead.HarnessError, match="beside: status 2\nlaunch_beside: BATCHES"):
        overhead.printed("beside", [str(company), "0", "10"], environment, names)


def test_the_null_driver_has_every_symbol_of_the_shim(tmp_path):
    _, _, driver = overhead.build(tmp_path)
    exported = subprocess.run(["nm", "-D", "--defined-only", driver], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in exported.splitlines()}
    listed = subprocess.run(
        [sys.executable, overhead.ENTRY_POINTS, "symbols"], capture_output=True, text=True, check=True
    )
    wanted = set(listed.stdout.split())
    assert wanted and wanted <= names


def test_differences_are_taken_within_rounds():
    slow = [[110.0, 112.0, 111.0], [1010.0, 1012.0, 1011.0], [210.0, 212.0, 211.0]]
    bare = [[100.0, 102.0, 101.0], [1000.0, 1002.0, 1001.0], [200.0, 202.0, 201.0]]
    row = overhead.row("launch", slow, bare)
    assert row.added_ns_median == 10.0 and row.rounds == 3
    assert row.ns_median == 211.0 and row.baseline_ns_median == 201.0


@pytest.mark.usefixtures("simulated_driver")
def test_overhead_rehearses_every_class(tmp_path):
    out = tmp_path / "overhead.json"
    assert (
        run("overhead", ["--rehearse", "--rounds", "1", "--batches", "5", "--launches", "20", "--out", str(out)]) == 0
    )
    rows = load(out).rows
    # Two drivers: two kernels in three classes and at the gate, a sleep in three classes. And one beside a thread.
    assert len(rows) == 2 * (2 * 4 + 3) + len(overhead.COMPANY)
    assert all(row.ns_median > 0 for row in rows if "idle" not in row.what)


@pytest.mark.usefixtures("simulated_driver")
def test_recording_by_events_is_rehearsed(tmp_path):
    out = tmp_path / "collect.json"
    assert run("collect", ["--rehearse", "--out", str(out)]) == 0
    assert [row.what for row in load(out).rows] == [
        f"simulated driver, {words}: recorded by events" for words in overhead.KERNELS.values()
    ]
