"""`cudasched run --check-coverage`: what part of the launches that the device ran did the hook see?"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cudasched._document import document
from cudasched._scratch import Scratch
from cudasched._table import PIPE_COLUMNS, Column, fitted
from cudasched._text import printable
from cudasched.cli.program import ProgramError, executable

__all__ = ["Report", "cupti_of", "find_cupti", "read_reports", "run_counted", "run_to_end", "verdict"]

_CUPTI = "libcupti.so.13"
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_KILLED = 128


@dataclass(frozen=True)
class Report:
    """One process's final report.

    Attributes:
        pid: Of the process.
        name: The name.
        hook_launches: Launches that the hook saw.
        device_launches: Launches that the device ran.
        coverage: Their quotient, 1 where neither saw any.
        error: Why the device's launches could not be counted; empty if they were.
    """

    pid: int
    name: str
    hook_launches: int
    device_launches: int
    coverage: float
    error: str = ""

    @property
    def complete(self) -> bool:
        """The launches were counted, and the hook saw them all."""
        return not self.error and self.hook_launches >= self.device_launches


def _python_homes(program: Path) -> Iterator[Path]:
    """Prefixes of the program's Python (the program itself, or its first line's), then of this one."""
    candidates = [program]
    try:
        with program.open("rb") as file:
            if file.read(2) == b"#!":
                words = file.readline(4096).split()
                candidates += [Path(os.fsdecode(word)) for word in words[:1]]
    except OSError:
        pass
    for candidate in candidates:
        if re.fullmatch(r"python[\d.]*", candidate.name):
            yield candidate.absolute().parent.parent  # a virtual environment, before its link is followed
            yield candidate.resolve().parent.parent
    yield Path(sys.prefix)


def find_cupti(program: Path) -> str | None:
    """The libcupti of CUDA 13 that belongs to a program's Python or to the CUDA toolkit; None if there is none."""
    for home in _python_homes(program):
        for found in sorted(home.glob(f"lib/python3*/*-packages/nvidia/cu13/lib/{_CUPTI}")):
            return str(found)
    target = "sbsa-linux" if platform.machine() == "aarch64" else "x86_64-linux"
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-13*"), reverse=True)]
    for toolkit in toolkits:
        for directory in ("extras/CUPTI/lib64", f"targets/{target}/lib", "lib64"):
            if (toolkit / directory / _CUPTI).is_file():
                return str(toolkit / directory / _CUPTI)
    return None


def cupti_of(environment: Mapping[str, str], program: Path) -> dict[str, str]:
    """``CUDASCHED_CUPTI`` as it is set, else `find_cupti`; empty if there is none."""
    found = environment.get("CUDASCHED_CUPTI") or find_cupti(program)
    return {"CUDASCHED_CUPTI": found} if found else {}


def read_reports(directory: Path) -> list[Report]:
    """The reports in a directory, by pid. One that its process has not finished writing counts as an error."""
    reports = []
    for path in sorted(directory.glob("coverage-*.json")):
        try:
            reports.append(Report(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            pid = re.sub(r"\D", "", path.stem)
            reports.append(Report(int(pid or 0), "?", 0, 0, 0.0, "its report is not whole"))
    return sorted(reports, key=lambda report: report.pid)


def verdict(code: int, reports: Collection[Report]) -> int:
    """The command's exit code: the program's own, or 1 if it succeeded and not every launch was seen, or none."""
    whole = all(report.complete for report in reports) and any(report.hook_launches for report in reports)
    return code if code != 0 or whole else 1


def _show(reports: Sequence[Report], as_json: bool) -> None:
    if as_json:
        rows = [{**asdict(report), "complete": report.complete} for report in reports]
        print(document("coverage", rows), file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else PIPE_COLUMNS
    console = Console(stderr=True, width=width)
    if not reports:
        console.print("cudasched: no process made a CUDA call that cudasched saw, so nothing is known of its coverage")
        return
    columns = [
        Column("pid", [str(report.pid) for report in reports], is_number=True),
        Column("name", [report.name for report in reports], may_shorten=True),
        Column("hook", [str(report.hook_launches) for report in reports], is_number=True),
        Column("device", ["?" if one.error else str(one.device_launches) for one in reports], is_number=True),
        Column(
            "coverage",
            ["not counted" if report.error else f"{100 * report.coverage:.2f} %" for report in reports],
            is_number=True,
        ),
    ]
    title = "coverage: launches that the hook saw / launches that the device ran"
    console.print(fitted(columns, width, title=title))
    for report in reports:
        if report.error:
            console.print(Text(printable(f"{report.pid} ({report.name}): not counted: {report.error}")))


def run_to_end(path: Path, program: Sequence[str], environment: dict[str, str], look: Callable[[], None]) -> int:
    """Runs the program to its end. Signals sent to us go on to the program, which gets the terminal's by itself.

    Args:
        path: The program.
        program: The name and arguments.
        environment: The program's.
        look: Called now and then.

    Returns:
        The exit code, or 128 + n after a kill by signal n.

    Raises:
        ProgramError: The program cannot be run.
    """
    watched = _FORWARDED | {signal.SIGCHLD}
    # Blocked, so that none is lost between the start and the wait; the child starts with our initial mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        process = subprocess.Popen(
            program,
            executable=executable(path),
            env=environment,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        while process.poll() is None:
            received = signal.sigtimedwait(watched, 0.5)
            look()
            if received is None or received.si_signo == signal.SIGCHLD:
                continue
            if received.si_code <= 0 and process.poll() is None:  # sent by a process, not by the kernel
                process.send_signal(received.si_signo)
        return process.returncode if process.returncode >= 0 else _KILLED - process.returncode
    except OSError as error:
        raise ProgramError(f"{path} cannot be run: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_counted(path: Path, program: Sequence[str], *, as_json: bool = False) -> int:
    """Runs a program as a child with its launches counted, and prints a table on standard error.

    Args:
        path: The program's file.
        program: The name and arguments. The environment is this process's, with the shim preloaded.
        as_json: JSON in place of the table.

    Returns:
        The program's exit code (128 + n where signal n killed it), or 1 if it succeeded and coverage is below 100% or
        unknown. Unknown: no launch was seen, a process did not reach its end, or one bypassed the hook.

    Raises:
        ProgramError: The program cannot be started.
    """
    with Scratch("coverage") as scratch:
        environment = {**os.environ, "CUDASCHED_COVERAGE_DIR": str(scratch), **cupti_of(os.environ, path)}
        code = run_to_end(path, program, environment, lambda: None)
        reports = read_reports(scratch)
    _show(reports, as_json)
    return verdict(code, reports)
