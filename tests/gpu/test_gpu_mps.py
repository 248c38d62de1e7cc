"""NVIDIA's own MPS daemon; skipped where the driver's utilities or MPS itself are missing (some containers)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PATIENCE_S, Start, finish, line_of
from cudasched import mps
from cudasched.mps import keeper

pytestmark = pytest.mark.skipif(shutil.which(keeper.TOOL) is None, reason=f"needs {keeper.TOOL}")


@pytest.fixture(autouse=True)
def no_daemon_of_others() -> None:
    if mps.running_daemon(os.environ) is not None:
        pytest.skip("an MPS daemon runs already, which the tests leave alone")


def wait_for(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "did not happen"
        time.sleep(0.05)


def servers(pipe: Path) -> list[int]:
    return keeper.numbers(keeper.ask(pipe, "get_server_list"))


def keeper_of(run: Path) -> int:
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(keeper.__file__) in words and os.fsencode(run / "mps") in words:
                return int(process.name)
    raise AssertionError(f"nobody keeps the daemon of {run}")


def test_a_path_as_long_as_is_accepted_works(tmp_path: Path) -> None:
    room = mps._LONGEST_SOCKET_PATH - len("/mps/pipe/control_privileged")
    directory = tmp_path / ("x" * (room - len(f"{tmp_path}/")))
    membership = mps.join(directory)
    assert keeper.answers(directory / "mps" / "pipe")
    membership.leave()
    wait_for(lambda: not (directory / "mps" / "pipe").exists())


def test_two_clients_share_a_private_daemon_and_the_last_one_ends_it(start: Start, tmp_path: Path) -> None:
    pipe = tmp_path / "run" / "mps" / "pipe"
    server = start("server.py", "100000", client_class="latency", options=("--mps",))
    line_of(server, "ready")
    # Idle most of the time: a client that is killed in the middle of its work can disturb the others.
    other = start("server.py", "100000", client_class="best-effort", options=("--mps",))
    line_of(other, "ready")
    if not servers(pipe):
        pytest.skip("programs run without an MPS server: MPS does not work on this machine")
    clients = [client for one in servers(pipe) for client in keeper.numbers(keeper.ask(pipe, f"get_client_list {one}"))]
    assert {server.pid, other.pid} <= set(clients)

    other.send_signal(signal.SIGKILL)
    other.wait()
    assert server.poll() is None and keeper.answers(pipe)
    server.terminate()
    server.wait()
    wait_for(lambda: not pipe.exists())
    assert not keeper.processes(pipe)
    # And once more, as nothing is in the way.
    assert "served" in finish(start("server.py", "3", client_class="latency", options=("--mps",)))
    wait_for(lambda: not pipe.exists())


def test_a_killed_keeper_leaves_no_daemon(tmp_path: Path) -> None:
    run = Path("/dev/shm") / f"cudasched-test-{os.getpid()}"
    try:
        member = mps.join(run)
        pipe = run / "mps" / "pipe"
        daemon = int((pipe / f"{keeper.TOOL}.pid").read_text())
        os.kill(keeper_of(run), signal.SIGKILL)
        wait_for(lambda: daemon not in keeper.processes(pipe))
        again = mps.join(run)
        assert keeper.answers(pipe)
        member.leave()
        again.leave()
        wait_for(lambda: not pipe.exists() and not keeper.processes(pipe))
    finally:
        shutil.rmtree(run, ignore_errors=True)
