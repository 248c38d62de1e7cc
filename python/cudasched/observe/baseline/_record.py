"""Runs a program several times, with launches recorded and counters read each time."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import shlex
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cudasched import hook
from cudasched._scratch import Scratch
from cudasched.errors import Error
from cudasched.observe import clients
from cudasched.observe.baseline._model import Baseline
from cudasched.observe.baseline._runs import from_recordings, merged, of_counters, same_setting

if TYPE_CHECKING:
    from cudasched.observe import Metrics

__all__ = ["new_session", "record"]

_LOOK_S = 0.02


class _Watch:
    """Keeps the processes' counters of their last moments; a context manager.

    Counters are in shared memory, and a process's place there is given back some milliseconds after it ended.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, Metrics]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cudasched-baseline", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        # The thread that runs the program waits for signals; none may be this one's.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._ended.wait(_LOOK_S):
            try:
                _, processes = clients()
            except (Error, OSError):
                continue
            for process in processes:
                if process.metrics is not None:
                    self._last[process.number, process.pid] = (process.pid, process.metrics)

    def of(self, pids: set[int]) -> list[Metrics]:
        """Of the processes with these numbers."""
        return [metrics for pid, metrics in self._last.values() if pid in pids]


def new_session() -> str:
    """A name that no other session has, which begins with the time."""
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ} {uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Recordings of one run directory take turns: two at once on a GPU would each be slower by the other."""
    directory = Path(hook.load_core().run_directory())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / "recording", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Error(f"{directory}: recordings cannot take turns there: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("cudasched: waits until another recording is over", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(lock)


def record(
    program: str | Sequence[str], runs: int, *, timing: str = "cupti", beside: Baseline | None = None
) -> Baseline:
    """Runs a program so many times, one after another; waits while another process of this run directory records.

    The programs' output goes where this process's output goes.

    Args:
        program: The name and arguments; a string is split as a shell does.
        runs: How often.
        timing: ``"cupti"`` or ``"events"``.
        beside: The baseline that the runs will be compared with, or added to.

    Raises:
        Error: A run fails, records nothing, or is recorded in part, or the first one cannot be compared with `beside`;
            nothing is kept then.
    """
    from cudasched.cli.collect import run_collected
    from cudasched.collect import read

    program = shlex.split(program) if isinstance(program, str) else program
    session = new_session()
    with _turn(), Scratch("baseline") as scratch:
        made: Baseline | None = None
        for number in range(1, runs + 1):
            path = scratch / f"run-{number}.parquet"
            with _Watch() as watch:
                code = run_collected(program, output=path, timing=timing, quiet=True)
            if code != 0:
                end = f"ended with exit code {code}" if path.exists() else "left no recording"
                raise Error(f"run {number} of {runs} of {program[0]} {end}; nothing of it is compared or saved")
            counted = of_counters(watch.of(set(read(path)["pid"].unique().to_pylist())))
            print(f"cudasched: run {number} of {runs} is recorded", file=sys.stderr, flush=True)
            run = from_recordings([path], session=session, counted=[counted])
            if made is None and beside is not None:  # before the others take their time
                same_setting(beside, run, "the baseline", "this run")
            made = run if made is None else merged(made, run, "the first run", f"run {number}")
        if made is None:
            raise Error(f"runs = {runs}: at least one is needed")
        return made
