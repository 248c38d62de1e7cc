"""Changing running clients from outside: real programs on the simulated driver, and those that cannot be changed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cudasched import ArbiterError, ConfigError, control
from support import PATIENCE_S, eventually, stop

WORKS = """
import sys, threading, cudasched, launcher
gpu = launcher.Gpu()
in_region, forks = "region" in sys.argv, "forks" in sys.argv
cudasched.set_class("best_effort" if not in_region else "normal")
ended = threading.Event()
def work():
    if in_region:
        with cudasched.region("latency"):
            gpu.launch()
            gpu.synchronize()
    else:
        gpu.launch()
        gpu.synchronize()
work()
if forks:
    import os
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
print("ready", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(0.01):
    work()
print(cudasched.state().process_class, cudasched.state().latency_launches > 0)
"""


@contextmanager
def program(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", WORKS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDASCHED_NAME": name},
    ) as running:
        assert running.stdin and running.stdout and running.stdout.readline() == "ready\n"
        try:
            yield running
        finally:
            running.send_signal(signal.SIGCONT)
            running.stdin.close()


def named(name: str) -> control.Client:
    """The client of that name, once it has said its number."""
    eventually(lambda: any(client.name == name for client in control.clients()))
    return next(client for client in control.clients() if client.name == name)


@pytest.fixture(autouse=True)
def device(simulated: Path, quick_device: None) -> None:
    """A simulated device of each test's own."""


def test_every_setting_of_a_running_program() -> None:
    with program("train.py") as running:
        before = named("train.py")
        assert (before.pid, before.client_class, before.classes) == (running.pid, "best_effort", ("best_effort",))
        assert (before.priority, before.weight, before.policy) == (0, 1.0, "strict")
        after = control.change(before.id, priority=-2, weight=0.25, policy="slack")
        assert (after.priority, after.weight, after.policy) == (-2, 0.25, "slack")
        assert control.change(before.id, memory_limit="2GiB").memory_limit_bytes == 2 << 30
        assert control.change(before.id, memory_limit="none").memory_limit_bytes is None
        assert control.change(before.id, client_class="latency").client_class == "latency"
        eventually(lambda: "latency" in named("train.py").classes)
        again = named("train.py")
        assert (again.client_class, again.priority, again.weight, again.id) == ("latency", -2, 0.25, before.id)
        # What it was once it stays listed as (docs/control.md): its latency work may be in the middle of a launch.
        assert control.change(before.id, client_class="best_effort").client_class == "best_effort"
        assert set(named("train.py").classes) == {"best_effort", "latency"}
        assert control.change(before.id, client_class="latency").client_class == "latency"
        assert running.stdin and running.stdout
        running.stdin.close()
        assert running.stdout.read() == "latency True\n"


def test_a_running_program_is_traced_on_demand(tmp_path: Path) -> None:
    with program("train.py") as running:
        client = named("train.py")
        summary = control.trace(client.id, tmp_path / "out.json", 0.3)
        assert summary.processes == 1 and summary.launches > 0
        events = json.loads((tmp_path / "out.json").read_text())
        assert events and str(running.pid) in (tmp_path / "out.json").read_text()
        # Again, in the other form; nothing is left in the run directory.
        assert control.trace(client.id, tmp_path / "out.pftrace", 0.05).processes == 1
        assert not (tmp_path / "run" / "traces" / client.id).exists()
        stop(running.pid)
        with pytest.raises(ConfigError, match=r"from 0\.001 to 60"):
            control.trace(client.id, tmp_path / "never", 61)
        with pytest.raises(ConfigError, match="perfetto, json"):
            control.trace(client.id, tmp_path / "never", format="pdf")
        with pytest.raises(ConfigError, match="nowhere"):
            control.trace(client.id, tmp_path / "nowhere" / "never")
        assert not (tmp_path / "never").exists()


def test_a_program_that_is_traced_already(tmp_path: Path) -> None:
    with program("train.py"):
        client = named("train.py")
        asked = threading.Thread(target=control.trace, args=(client.id, tmp_path / "one.pftrace", 2.0))
        asked.start()
        eventually(lambda: (tmp_path / "run" / "traces" / client.id).exists())
        with pytest.raises(control.ControlError, match="being traced already") as refused:
            control.trace(client.id, tmp_path / "two.pftrace", 0.1)
        assert refused.value.reason == "traced"
        asked.join()
        assert (tmp_path / "one.pftrace").stat().st_size > 0 and not (tmp_path / "two.pftrace").exists()


def test_a_trace_is_over_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second trace that began while the first one's records were read, and were then removed."""
    from cudasched.observe.trace import _parts

    convert, refused = _parts.convert, []

    def slow(*arguments: Any) -> Any:
        with pytest.raises(control.ControlError, match="being traced already") as error:
            control.trace(client.id, tmp_path / "two.pftrace", 0.1)
        refused.append(error.value.reason)
        return convert(*arguments)

    with program("train.py"):
        client = named("train.py")
        with monkeypatch.context() as changed:
            changed.setattr(_parts, "convert", slow)
            control.trace(client.id, tmp_path / "one.pftrace", 0.1)
        control.trace(client.id, tmp_path / "three.pftrace", 0.1)
    assert refused == ["traced"] and not (tmp_path / "two.pftrace").exists()
    assert os.listdir(tmp_path / "run" / "traces") == []


def test_records_of_a_trace_whose_process_was_killed_are_removed(tmp_path: Path) -> None:
    """Guards against megabytes in the run directory that nobody removed."""
    traces = tmp_path / "run" / "traces"
    for name in ("old", "written", "held"):
        (traces / name).mkdir(parents=True)
        (traces / name / "1.trace").write_bytes(b"x" * 100)
        (traces / f"{name}.lock").touch()
    past = time.time() - 3600
    for path in (*traces.glob("*"), *traces.glob("*/*")):
        if "written" not in path.parts[-2:]:
            os.utime(path, (past, past))
    with (traces / "held.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        control.remove_left_traces(tmp_path / "run")
    assert sorted(os.listdir(traces)) == ["held", "held.lock", "written", "written.lock"]


def test_two_programs_are_changed_apart() -> None:
    with program("one.py"), program("two.py"):
        one = named("one.py")
        control.change(one.id, weight=3.0)
        assert (named("one.py").weight, named("two.py").weight) == (3.0, 1.0)


def test_a_program_with_regions_says_its_class_itself() -> None:
    with program("serve.py", "region"):
        client = named("serve.py")
        with pytest.raises(control.ControlError, match="regions decide the class of the client") as refused:
            control.change(client.id, client_class="best_effort")
        assert (refused.value.reason, refused.value.applied) == ("regions", ())
        assert control.change(client.id, priority=3).client_class == "normal"


def test_what_was_changed_before_a_refusal_stays_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with program("train.py"):
        client = named("train.py")
        core = control.hook.load_core()

        class Refusing:
            """The core, whose clients are always busy where their weight is to change."""

            def __getattr__(self, name: str) -> object:
                return getattr(core, name)

            def change(self, path: str, number: int, setting: str, value: str, timeout_ns: int) -> str:
                return "busy" if setting == "weight" else core.change(path, number, setting, value, timeout_ns)

        monkeypatch.setattr(control.hook, "load_core", Refusing)
        with pytest.raises(control.ControlError, match="priority had been changed before") as refused:
            control.change(client.id, priority=1, weight=2.0)
        assert refused.value.applied == ("priority",)
        assert (named("train.py").priority, named("train.py").weight) == (1, 1.0)


def test_a_forked_child_is_no_client_and_changes_nothing() -> None:
    with program("train.py", "forks") as running:
        client = named("train.py")
        assert client.pid == running.pid
        assert control.change(client.id, weight=2.0).weight == 2.0


def test_a_stopped_program_is_not_changed_later() -> None:
    with program("train.py") as running:
        client = named("train.py")
        stop(running.pid)
        with pytest.raises(control.ControlError, match="did not answer in time") as refused:
            control.change(client.id, weight=5.0, timeout_s=0.2)
        assert refused.value.reason == "withdrawn"
        running.send_signal(signal.SIGCONT)
        assert control.change(client.id, priority=1).weight == 1.0


def test_a_program_that_is_killed_meanwhile() -> None:
    with program("train.py") as running:
        client = named("train.py")
        running.kill()
        running.wait(PATIENCE_S)
        with pytest.raises(control.ControlError) as refused:
            control.change(client.id, weight=5.0)
        assert refused.value.reason in ("no_client", "ended")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_class": "urgent"}, "unknown class"),
        ({"priority": 9}, "from -8 to 8"),
        ({"priority": True}, "from -8 to 8"),
        ({"priority": 1.5}, "an integer"),
        ({"weight": 0}, "from 0.01 to 100"),
        ({"weight": float("nan")}, "from 0.01 to 100"),
        ({"memory_limit": 1000}, "at least 1 MiB"),
        ({"policy": "stri\nct"}, "must be 'strict'"),
        ({"weight": 2.0, "policy": "x" * 10_000}, "must be 'strict'"),
        ({"weight": 2.0, "timeout_s": -1}, "from 0 to 60"),
    ],
)
def test_a_value_without_meaning_changes_nothing(arguments: dict[str, object], message: str) -> None:
    with program("train.py"):
        client = named("train.py")
        with pytest.raises(ConfigError, match=message) as refused:
            control.change(client.id, **arguments)  # type: ignore[arg-type]
        assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)
        assert named("train.py") == client


@pytest.mark.parametrize("client", ["", "x" * 16, "1" * 15, "+" + "1" * 15, "1" * 4096, "\u0661" * 16])
def test_what_is_no_id(client: str) -> None:
    with pytest.raises(ConfigError, match="16 hexadecimal digits"):
        control.change(client, weight=1.0)


def test_nobody_of_that_id() -> None:
    for client in ("1" * 16, "0" * 16):
        with pytest.raises(control.ControlError, match="no such client"):
            control.change(client, weight=1.0)


def test_a_table_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "GPU-1.arbiter").write_bytes(b"x" * 100)
    with pytest.raises(ArbiterError, match=r"GPU-1\.arbiter"):
        control.change("1" * 16, weight=1.0)
    assert control.clients() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
def test_another_users_clients_are_not_seen() -> None:
    with program("train.py"):
        named("train.py")
        child = os.fork()
        if child == 0:
            os.setresuid(65534, 65534, 65534)
            try:
                control.change("1" * 16, weight=1.0)
            except (ArbiterError, control.ControlError):
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
