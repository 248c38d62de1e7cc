"""Recording on the real driver: every launch, its own time, its parameters; and what advice is made of that."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE_S, PROGRAMS, Collect, Start, finish, run_program

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")

import cudasched.collect as recordings  # noqa: E402


def metadata(table: pa.Table) -> dict[str, str]:
    return {key.decode().removeprefix("cudasched."): value.decode() for key, value in table.schema.metadata.items()}


def of(table: pa.Table, function: str) -> list[dict[str, object]]:
    """The launches of one kernel."""
    rows: list[dict[str, object]] = table.filter(pc.equal(table["function"].cast("string"), function)).to_pylist()
    return rows


def test_every_launch_of_an_unmodified_program_is_a_row_with_its_time(start: Start, collect: Collect) -> None:
    """ATen, cuBLAS, cuDNN, a CUDA graph, Triton, CuPy's driver calls, threads; counted by CUPTI in another run."""
    counted = finish(start("coverage_mix.py", client_class="normal", options=("--check-coverage",)))
    counts = re.findall(r"coverage_mix\.py\W+(\d+)\W+(\d+)\W+100\.00 %", counted)
    assert counts, counted
    table = recordings.read(collect("coverage_mix.py", options=("--label", "mix|all roads")))
    said = metadata(table)
    assert table.num_rows == int(counts[0][1]) > 200
    trouble = ("by_order", "mismatched", "lost", "untimed", "foreign", "dropped_records", "cut_short")
    assert {name: said[name] for name in trouble} == dict.fromkeys(trouble, "0")
    assert (said["timing"], said["processes"], int(said["exact"])) == ("cupti", "1", table.num_rows)
    assert set(table["label"].to_pylist()) == {"mix|all roads"}
    rows = table.to_pylist()
    assert len({row["launch"] for row in rows}) == len(rows)
    for row in rows:
        assert 300 < row["duration_ns"] < 1e9, row
        # On one clock, to a millisecond: a kernel does not start before its launch began.
        assert -1e6 < row["start_ns"] - row["submitted_ns"] < 60e9, row
        assert all(row["words"][word] == 0 for word in row["pointers"]), row
        assert len(row["pointers"]) % 2 == 0
    graphs = [row for row in rows if row["kind"] == "graph"]
    assert [(row["graph"], row["identity"], row["function"]) for row in graphs] == [(1, 0, "graph")] * 10
    assert len({row["thread"] for row in rows}) >= 5
    assert len({row["stream"] for row in rows}) >= 5


def test_parameters_of_triton_and_cupy_kernels(collect: Collect) -> None:
    table = recordings.read(collect("coverage_mix.py", "triton", "cupy"))
    triton = of(table, "double")
    assert len(triton) == 7
    for row in triton:
        assert (row["grid_x"], row["grid_y"], row["grid_z"]) == (5, 1, 1)
        assert row["pointers"][:4] == [0, 1, 2, 3]  # type: ignore[index]
        assert row["words"][:5] == [0, 0, 0, 0, 5000]  # type: ignore[index]
    cupy = of(table, "f")
    assert len(cupy) == 6
    for row in cupy:
        assert (row["grid_x"], row["block_x"], row["parameter_bytes"]) == (1, 32, 8)
        assert (row["words"], row["pointers"]) == ([0, 0], [0, 1])
    assert len({row["identity"] for row in cupy + triton}) == 2


def by_place(times_us: list[float], iterations: int) -> list[float]:
    """The median time of each kernel of an iteration."""
    kernels, rest = divmod(len(times_us), iterations)
    assert rest == 0 and kernels >= 6
    return [statistics.median(times_us[place::kernels]) for place in range(kernels)]


def test_times_are_the_profilers(collect: Collect, tmp_path: Path) -> None:
    """Other programs may be on the GPU, so the two are compared up to three times."""
    ratios = []
    for attempt in range(3):
        path = tmp_path / f"profile-{attempt}.json"
        iterations = int(run_program("kernel_times.py", "profile", str(path)).split()[-1])
        profiled = json.loads(path.read_text())
        table = recordings.read(collect("kernel_times.py"))
        recorded_us = [value / 1e3 for value in table["duration_ns"].to_pylist()[-len(profiled) :]]
        theirs, ours = by_place([us for _, us in profiled], iterations), by_place(recorded_us, iterations)
        ratios.append(statistics.median(our / their for our, their in zip(ours, theirs, strict=True)))
        if 0.95 < ratios[-1] < 1.05:
            break
    assert 0.95 < ratios[-1] < 1.05, ratios


def test_events_time_too(collect: Collect) -> None:
    exact = recordings.read(collect("kernel_times.py"))
    table = recordings.read(collect("kernel_times.py", options=("--timing", "events")))
    said = metadata(table)
    assert said["timing"] == "events"
    assert (table.num_rows, said["lost"]) == (exact.num_rows, "0")
    ratios = []
    for mine, their in zip(table["duration_ns"].to_pylist(), exact["duration_ns"].to_pylist(), strict=True):
        if mine is not None and their > 10_000:
            ratios.append(mine / their)
    assert len(ratios) > exact.num_rows / 8
    assert 0.6 < statistics.median(ratios) < 1.6, statistics.median(ratios)


def test_beside_a_running_profiler_collecting_is_refused(start: Start, tmp_path: Path) -> None:
    output = finish(start("beside_profiler.py", "profiler_first", str(tmp_path / "data.parquet")))
    refused = [line for line in output.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 1 and "another profiler" in refused[0], output
    profiled = re.search(r"profiled (\d+)", output)
    assert profiled and int(profiled[1]) >= 100, output
    assert output.splitlines()[-1] == "done"
    assert not list(tmp_path.glob("data.parquet*"))


def test_a_profiler_that_starts_while_collecting_costs_no_launch(start: Start, tmp_path: Path) -> None:
    data = tmp_path / "data.parquet"
    output = finish(start("beside_profiler.py", "collecting_first", str(data)))
    assert "recorded 150 0" in output, output
    assert output.splitlines()[-1] == "done"
    assert recordings.read(data).num_rows == 150


def test_what_was_recorded_survives_a_kill(tmp_path: Path) -> None:
    data = tmp_path / "data.parquet"
    journals = data.with_name(data.name + ".journals")
    command = [sys.executable, "-m", "cudasched", "collect", "-o", str(data)]
    environment = dict(os.environ, CUDASCHED_RUN_DIR=str(tmp_path / "run"))
    process = subprocess.Popen(
        [*command, "--", sys.executable, str(PROGRAMS / "trainer.py")],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + PATIENCE_S
        while not any(path.stat().st_size > 100_000 for path in journals.glob("*")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not data.exists()
    table = recordings.read(data)
    assert table.num_rows > 100
    assert metadata(table)["cut_short"] == "1"
    timed = [value for value in table["duration_ns"].to_pylist() if value is not None]
    assert len(timed) > table.num_rows / 2 and min(timed) > 300
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert finished.returncode == 0, finished.stderr
    assert recordings.read(data).num_rows == table.num_rows
    assert not journals.exists()


# ---- advice --------------------------------------------------------------------------------------------------------


def test_blocks_of_32_threads_get_advice(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cudasched", "advise", "--json", "--", sys.executable, str(PROGRAMS / "narrow.py")],
        env=dict(os.environ, CUDASCHED_RUN_DIR=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["data"]
    kernels = [kernel for kernel in report["kernels"] if kernel["function"] == "narrow"]
    assert len(kernels) == 1
    kernel = kernels[0]
    assert (kernel["launches"], kernel["block"], kernel["origin"]) == (100, [32, 1, 1], "own")
    assert (kernel["occupancy"], kernel["limited_by"]) == (0.5, ["blocks"])
    advice = [finding for finding in kernel["findings"] if finding["rule"] == "block_size"]
    assert len(advice) == 1
    assert re.match(r"try \d[\d, a-z]* threads a block.*: 64 of 64 warps$", advice[0]["recommendation"]), advice
    assert advice[0]["time_at_stake_ns"] > 0


def test_predicted_occupancy_is_the_drivers(collect: Collect) -> None:
    from cudasched.advise.occupancy import ARCHITECTURES, occupancy

    table = recordings.read(collect("narrow.py", "shapes"))
    architecture = ARCHITECTURES[metadata(table)["compute_capability"]]
    rows = of(table, "narrow")
    assert len(rows) == 77
    wrong = []
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, int)}
        shared = numbers["static_shared_bytes"] + numbers["dynamic_shared_bytes"]
        predicted = occupancy(architecture, numbers["block_x"], numbers["registers"], shared).blocks_per_sm
        if predicted != numbers["blocks_per_sm"]:
            wrong.append((numbers["block_x"], shared, predicted, numbers["blocks_per_sm"]))
    assert not wrong
    assert len({row["blocks_per_sm"] for row in rows}) > 6
