"""CUDA's multi-process service (MPS): a private daemon for as long as it is wanted, and a client's priority by class.

At its first CUDA call, a program becomes a client of the daemon that listens in ``CUDA_MPS_PIPE_DIRECTORY``
(``/tmp/nvidia-mps`` by default), without further steps. Where none listens, `join` starts a control daemon of the
user's own, without root, and shares the daemon with all who join. The last to leave, or to be killed, ends the daemon.

The daemon's directory (mode 0700) has its ``pipe`` and ``log``, and two files that are only locked. The process that
keeps the daemon (`cudasched.mps.keeper`) locks ``keeper``, and every user of the daemon locks ``clients``. A lock goes
with the process that holds it, so no killed process leaves a claim behind. docs/coexistence.md describes sharing by MPS
and its gains.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cudasched._preload import removed
from cudasched.errors import Error
from cudasched.mps import keeper

__all__ = ["Membership", "MpsError", "join", "priority", "running_daemon"]

_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"
_PRIORITIES = {"latency": "0", "normal": "0", "best_effort": "1"}  # all that MPS has: normal, and below normal
_JOIN_S = 60.0
_LOOK_S = 0.05
_LEAST_PASSED_ON = 100  # a descriptor: scripts use those from 3 to 9 as they like
_LONGEST_SOCKET_PATH = 106  # one byte less than a socket has room for: with 107 the daemon ends at once
_ENTRIES = ("control", "control_privileged", "control_lock")


class MpsError(Error):
    """There can be no private MPS daemon; the message has the reason and the remedy."""


def priority(environment: Mapping[str, str], client_class: str | None) -> dict[str, str]:
    """The variable that tells MPS a program's class; MPS reads it at the program's first CUDA call.

    Args:
        environment: The program's environment. A priority in there that does not come from ``CUDASCHED_CLASS`` is the
            user's own, and stays.
        client_class: ``latency``, ``normal`` or ``best_effort``; None if none was chosen: nothing is set then.
    """
    if client_class is None:
        return {}
    given = environment.get(_PRIORITY_VARIABLE)
    by_class = _PRIORITIES.get(environment.get("CUDASCHED_CLASS", "").replace("-", "_"))
    if given is not None and given != by_class:
        return {}
    return {_PRIORITY_VARIABLE: _PRIORITIES[client_class]}


def running_daemon(environment: Mapping[str, str]) -> Path | None:
    """The pipe directory that programs with this environment would use, if a control daemon listens there."""
    pipe = Path(environment.get(_PIPE_VARIABLE) or "/tmp/nvidia-mps")
    if not pipe.is_dir():
        return None
    if keeper.answers(pipe):
        return pipe
    # Another user's daemon serves clients, but does not answer us.
    try:
        pid = int((pipe / f"{keeper.TOOL}.pid").read_text())
        name = Path(f"/proc/{pid}/comm").read_text()
    except (OSError, ValueError):
        return None
    return pipe if keeper.TOOL.startswith(name.strip()) else None


@dataclass
class Membership:
    """A claim on a daemon, which ends with `leave`, with this process, or with the last process that inherited it.

    Attributes:
        directory: Of the daemon; ``log`` in there has the logs of the daemon and its servers.
    """

    directory: Path
    _claim: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make a program a client of the daemon."""
        return {
            _PIPE_VARIABLE: str(self.directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.directory / "log"),
        }

    def server_runs(self) -> bool:
        """Whether clients go through a server; where MPS does not work, they run without one."""
        return bool(keeper.numbers(keeper.ask(self.directory / "pipe", "get_server_list")))

    def pass_on(self) -> None:
        """Programs that this process becomes or starts from here on inherit the claim."""
        with contextlib.suppress(OSError):  # the process may not have so many
            claim = fcntl.fcntl(self._claim, fcntl.F_DUPFD_CLOEXEC, _LEAST_PASSED_ON)
            os.close(self._claim)
            self._claim = claim
        os.set_inheritable(self._claim, True)

    def leave(self) -> None:
        """Gives the claim up. The daemon ends if it was the last."""
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1


def join(run_directory: Path, visible_devices: str | None = None) -> Membership:
    """Claims this user's private control daemon, and starts it if there is none.

    Args:
        run_directory: The parent of the daemon's directory; programs with the same one share the daemon. Made with mode
            0700 if missing.
        visible_devices: The program's ``CUDA_VISIBLE_DEVICES``. One daemon serves all GPUs, but only one MIG instance:
            a program that names one gets the daemon of that instance.

    Raises:
        MpsError: MPS is not installed, no GPU can serve it, the directory is not ours alone, or the daemon did not
            start.
    """
    first = (visible_devices or "").split(",")[0].strip()
    instance = first if first.startswith("MIG-") else ""
    # An instance is named by its UUID, or as MIG-GPU-UUID/1/0.
    directory = run_directory / (f"mps-{instance.replace('/', '-')}" if instance else "mps")
    _make_private(run_directory)
    _make_private(directory)
    longest = max(len(os.fsencode(directory / "pipe" / entry)) for entry in _ENTRIES)
    if longest > _LONGEST_SOCKET_PATH:
        raise MpsError(
            f"{directory} is too long a path for the sockets of MPS: set CUDASCHED_RUN_DIR to one that is "
            f"{longest - _LONGEST_SOCKET_PATH} bytes shorter"
        )
    if shutil.which(keeper.TOOL) is None:
        raise MpsError(f"no {keeper.TOOL} on PATH: MPS needs NVIDIA's driver utilities (package nvidia-compute-utils)")

    give_up = time.monotonic() + _JOIN_S
    membership = Membership(directory, _claim(directory, give_up))
    try:
        # With the claim held no keeper ends its daemon, so a daemon that answers now goes on.
        while not (_start_keeper(directory, visible_devices or "", instance) or keeper.answers(directory / "pipe")):
            _wait(directory, give_up)
    except BaseException:
        membership.leave()
        raise
    return membership


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise MpsError(f"{directory} cannot be made: {error.strerror}; set CUDASCHED_RUN_DIR") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise MpsError(
            f"{directory} must be a directory of this user that nobody else can write to (it has owner "
            f"{status.st_uid}, mode {stat.S_IMODE(status.st_mode):03o}): remove it, or set CUDASCHED_RUN_DIR"
        )


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(directory: Path, give_up: float) -> None:
    if time.monotonic() > give_up:
        raise MpsError(
            f"the MPS daemon in {directory} neither answers nor ends after {_JOIN_S:.0f} s; end it (`echo quit | "
            f"{_PIPE_VARIABLE}={directory}/pipe {keeper.TOOL}`), or set CUDASCHED_RUN_DIR"
        )
    time.sleep(_LOOK_S)


def _claim(directory: Path, give_up: float) -> int:
    """Claims the daemon that there is or will be; waits while a keeper is about to end one."""
    claim = _open(directory / "clients")
    try:
        while not _locked(claim, fcntl.LOCK_SH):
            _wait(directory, give_up)
    except BaseException:
        os.close(claim)
        raise
    return claim


def _start_keeper(directory: Path, visible_devices: str, instance: str) -> bool:
    """Starts a keeper and its daemon, unless there is one or another process is about to; then returns False."""
    lock = _open(directory / "keeper")
    try:
        if not _locked(lock, fcntl.LOCK_EX):
            return False
        if not instance:
            _check_gpus(visible_devices)
        # The keeper inherits the lock, and holds it for life.
        command = [sys.executable, "-IS", keeper.__file__, str(directory), str(lock), instance]
        process = subprocess.Popen(
            command,
            env=removed(keeper.environment(directory / "pipe")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock],
        )
        assert process.stdout is not None
        with process.stdout as output:
            said = output.readline().decode(errors="replace").strip()
        process.wait()
    finally:
        os.close(lock)
    if said != "ready":
        raise MpsError(said or f"the keeper of the MPS daemon in {directory} was ended before the daemon answered")
    return True


@dataclass(frozen=True)
class _Gpu:
    index: str
    name: str
    uuid: str
    compute_mode: str
    mig_mode: str


def _query(what: str) -> list[list[str]]:
    """Rows that nvidia-smi prints; none if it is missing or fails, as the daemon's own log will say more."""
    command = ["nvidia-smi", what, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def _check_gpus(visible_devices: str) -> None:
    """Refuses if none of the GPUs that the program sees can serve MPS clients. Raises MpsError."""
    rows = _query("--query-gpu=index,name,uuid,compute_mode,mig.mode.current")
    gpus = [_Gpu(*row) for row in rows if len(row) == 5]
    named = [name.strip() for name in visible_devices.split(",") if name.strip()]
    # CUDA numbers the fastest first, nvidia-smi by bus: where these may differ, a number may mean any GPU.
    in_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    if named and (in_order or not any(name.isdecimal() for name in named)):
        gpus = [gpu for gpu in gpus if any(name == gpu.index or gpu.uuid.startswith(name) for name in named)]
    reasons = [_why_unfit(gpu) for gpu in gpus]
    if reasons and all(reasons):
        raise MpsError(str(reasons[0]))


def _why_unfit(gpu: _Gpu) -> str:
    """Why MPS cannot serve a GPU; empty if it can."""
    if gpu.mig_mode == "Enabled":
        return (
            f"GPU {gpu.index} is in MIG mode, and MPS serves one instance: set CUDA_VISIBLE_DEVICES to one "
            "(nvidia-smi -L lists them)"
        )
    if gpu.compute_mode == "Prohibited":
        return (
            f"GPU {gpu.index} is in compute mode Prohibited, so no program can use it: have it set to Default "
            f"(nvidia-smi -i {gpu.index} -c DEFAULT, as root)"
        )
    if gpu.compute_mode.startswith("Exclusive"):
        for row in _query("--query-compute-apps=gpu_uuid,pid,process_name"):
            if len(row) == 3 and row[0] == gpu.uuid and not row[2].endswith("nvidia-cuda-mps-server"):
                return (
                    f"GPU {gpu.index} is in compute mode {gpu.compute_mode}, and process {row[1]} ({row[2]}) has it "
                    "without MPS: end that one, or start it with --mps too"
                )
    return ""
