"""The harness against workers that fail, and every arm that exists without a GPU, on the simulated driver."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time

import pytest
from cudasched import demo
from cudasched.demo import harness
from cudasched.demo.arrivals import schedule
from cudasched.demo.harness import ARMS, CLIENT, Backend, HarnessError, Pool, Run, WorkerSpec, workers_of

from benchmarks.lab.session import cell_brief

GENEROUS_S = 120.0
LEAD_IN_S = 0.5  # as client.py has it


@pytest.fixture
def nowhere(tmp_path):
    """A backend whose driver is not one: enough for workers that fail before they need it."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    return Backend("simulated", tmp_path / "libcuda.so.1")


def test_arms_share_workers_where_they_can():
    names = ("latency_alone", "best_effort_alone", "processes", "best_effort_alone_hooked", "cudasched_two_processes")
    specs = {name: workers_of(ARMS[name], "bert_graph", "gemm") for name in names}
    assert specs["latency_alone"] + specs["best_effort_alone"] == specs["processes"]
    assert specs["best_effort_alone_hooked"][0] == specs["cudasched_two_processes"][1] != specs["processes"][1]
    assert [spec.managed for spec in specs["cudasched_two_processes"]] == [True, True]


def test_a_worker_that_cannot_start_shows_its_stderr(nowhere):
    spec = WorkerSpec("no_such_load", None)
    with Pool(nowhere) as pool:
        failed = pool.start([spec], GENEROUS_S)
        assert "unknown latency load 'no_such_load'" in str(failed[spec])
        with pytest.raises(HarnessError, match="no_such_load"):
            pool.run([spec], Run(1.0))


def test_a_worker_that_hangs_is_given_up_and_killed(nowhere, tmp_path, monkeypatch):
    hanging = tmp_path / "client.py"
    hanging.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(harness, "CLIENT", hanging)
    spec = WorkerSpec("mlp", None)
    with Pool(nowhere) as pool:
        assert "did not answer within" in str(pool.start([spec], 0.5)[spec])
        assert not pool._workers


def test_leaving_the_pool_by_an_error_leaves_no_worker(nowhere, tmp_path, monkeypatch):
    ready = tmp_path / "client.py"
    ready.write_text('import sys\nprint(\'{"event": "ready"}\', flush=True)\nsys.stdin.read()\n')
    monkeypatch.setattr(harness, "CLIENT", ready)
    with pytest.raises(KeyboardInterrupt), Pool(nowhere) as pool:
        assert pool.start([WorkerSpec("mlp", None)], GENEROUS_S) == {}
        (worker,) = pool._workers.values()
        raise KeyboardInterrupt
    assert not worker.alive


def test_bare_workers_do_not_inherit_what_managed_ones_run_under(nowhere, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/hook/libcuda.so.1:/other.so")
    monkeypatch.setenv("CUDASCHED_CLASS", "best-effort")
    environment = nowhere.environment(hooked=False)
    assert environment["LD_PRELOAD"] == "/other.so"
    assert "CUDASCHED_CLASS" not in environment and "CUDASCHED_DRIVER" not in environment
    assert environment["LD_LIBRARY_PATH"].startswith(str(nowhere.driver.parent))


def test_engine_times_are_stretched_with_the_simulated_clock(backend):
    assert backend.settings["CUDASCHED_LEAD_US"] == f"{20 * backend.scale:g}"
    assert backend.settings["CUDASCHED_SIM_SCALE"] == f"{backend.scale:g}"


def test_a_worker_killed_between_runs_is_replaced(backend):
    spec = WorkerSpec("mlp", None)
    with Pool(backend) as pool:
        assert pool.start([spec], GENEROUS_S) == {}
        pid = pool._workers[spec]._process.pid
        os.kill(pid, signal.SIGKILL)
        pool._workers[spec]._process.wait(GENEROUS_S)
        result = pool.run([spec], Run(0.5, rates_hz="400"))
        assert pool._workers[spec]._process.pid != pid
    latency_ms = result["latency"]["mlp"]["latency_ms"]
    assert latency_ms and min(latency_ms) > 0
    # Those of the lead-in are served and not counted.
    times = schedule("poisson", 400, (LEAD_IN_S + 0.5) / backend.scale, 0)
    assert len(latency_ms) == sum(at * backend.scale >= LEAD_IN_S for at in times) < len(times)


def test_a_worker_killed_within_a_run_is_an_error_not_a_hang(backend):
    spec = WorkerSpec(None, "gemm")
    with Pool(backend) as pool:
        assert pool.start([spec], GENEROUS_S) == {}
        run = {"seconds": 600, "seed": 0, "rates_hz": {}, "arrivals": "poisson", "hint_ms": 0, "slo_ms": 0}
        pool._workers[spec].tell("run", start_ns=time.monotonic_ns(), **run)
        os.kill(pool._workers[spec]._process.pid, signal.SIGKILL)
        with pytest.raises(HarnessError, match="status -9"):
            pool._workers[spec].answer(GENEROUS_S)


def test_the_gpu_is_busy_once_where_kernels_overlap(monkeypatch):
    monkeypatch.syspath_prepend(str(CLIENT.parent))  # as when it is run by path
    covered_ns = importlib.import_module("client").covered_ns
    assert covered_ns([]) == 0
    assert covered_ns([(100, 50), (0, 20)]) == 70
    assert covered_ns([(0, 100), (10, 20), (90, 30)]) == 120


def test_a_cell_is_told_in_a_line():
    served = {"bert_graph": {"latency_ms": [1.0, 2.0, 3.0]}, "mlp": {"latency_ms": []}}
    told = cell_brief({"latency": served, "best_effort_per_s": {"gemm": 7.0}})
    assert told == "bert_graph P50/P95/P99 2.00/2.90/2.98 ms of 3, gemm 7.00/s" and cell_brief(None) == ""


def test_the_demo_writes_its_numbers_and_says_where_it_ran(simulated_driver, tmp_path, capsys):
    output = tmp_path / "demo.png"
    assert demo.main(seconds=8.0, output=output, simulate=True) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "running on the simulated driver, as asked"
    report = json.loads(output.with_suffix(".json").read_text())
    assert [row["arm"] for row in report["rows"]] == ["alone", "unmanaged", "managed"]
    assert report["simulated"] and "P99" in shown
    if "matplotlib" in sys.modules:
        assert output.read_bytes().startswith(b"\x89PNG")


def test_the_demo_reports_a_worker_that_dies(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Backend, "simulated", classmethod(lambda cls: cls("simulated", tmp_path / "libcuda.so.1")))
    (tmp_path / "libcuda.so.1").write_text("not a library")
    assert demo.main(seconds=1.0, output=tmp_path / "demo.png", simulate=True) == 1
    assert "libcuda.so.1" in capsys.readouterr().out
