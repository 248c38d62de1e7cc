"""What several test modules share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]

PATIENCE_S = 120
"""Against hangs only: nothing takes that long."""

_OF_LONG_KERNELS = "cudasched: warning: a best-effort launch was held for 100 ms in which nothing"
"""What a program may say whose kernels never end, or whose machine, and so its simulated GPU, stood still."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a program to its end; see the fixtures `python` and `cudasched`."""


def eventually(holds: Callable[[], object]) -> None:
    """Waits until that is so. Of programs that are told what to do, `program.eventually` names it."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "it never is so"
        time.sleep(0.005)


def threads(pid: int) -> list[tuple[str, str]]:
    """Names and states of a process's threads, as /proc has them."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        found.append((name, rest[0]))
    return found


def stop(pid: int) -> None:
    """Stops a process, and returns when all of its threads have stopped: the signal alone stops none of them yet."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: {state for _, state in threads(pid)} == {"T"})


def but_for_long_kernels(text: str) -> str:
    """What a program has said, without the warning that a kernel runs for very long."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_OF_LONG_KERNELS))


_HOLDS = "import sys; from cudasched._scratch import Scratch; s = Scratch('test'); print(s.path, flush=True); input()"


@contextlib.contextmanager
def killed_and_living() -> Iterator[list[Path]]:
    """Temporary directories of two programs, of which the first is killed."""
    holders = [
        subprocess.Popen([sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        paths = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
        holders[0].kill()
        holders[0].wait(PATIENCE_S)
        yield paths
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate(timeout=PATIENCE_S)


def filled(kind: Callable[..., T], **given: Any) -> T:
    """A dataclass's object, with 0, "" or None for the fields that are not given and have no default."""
    nothing = {"int": 0, "float": 0.0, "bool": False, "str": ""}
    known = cast(Any, kind).__dataclass_fields__.values()
    without = [each for each in known if each.default is MISSING and each.default_factory is MISSING]
    return kind(**{each.name: nothing.get(each.type) for each in without} | given)


def succeeded(done: subprocess.CompletedProcess[str]) -> None:
    """Fails with all that a program said unless its exit status is 0."""
    assert done.returncode == 0, done.stdout + done.stderr
