"""Time slices of best-effort programs on the real driver: set, kept, and given up with the program."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Start, finish, line_of


def clients() -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "cudasched", "status", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    return [client for device in json.loads(done.stdout)["data"] for client in device["clients"]]


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(tmp_path / "run"))


@pytest.mark.alone
def test_libcudas_own_is_replaced_and_stays_so(start: Start) -> None:
    trainer = start("trainer.py", client_class="best-effort")
    line_of(trainer, "")
    for _ in range(3):  # libcuda sets its own 0.1 s after it has made the context
        time.sleep(0.4)
        (seen,) = clients()
        assert (seen["time_slice"], seen["time_slice_us"]) == ("on", 1)


def test_a_request_of_a_bare_program_interrupts_a_kernel_that_runs(start: Start) -> None:
    """300 requests beside kernels of 10 ms: without time slices the two would take turns of 2 ms."""
    before = finish(start("interrupted.py", "requests", "300"))
    long = start("interrupted.py", "kernels", client_class="best-effort")
    line_of(long, "ready")
    beside = finish(start("interrupted.py", "requests", "300"))
    off = start("interrupted.py", "kernels", client_class="best-effort", options=("--time-slice-us", "off"))
    long.kill()
    long.wait()
    line_of(off, "ready")
    turns = finish(start("interrupted.py", "requests", "300"))
    alone_ms, beside_ms, turns_ms = (float(text.split()[-1]) for text in (before, beside, turns))
    print(f"median request {alone_ms:.3f} ms alone, {beside_ms:.3f} with slices, {turns_ms:.3f} in turns")
    assert beside_ms < turns_ms


def test_a_server_has_longer_ones_while_best_effort_is_beside_it(start: Start) -> None:
    server = start("server.py", "100000", client_class="latency")
    line_of(server, "ready")

    def of_server() -> tuple[object, object]:
        (seen,) = [client for client in clients() if client["client_class"] == "latency"]
        return seen["time_slice"], seen["time_slice_us"]

    def becomes(state: object, us: object) -> bool:
        return any(of_server() == (state, us) or time.sleep(0.1) for _ in range(100))

    assert of_server() == ("", None)
    for end in ("kill", "terminate"):
        trainer = start("trainer.py", client_class="best-effort")
        line_of(trainer, "")
        assert becomes("on", 20_000)
        getattr(trainer, end)()
        trainer.wait()
        assert becomes("", None)


def test_killed_clients_and_new_contexts(start: Start) -> None:
    server = start("server.py", "400")
    line_of(server, "ready")
    for _ in range(3):
        trainers = [start("trainer.py", client_class="best-effort") for _ in range(2)]
        for trainer in trainers:
            line_of(trainer, "")
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    assert "served" in finish(server)
