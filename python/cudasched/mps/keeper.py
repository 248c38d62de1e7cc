"""The process that keeps a private MPS control daemon, and requests to a daemon.

`cudasched.mps.join` starts the keeper as a program of its own (``python keeper.py DIRECTORY LOCK_FD DEVICES``), so that
the keeper outlives the first program. The keeper needs the standard library alone, and belongs to no terminal and no
parent. It writes one line to standard output, ``ready`` or the reason why not. It goes on until no process holds
``DIRECTORY/clients`` any more, or the daemon ends by itself.

A killed keeper takes the daemon along (the kernel signals the daemon). The next keeper ends the remaining servers,
which it knows by their directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TOOL = "nvidia-cuda-mps-control"
_NAME = b"nvidia-cuda-mps"  # of the daemon and its servers, as the kernel cuts names
_START_S = 15.0
_ANSWER_S = 5.0
_QUIT_S = 10
_LOOK_S = 0.25
_BUSY_S = 1.0
_PR_SET_PDEATHSIG = 1


def environment(pipe: Path, log: Path | None = None, devices: str = "") -> dict[str, str]:
    """A daemon's environment: other CUDA variables are meant for the user's program, and preloads are too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "CUDASCHED_", "LD_PRE"))}
    kept["CUDA_MPS_PIPE_DIRECTORY"] = str(pipe)
    if log is not None:
        kept["CUDA_MPS_LOG_DIRECTORY"] = str(log)
    if devices:
        kept["CUDA_VISIBLE_DEVICES"] = devices
    return kept


def ask(pipe: Path, command: str, timeout_s: float = _ANSWER_S) -> str | None:
    """The answer of the control daemon of the directory `pipe`; None if none answers."""
    try:
        done = subprocess.run(
            [TOOL],
            env=environment(pipe),
            input=command + "\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def answers(pipe: Path) -> bool:
    """Whether a control daemon listens behind `pipe`, and to this user."""
    share = ask(pipe, "get_default_active_thread_percentage")
    try:
        return share is not None and float(share) > 0
    except ValueError:
        return False


def numbers(answer: str | None) -> list[int]:
    """The process ids of an answer, one a line."""
    return [int(line) for line in (answer or "").split() if line.isdigit()]


def has_clients(pipe: Path) -> bool:
    """Whether a server of the daemon has a client whose process lives: such a daemon must not be stopped."""
    servers = numbers(ask(pipe, "get_server_list"))
    clients = [client for server in servers for client in numbers(ask(pipe, f"get_client_list {server}"))]
    return any(_lives(client) for client in clients)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def processes(pipe: Path) -> list[int]:
    """Daemons and servers of MPS that were started for the directory `pipe`, by process id."""
    variable = f"CUDA_MPS_PIPE_DIRECTORY={pipe}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_mps = process.name.isdigit() and (process / "comm").read_bytes().startswith(_NAME)
            if is_mps and variable in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # the process has ended, or is another user's
            continue
    return found


def _end(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _last_line(log: Path) -> str:
    for name in ("output.log", "control.log", "server.log"):
        try:
            lines = (log / name).read_text(errors="replace").split("\n")
        except OSError:
            continue
        for line in reversed(lines):
            if line.strip():
                return line.strip()
    return "it wrote no log"


def _die_with_keeper() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _start(pipe: Path, log: Path, devices: str) -> subprocess.Popen[bytes]:
    """Starts the daemon and waits until it answers.

    Raises:
        RuntimeError: The daemon did not start; nothing is left.
    """
    _end(processes(pipe))
    for directory in (pipe, log):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
    with (log / "output.log").open("wb") as output:
        daemon = subprocess.Popen(
            [TOOL, "-f"],
            env=environment(pipe, log, devices),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            preexec_fn=_die_with_keeper,  # harmless: this process has one thread
        )
    give_up = time.monotonic() + _START_S
    while not answers(pipe):
        if daemon.poll() is not None or time.monotonic() > give_up:
            ended = f"ended with {daemon.returncode}" if daemon.poll() is not None else "does not answer"
            _end(processes(pipe))
            daemon.wait()
            raise RuntimeError(f"{TOOL} {ended}: {_last_line(log)} (its logs are in {log})")
        time.sleep(0.02)
    return daemon


def _stop(daemon: subprocess.Popen[bytes], pipe: Path) -> None:
    ask(pipe, f"quit -t {_QUIT_S}", _QUIT_S + _ANSWER_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(_ANSWER_S)
    _end(processes(pipe))
    daemon.wait()
    shutil.rmtree(pipe, ignore_errors=True)


def _keep(daemon: subprocess.Popen[bytes], pipe: Path, clients: int) -> None:
    """Returns when the daemon has ended, by itself or as no client is left; in the latter case `clients` is held."""
    while daemon.poll() is None:
        try:
            fcntl.flock(clients, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
            continue
        # A program that closes others' descriptors has given up its claim, but is a client all the same.
        if not has_clients(pipe):
            return _stop(daemon, pipe)
        fcntl.flock(clients, fcntl.LOCK_UN)
        time.sleep(_BUSY_S)
    return None


def main(arguments: list[str]) -> int:
    """Keeps the daemon of a directory; see the module's text."""
    if os.fork() > 0:
        return 0  # the program that started us shall not find a child that it does not know
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    directory, lock, devices = Path(arguments[0]), int(arguments[1]), arguments[2]
    pipe, log = directory / "pipe", directory / "log"
    clients = os.open(directory / "clients", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        daemon = _start(pipe, log, devices)
    except (RuntimeError, OSError) as error:
        print(error, flush=True)
        return 1
    print("ready", flush=True)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, sys.stdout.fileno())
    _keep(daemon, pipe, clients)
    # In this order: who gets `clients` next must find the keeper's place free.
    os.close(lock)
    os.close(clients)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
