"""The private MPS daemon, with a stand-in for NVIDIA's: who starts it, who shares it, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cudasched import config, mps
from cudasched.mps import keeper
from support import Run, eventually

FAKE = Path(__file__).with_name("fake_mps_control.py")
SHOW = 'echo "$CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_CLIENT_PRIORITY"'


class Machine:
    """One that has MPS, and what its stand-in has noted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.tools = directory / "bin"
        self.tools.mkdir()
        for name in (keeper.TOOL, "nvidia-cuda-mps-server"):
            self.tool(name, f"#!{sys.executable} -IS\n{FAKE.read_text()}")

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def note(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def notes(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []

    def pipe(self, name: str = "mps") -> Path:
        return self.run / name / "pipe"

    def processes(self) -> list[int]:
        return [pid for pipe in self.directory.glob("*/*/pipe") for pid in keeper.processes(pipe)]

    def is_clean(self) -> bool:
        """No daemon, no server, and nobody keeps one."""
        return not any(self.run.glob("*/pipe")) and not self.keepers()

    def keepers(self) -> list[int]:
        found = []
        for process in Path("/proc").iterdir():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(keeper.__file__) in words and any(os.fsencode(self.directory) in word for word in words):
                found.append(int(process.name))
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    directory = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))  # sockets lie in there: a short path
    machine = Machine(directory)
    monkeypatch.setenv("PATH", f"{machine.tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS", str(directory))
    monkeypatch.setenv("CUDASCHED_RUN_DIR", str(machine.run))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_CLIENT_PRIORITY", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    yield machine
    (directory / "clients").unlink(missing_ok=True)
    for pid in machine.keepers() + machine.processes():
        with contextlib.suppress(ProcessLookupError):  # it ends by itself, too
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory)


# ---- priority by class ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "client_class", "priority"),
    [
        ({}, "latency", "0"),
        ({}, "best_effort", "1"),
        ({}, None, None),
        ({"CUDA_MPS_CLIENT_PRIORITY": "0"}, "best_effort", "0"),
        ({"CUDA_MPS_CLIENT_PRIORITY": "1"}, "latency", "1"),
        # Set by an outer `run`, not by the user.
        ({"CUDA_MPS_CLIENT_PRIORITY": "1", "CUDASCHED_CLASS": "best_effort"}, "latency", "0"),
        ({"CUDA_MPS_CLIENT_PRIORITY": "0", "CUDASCHED_CLASS": "best-effort"}, "latency", "0"),
    ],
)
def test_the_priority_goes_by_class_unless_the_user_has_set_it(
    environment: dict[str, str], client_class: str | None, priority: str | None
) -> None:
    after = {**environment, **mps.priority(environment, client_class)}
    assert after.get("CUDA_MPS_CLIENT_PRIORITY") == priority


def test_a_class_that_nobody_chose_is_none() -> None:
    assert config.resolve(environment={}).chosen_class is None
    assert config.resolve(environment={"CUDASCHED_CLASS": "normal"}).chosen_class == "normal"


def test_run_and_the_import_set_it_before_the_first_call(
    machine: Machine, simulated: Path, cudasched: Run, python: Run
) -> None:
    done = cudasched("run", "--class", "best-effort", "--", "sh", "-c", SHOW)
    assert (done.returncode, done.stdout, done.stderr) == (0, " 1\n", "")
    shown = "import os; print(os.environ.get('CUDA_MPS_CLIENT_PRIORITY'))\n"
    classes = "".join(f"cudasched.set_class({name!r})\n{shown}" for name in ("latency", "best_effort", "normal"))
    code = "import cudasched\n" + shown + classes
    assert python(code).stdout.split() == ["None", "0", "1", "0"]
    assert python(code, env={**os.environ, "CUDASCHED_CLASS": "best-effort"}).stdout.split() == ["1", "0", "1", "0"]
    assert python(code, env={**os.environ, "CUDA_MPS_CLIENT_PRIORITY": "1"}).stdout.split() == ["1"] * 4


# ---- one daemon for all --------------------------------------------------------------------------------------------


def test_the_last_to_leave_ends_the_daemon(machine: Machine) -> None:
    first, second = mps.join(machine.run), mps.join(machine.run)
    assert first.environment == second.environment
    assert first.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(machine.pipe())
    assert first.server_runs()
    for directory in (machine.run, machine.run / "mps", machine.pipe(), machine.run / "mps" / "log"):
        assert directory.stat().st_mode & 0o777 == 0o700
    first.leave()
    assert second.server_runs()
    second.leave()
    eventually(machine.is_clean)
    assert machine.notes("starts") == ["all"]


def test_many_who_join_at_once_share_one_daemon(machine: Machine) -> None:
    members: list[mps.Membership] = []
    threads = [threading.Thread(target=lambda: members.append(mps.join(machine.run))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(members) == 6 and machine.notes("starts") == ["all"]
    for member in members:
        member.leave()
    eventually(machine.is_clean)


def test_who_joins_while_the_daemon_ends_gets_the_next(machine: Machine) -> None:
    machine.note("slow", "0.3")
    for _ in range(2):
        member = mps.join(machine.run)
        quits = machine.notes("commands").count("quit -t 10")
        member.leave()
        eventually(lambda before=quits: machine.notes("commands").count("quit -t 10") > before)
    last = mps.join(machine.run)
    assert last.server_runs()
    assert machine.notes("starts") == ["all"] * 3
    last.leave()


def test_a_mig_instance_has_a_daemon_of_its_own(machine: Machine) -> None:
    whole, part = mps.join(machine.run, "1,0"), mps.join(machine.run, "MIG-3f1c,MIG-4")
    assert part.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(machine.pipe("mps-MIG-3f1c"))
    assert machine.notes("starts") == ["all", "MIG-3f1c"]  # no other numbering for who sees some GPUs alone
    whole.leave()
    part.leave()


def test_the_daemon_of_an_instance_by_gpu_and_numbers_has_one_directory(machine: Machine) -> None:
    member = mps.join(machine.run, "MIG-GPU-3f1c/1/0")
    assert member.directory == machine.run / "mps-MIG-GPU-3f1c-1-0"
    assert machine.notes("starts") == ["MIG-GPU-3f1c/1/0"]
    member.leave()


# ---- whoever is killed ---------------------------------------------------------------------------------------------


def test_a_killed_program_leaves_nothing_behind(machine: Machine, simulated: Path, command: str) -> None:
    arguments = [command, "run", "--mps", "--class", "latency", "--", "sh", "-c", f"{SHOW}; read line"]
    programs = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for program in programs:
        assert program.stdout and program.stdout.readline() == f"{machine.pipe()} 0\n"
    parents = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in machine.keepers()]
    assert len(parents) == 1 and int(parents[0]) not in [program.pid for program in programs]
    programs[0].kill()
    programs[0].communicate()
    assert keeper.answers(machine.pipe())
    programs[1].kill()
    programs[1].communicate()
    eventually(machine.is_clean)
    assert machine.notes("starts") == ["all"]


def test_a_programs_children_keep_the_daemon(machine: Machine, simulated: Path, cudasched: Run) -> None:
    """Though the program uses the first free descriptor."""
    reader, writer = os.pipe()
    program = "exec 3<&0; (read line <&3) >/dev/null 2>&1 & exit 3"
    done = cudasched("run", "--mps", "--", "sh", "-c", program, stdin=reader)
    assert (done.returncode, done.stderr) == (3, "")  # and the keeper holds neither of the program's outputs
    time.sleep(4 * keeper._LOOK_S)
    assert keeper.answers(machine.pipe())
    os.close(reader)
    os.close(writer)
    eventually(machine.is_clean)


def test_a_killed_keeper_takes_the_daemon_along_and_the_next_one_ends_its_servers(machine: Machine) -> None:
    member = mps.join(machine.run)
    (server,) = keeper.numbers(keeper.ask(machine.pipe(), "get_server_list"))
    (keeper_pid,) = machine.keepers()
    os.kill(keeper_pid, signal.SIGKILL)
    eventually(lambda: machine.processes() == [server])
    again = mps.join(machine.run)
    assert again.server_runs() and server not in machine.processes()
    member.leave()
    again.leave()
    eventually(machine.is_clean)


def test_a_daemon_that_ends_by_itself_is_replaced(machine: Machine) -> None:
    member = mps.join(machine.run)
    os.kill(int((machine.pipe() / f"{keeper.TOOL}.pid").read_text()), signal.SIGKILL)
    again = mps.join(machine.run)
    assert again.server_runs() and machine.notes("starts") == ["all", "all"]
    member.leave()
    again.leave()


def test_a_client_that_closed_its_claim_is_not_cut_off(machine: Machine) -> None:
    member = mps.join(machine.run)
    machine.note("clients", f"{os.getpid()}\n")
    looks = [line for line in machine.notes("commands") if line.startswith("get_client_list")]
    member.leave()
    eventually(lambda: len([c for c in machine.notes("commands") if c.startswith("get_client_list")]) > len(looks) + 1)
    assert keeper.answers(machine.pipe())
    machine.note("clients", "")
    eventually(machine.is_clean)


# ---- where there is a daemon already -------------------------------------------------------------------------------


def test_a_daemon_that_runs_already_is_used(
    machine: Machine, simulated: Path, cudasched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = mps.join(machine.directory / "elsewhere")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", elsewhere.environment["CUDA_MPS_PIPE_DIRECTORY"])
    done = cudasched("run", "--mps", "--", "sh", "-c", SHOW)
    assert (done.stdout, done.stderr) == (f"{machine.directory}/elsewhere/mps/pipe \n", "")
    assert not machine.run.joinpath("mps").exists()
    assert mps.running_daemon(os.environ) == machine.directory / "elsewhere" / "mps" / "pipe"
    # Another user's daemon does not answer, but its process is there.
    (machine.tools / keeper.TOOL).write_text("#!/bin/sh\nexit 1\n")
    assert mps.running_daemon(os.environ) is not None
    pid = int(Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], f"{keeper.TOOL}.pid").read_text())
    (keeper_pid,) = machine.keepers()
    os.kill(keeper_pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert mps.running_daemon(os.environ) is None


# ---- what may be wrong ---------------------------------------------------------------------------------------------


def test_without_a_driver_nothing_is_started(machine: Machine, no_driver: Path, cudasched: Run) -> None:
    done = cudasched("run", "--mps", "--", "sh", "-c", SHOW)
    assert (done.returncode, done.stdout) == (0, " \n") and not machine.notes("starts")


def test_without_mps_the_command_says_what_is_missing(machine: Machine, simulated: Path, cudasched: Run) -> None:
    (machine.tools / keeper.TOOL).unlink()
    done = cudasched("run", "--mps", "--", "echo", "ran", env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "no nvidia-cuda-mps-control on PATH" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_daemon_that_does_not_start_is_shown_by_its_last_word(machine: Machine) -> None:
    machine.note("broken", "1")
    with pytest.raises(mps.MpsError, match=r"ended with 1: The GPU said no \(its logs are in .*/mps/log\)"):
        mps.join(machine.run)
    eventually(lambda: not machine.processes() and not machine.keepers())
    machine.note("broken", "")
    mps.join(machine.run).leave()


@pytest.mark.parametrize("wrong", ["open to others", "a link"])
def test_a_directory_that_is_not_ours_alone_is_refused(machine: Machine, wrong: str) -> None:
    machine.run.mkdir(mode=0o700)
    if wrong == "a link":
        (machine.run / "mps").symlink_to(machine.tools)
    else:
        (machine.run / "mps").mkdir()
        (machine.run / "mps").chmod(0o770)
    with pytest.raises(mps.MpsError, match="nobody else can write to"):
        mps.join(machine.run)


def test_a_directory_of_somebody_else_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.run.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(mps.MpsError, match=f"owner {os.getuid()}"):
        mps.join(machine.run)


def test_a_path_too_long_for_sockets_is_refused(machine: Machine) -> None:
    room = 106 - len("/mps/pipe/control_privileged")  # for what stands before
    name = "x" * (room - len(f"{machine.directory}/"))
    mps.join(machine.directory / name).leave()
    with pytest.raises(mps.MpsError, match="set CUDASCHED_RUN_DIR to one that is 7 bytes shorter"):
        mps.join(machine.directory / (name + "1234567"))
    eventually(lambda: not (machine.directory / name / "mps" / "pipe").exists())


GPUS = """#!/bin/sh
case $1 in
*query-gpu*) cat <<END
0, NVIDIA T4, GPU-a, {first}
1, {other}, GPU-b, {second}
END
;;
*) echo "GPU-a, 77, /usr/bin/other"; echo "GPU-b, 78, /usr/bin/nvidia-cuda-mps-server" ;;
esac
"""


@pytest.mark.parametrize(
    ("first", "second", "visible", "refusal"),
    [
        ("Prohibited, [N/A]", "Prohibited, [N/A]", "", "GPU 0 is in compute mode Prohibited"),
        ("Prohibited, [N/A]", "Default, [N/A]", "0", "GPU 0 is in compute mode Prohibited"),
        ("Prohibited, [N/A]", "Default, [N/A]", "", ""),
        ("Prohibited, [N/A]", "Default, [N/A]", "GPU-b", ""),
        ("Exclusive_Process, Disabled", "Default, Disabled", "0", r"process 77 \(/usr/bin/other\) has it without MPS"),
        ("Default, Disabled", "Exclusive_Process, Disabled", "1", ""),
        ("Default, Enabled", "Default, Disabled", "0", "set CUDA_VISIBLE_DEVICES to one"),
        ("Default, Enabled", "Default, Disabled", "MIG-1", ""),
    ],
)
def test_gpus_that_mps_cannot_serve_are_named(
    machine: Machine, first: str, second: str, visible: str, refusal: str
) -> None:
    machine.tool("nvidia-smi", GPUS.format(first=first, other="NVIDIA T4", second=second))
    if refusal:
        with pytest.raises(mps.MpsError, match=refusal):
            mps.join(machine.run, visible)
        assert not machine.notes("starts")
    else:
        mps.join(machine.run, visible).leave()
        eventually(machine.is_clean)


@pytest.mark.parametrize(("order", "refused"), [("", False), ("FASTEST_FIRST", False), ("PCI_BUS_ID", True)])
def test_a_number_means_the_gpu_at_that_place_only_if_both_number_alike(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, order: str, refused: bool
) -> None:
    """GPU 0 of nvidia-smi is the slower one, which CUDA has as 1."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    machine.tool("nvidia-smi", GPUS.format(first="Prohibited, [N/A]", other="NVIDIA H200", second="Default, [N/A]"))
    if refused:
        with pytest.raises(mps.MpsError, match="GPU 0 is in compute mode Prohibited"):
            mps.join(machine.run, "0")
    else:
        mps.join(machine.run, "0").leave()
