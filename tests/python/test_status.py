"""What `cudasched.status` and `cudasched status` make of the tables."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import cudasched
import pytest
from cudasched import hook
from cudasched.cli.status import show_status
from cudasched.status import LEVELS
from support import PATIENCE_S, Run

COUNTED = hook.load_core().counted()
RAW = {
    "slot": 3,
    "client_class": "latency",
    "priority": 1,
    "pid": 42,
    "alive": True,
    "active": True,
    "waiting": False,
    "regions": 2,
    "hook_attached": True,
    "age_ns": 2_500_000_000,
    "heartbeat_age_ns": 20_000_000,
    "active_since_ns": 7_500_000_000,
    "slo_ns": 5_000_000,
    "in_flight_ns": 150_000,
    "overdue_ns": 0,
    "policy_ns": 0,
    "deadline_in_ns": -1_000_000,
    "launches": 90,
    "device_launches": 100,
    "gate_waits": 7,
    "gate_wait_ns": 3_000_000,
    "process": 77,
    "normal_beside_best_effort": 0,
    "memory_bytes": 3 << 30,
    "memory_peak_bytes": 4 << 30,
    "memory_limit_bytes": 20 << 30,
    "memory_away_bytes": 0,
    "memory_given_bytes": 0,
    "memory_refusals": 0,
    "pool_reserved_bytes": 0,
    "pool_allocated_bytes": 0,
    "pool_largest_free_bytes": 0,
    "process_class": "latency",
    "weight_milli": 1500,
    "time_slice_us": 0,
    "time_slice_state": 0,
    "policy": "strict",
    "name": "serve.py",
    "version": "0.1.0",
}

HOLD = """
import sys, cudasched, launcher
cudasched.set_class(sys.argv[1], slo_ms=float(sys.argv[2]) or None, priority=int(sys.argv[3]))
gpu = launcher.Gpu()
gpu.launch(int(sys.argv[4]))
gpu.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


class Tables:
    """What `_core` is to status."""

    def __init__(self, directory: Path, clients: list[dict[str, object]]) -> None:
        self._directory, self._clients = directory, clients

    def run_directory(self) -> str:
        return str(self._directory)

    def find_driver(self) -> str:
        return "libcuda.so.1"

    def read_counts(self, path: str) -> tuple[str, list[tuple[SimpleNamespace, SimpleNamespace | None]]]:
        if "broken" in path:
            raise cudasched.ArbiterError("not a table")
        return "H200", [self._read(**client) for client in self._clients]

    @staticmethod
    def _read(
        whole: object = None, kernels: dict[str, object] | None = None, **client: object
    ) -> tuple[SimpleNamespace, SimpleNamespace | None]:
        if not whole and not kernels:
            return SimpleNamespace(**client), None
        numbers = {**dict.fromkeys(COUNTED, 0), **(kernels or {})}
        levels = (kernels or {}).get("kernels", [0] * 4)
        return SimpleNamespace(**client), SimpleNamespace(whole_graphs=whole or {}, kernels=levels, numbers=numbers)


def test_units_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = {**RAW, "slot": 0, "slo_ns": 0, "deadline_in_ns": 0, "device_launches": 0}
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [RAW, quiet]))
    (tmp_path / "GPU-1.arbiter").touch()
    (tmp_path / "notes.txt").touch()
    (device,) = cudasched.status()
    assert (device.name, device.uuid, device.path, device.error) == ("H200", "GPU-1", tmp_path / "GPU-1.arbiter", "")
    first, second = device.clients
    assert (first.slot, first.slo_ms, first.deadline_in_ms, first.coverage) == (0, None, None, None)
    assert asdict(second) == {
        **{key: value for key, value in RAW.items() if not key.endswith(("_ns", "_milli", "_state"))},
        "time_slice": "",
        "time_slice_us": None,
        "weight": 1.5,
        "slo_ms": 5.0,
        "age_s": 2.5,
        "heartbeat_age_s": 0.02,
        "active_since_s": 7.5,
        "in_flight_ms": 0.15,
        "overdue_s": 0.0,
        "policy_s": 0.0,
        "deadline_in_ms": -1.0,
        "gate_wait_ms": 3.0,
        "whole_graphs": {},
        "kernels": {
            "count": 0,
            "occupancy": None,
            "sm_utilisation": None,
            "block_efficiency": None,
            "levels": dict.fromkeys(LEVELS, 0),
        },
    }
    assert second.coverage == 0.9


def test_a_client_that_launches_meanwhile_or_has_work_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(range(90, 99))

    class Launches(Tables):
        def read_counts(self, path: str) -> tuple[str, list[tuple[SimpleNamespace, SimpleNamespace | None]]]:
            read = super().read_counts(path)
            read[1][0][0].launches = next(looks)
            return read

    trains = {**RAW, "active": False, "in_flight_ns": 0, "client_class": "best_effort"}
    runs = {**trains, "slot": 4, "name": "runs.py", "process": 2, "in_flight_ns": 150_000}
    idles = {**trains, "slot": 5, "name": "idle.py", "process": 3}
    waits = {**trains, "slot": 6, "name": "waits.py", "process": 4, "waiting": True}
    monkeypatch.setattr(hook, "_core", Launches(tmp_path, [trains, runs, idles, waits]))
    (tmp_path / "GPU-1.arbiter").touch()
    assert show_status(as_json=False, watch=False) == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert {row[2]: row[4] for row in rows} == {
        "serve.py": "busy",
        "runs.py": "busy",
        "idle.py": "idle",
        "waits.py": "waiting",
    }


def test_what_kernels_make_of_the_gpu_is_said_of_each_best_effort_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = {
        "kernels": [1, 0, 4, 3],
        "kernel_occupancy": 5_000_000,
        "kernel_sm_utilisation": 6_500_000,
        "kernel_block_efficiency": 7_920_000,
    }
    trains = {**RAW, "slot": 4, "name": "train.py", "client_class": "best_effort", "kernels": kernels}
    serves = {**RAW, "slot": 5, "name": "serve.py", "process": 2}
    idles = {**RAW, "slot": 6, "name": "idle.py", "process": 3, "client_class": "best_effort"}
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [trains, serves, idles]))
    (tmp_path / "GPU-1.arbiter").touch()
    assert show_status(as_json=False, watch=False) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "occupancy" in line]
    assert line == (
        "train.py (42): 8 kernels, by their launch shapes on average: occupancy 62%, waves full 81%, warps full 99%; "
        "1 critical, 4 good, 3 not judged (cudasched advise)"
    )
    assert show_status(as_json=True, watch=False) == 0
    (device,) = json.loads(capsys.readouterr().out)["data"]
    assert device["clients"][0]["kernels"] == {
        "count": 8,
        "occupancy": 0.625,
        "sm_utilisation": 0.8125,
        "block_efficiency": 0.99,
        "levels": {"critical": 1, "warning": 0, "good": 4, "not judged": 3},
    }
    assert device["clients"][1]["kernels"]["occupancy"] is None


def test_what_a_process_counts_is_said_of_each_of_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The table gives it once a process: of a program with latency regions, with its latency client.
    first = {**RAW, "slot": 0, "whole": {"branches": (2, 4_200_000, 310)}, "kernels": {"kernels": [0, 1, 0, 0]}}
    second = {**RAW, "slot": 1, "client_class": "best_effort"}
    other = {**RAW, "slot": 2, "client_class": "best_effort", "process": 78}
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [first, second, other]))
    (tmp_path / "GPU-1.arbiter").touch()
    (device,) = cudasched.status()
    assert [client.kernels.count for client in device.clients] == [1, 1, 0]
    assert [len(client.whole_graphs) for client in device.clients] == [1, 1, 0]


BESIDE = """
import sys, cudasched, launcher
gpu = launcher.Gpu()
with cudasched.region("latency"):
    gpu.launch()
    gpu.synchronize()
with cudasched.region("best_effort"):
    gpu.launch(50)
    gpu.synchronize()
print(cudasched.metrics().kernels.count, flush=True)
sys.stdin.read()
"""


def test_a_program_that_launches_beside_latency_work_has_kernels(simulated: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BESIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout
        assert program.stdout.readline() == "1\n", "one kernel in one launch shape, however often"
        for _ in range(500):  # the table follows within a tick
            (device,) = cudasched.status()
            kernels = {client.client_class: client.kernels for client in device.clients}["best_effort"]
            if kernels.count:
                break
        assert kernels.count == sum(kernels.levels.values()) == 1
        assert kernels.occupancy is not None and 0 < kernels.occupancy <= 1
        assert kernels.sm_utilisation is not None and 0 < kernels.sm_utilisation <= 1
        assert kernels.block_efficiency is not None and 0 < kernels.block_efficiency <= 1
        program.stdin.close()


def test_graphs_that_stay_whole_are_named_with_their_reason_and_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"memory_node": (2, 4_200_000, 310), "short": (9, 150_000, 12), "unknown_node": (1, 900_000, 5)}
    trains = {**RAW, "slot": 4, "name": "train.py", "client_class": "best_effort", "whole": whole}
    serves = {**RAW, "slot": 5, "name": "serve.py", "client_class": "latency", "process": 2, "whole": whole}
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [trains, serves]))
    (tmp_path / "GPU-1.arbiter").touch()
    assert show_status(as_json=False, watch=False) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "whole" in line]
    assert len(lines) == 2 and all("train.py" in line for line in lines)
    assert "2 graphs are launched whole, up to 4.2 ms and 310 nodes" in lines[0]
    assert "memory_node: allocate before the capture" in lines[0]
    assert "1 graph is" in lines[1] and "unknown_node (docs/graphs.md)" in lines[1]
    (device,) = cudasched.status()
    assert device.clients[0].whole_graphs["memory_node"].longest_ms == 4.2
    assert show_status(as_json=True, watch=False) == 0
    assert '"longest_nodes": 310' in capsys.readouterr().out or '"longest_nodes":310' in capsys.readouterr().out


def test_work_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a launch that is a little late."""
    hangs = {**RAW, "name": "hangs.py", "overdue_ns": 12_600_000_000}
    late = {**RAW, "slot": 4, "name": "late.py", "overdue_ns": 900_000_000}
    asks = {**RAW, "slot": 5, "name": "asks.py", "policy_ns": 3_400_000_000}
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [hangs, late, asks]))
    (tmp_path / "GPU-1.arbiter").touch()
    assert show_status(as_json=False, watch=False) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    states = {row[2].strip(): row[4].strip() for row in rows}
    assert states == {"hangs.py": "overdue 13 s", "late.py": "active", "asks.py": "its policy hangs 3 s"}


def test_a_table_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [RAW]))
    for name in ("GPU-1", "broken", "zzz"):
        (tmp_path / f"{name}.arbiter").touch()
    devices = cudasched.status()
    assert [(device.uuid, len(device.clients), device.error) for device in devices] == [
        ("GPU-1", 1, ""),
        ("broken", 0, "not a table"),
        ("zzz", 1, ""),
    ]


def test_a_directory_that_cannot_be_read_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [RAW]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refused)
        (device,) = cudasched.status()
        assert (device.path, device.clients) == (tmp_path, ())
        assert device.error == "the directory of the client tables cannot be read: Permission denied"
        assert show_status(as_json=False, watch=False) == 1
    assert "Permission denied" in capsys.readouterr().out


def test_no_directory_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "_core", Tables(tmp_path / "missing", []))
    assert cudasched.status() == []


def test_no_driver(no_driver: Path, cudasched: Run) -> None:
    for arguments in (["status"], ["status", "--json"], ["status", "--watch"]):
        done = cudasched(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.count("driver") == 2 and str(no_driver) in done.stderr  # said once


def test_no_clients(simulated: Path, cudasched: Run, tmp_path: Path) -> None:
    done = cudasched("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no clients") and str(tmp_path / "run") in done.stdout
    assert json.loads(cudasched("status", "--json").stdout)["data"] == []


def test_a_file_that_is_no_table(simulated: Path, cudasched: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "GPU-x.arbiter").write_bytes(b"not a table")
    done = cudasched("status")
    assert done.returncode == 1
    assert "GPU-x.arbiter" in done.stdout and "Traceback" not in done.stderr


def test_living_clients_are_shown_and_dead_ones_go(simulated: Path, cudasched: Run) -> None:
    programs = [("latency", "5", "1", "3"), ("best_effort", "0", "0", "4"), ("normal", "0", "0", "2")]
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for arguments in programs
    ]
    try:
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == "ready\n"
        (device,) = json.loads(cudasched("status", "--json").stdout)["data"]
        assert device["path"].endswith(".arbiter") and device["uuid"].startswith("GPU-") and device["name"]
        shown = {client["client_class"]: client for client in device["clients"]}
        assert {name: entry["pid"] for name, entry in shown.items()} == {
            arguments[0]: client.pid for arguments, client in zip(programs, clients, strict=True)
        }
        assert (shown["latency"]["slo_ms"], shown["latency"]["priority"]) == (5.0, 1)
        assert all(entry["alive"] and entry["hook_attached"] for entry in shown.values())
        assert all(entry["coverage"] is None for entry in shown.values())

        table = cudasched("status")
        assert table.returncode == 0
        for client in clients:
            assert str(client.pid) in table.stdout
        for word in ("latency", "best_effort", "normal", device["name"]):
            assert word in table.stdout
        clients[0].kill()
        clients[0].wait()
        (device,) = json.loads(cudasched("status", "--json").stdout)["data"]
        assert {client["client_class"] for client in device["clients"]} == {"best_effort", "normal"}
    finally:
        for client in clients:
            client.kill()
            client.communicate(timeout=PATIENCE_S)


def test_watch_goes_on_until_interrupted(simulated: Path, command: str) -> None:
    # What the tests' own parent ignores, as a shell has its background jobs do, the program would ignore as well.
    watch = subprocess.Popen(
        [command, "status", "--json", "--watch"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert watch.stdout is not None
    assert [json.loads(watch.stdout.readline())["data"] for _ in range(2)] == [[], []]
    watch.send_signal(signal.SIGINT)
    assert watch.wait(timeout=PATIENCE_S) == 0


def test_watch_into_a_pipe_prints_each_second(simulated: Path, command: str) -> None:
    """`status --watch | head` never ended: a live display prints into a pipe at its end alone."""
    watch = subprocess.Popen([command, "status", "--watch"], stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    assert all(watch.stdout.readline().startswith("no clients") for _ in range(2))
    watch.stdout.close()
    assert watch.wait(timeout=PATIENCE_S) == 1


def test_best_effort_that_slips_past_is_said_once_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process of two classes is one line; another process of the same pid elsewhere is another."""
    both = {**RAW, "name": "both.py", "normal_beside_best_effort": 3}
    clients = [both, {**both, "slot": 4, "client_class": "best_effort"}, {**both, "slot": 5, "process": 78}]
    monkeypatch.setattr(hook, "_core", Tables(tmp_path, [*clients, {**RAW, "slot": 6, "name": "sound.py"}]))
    (tmp_path / "GPU-1.arbiter").touch()
    assert show_status(as_json=False, watch=False) == 0
    output = capsys.readouterr().out
    assert output.count("both.py (42): 3 launches went as normal on streams that best effort uses") == 2
    assert "sound.py (42)" not in output
