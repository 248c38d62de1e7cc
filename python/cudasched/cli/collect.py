"""`cudasched collect`: runs a program, and records its launches into a data set."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cudasched import _preload, hook
from cudasched._output import Output, claimed, unwritten
from cudasched._scratch import Scratch
from cudasched._text import counted, one_line
from cudasched.cli._options import refuse
from cudasched.cli.coverage import cupti_of, run_to_end
from cudasched.cli.program import ProgramError, find_program, unreached
from cudasched.cli.run import configure
from cudasched.collect._cost import COLUMNS, slowed
from cudasched.collect._dataset import FORMATS, arrow, convert, journals_of
from cudasched.collect._journal import scan
from cudasched.errors import ConfigError, Error

__all__ = ["EXAMPLE", "command", "run_collected"]

EXAMPLE = (
    "Examples: cudasched collect -o data.parquet -- python train.py; "
    "cudasched collect -o data.parquet (finishes one that was killed)"
)
_TIMINGS = ("cupti", "events", "both")
_PROGRESS_S = 2.0


def command(
    context: typer.Context,
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROGRAM [ARGS]...]",
            help="The program, after `--`. Without it, a collection that was killed is finished.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The data set, a Parquet file; an earlier one is replaced.")
    ] = Path("data.parquet"),
    timing: Annotated[
        str,
        typer.Option(
            help="cupti: the device's own times. events: CUDA events around each launch, coarser, no CUPTI. both: the "
            "device's own, and beside them those of events."
        ),
    ] = "cupti",
    label: Annotated[str, typer.Option(help="A name for the launches; the column `label`.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Nothing on standard error but errors and warnings.")] = False,
) -> int:
    """Record every kernel and graph launch of an unmodified program: shape, parameters, occupancy, time."""
    if not program:
        refuse(context, ("timing", "label"), "the launches of a killed collection are recorded already")
    return run_collected(program or [], output=output, timing=timing, label=label, quiet=quiet, stays=True)


def _say(message: str) -> None:
    print(f"cudasched: {one_line(message)}", file=sys.stderr, flush=True)


class _Progress:
    """Rows so far and a second, on standard error: one line, written anew on a terminal, now and then elsewhere."""

    def __init__(self, directory: Path, quiet: bool) -> None:
        self._directory = directory
        self._live = sys.stderr.isatty()
        self._interval_s = _PROGRESS_S if self._live else 15 * _PROGRESS_S
        self._next = float("inf") if quiet else time.monotonic() + self._interval_s
        self._rows = 0
        self._at = time.monotonic()

    def show(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        rows = 0
        for path in self._directory.glob("*.journal"):
            try:
                rows += scan(path).rows
            except (OSError, Error):
                continue
        rate = (rows - self._rows) / max(now - self._at, 1e-3)
        line = f"cudasched: {rows:,} launches recorded, {rate:,.0f}/s"
        print(f"\r{line:<60}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)
        self._rows, self._at = rows, now
        self._next = now + self._interval_s

    def end(self) -> None:
        if self._live and self._rows:
            print(file=sys.stderr)


def _environment(path: Path, directory: Path, timing: str, label: str) -> dict[str, str]:
    return {
        **os.environ,
        "CUDASCHED_COLLECT_DIR": str(directory.absolute()),
        "CUDASCHED_COLLECT_TIMING": timing,
        "CUDASCHED_COLLECT_LABEL": label,
        **_preload.added(hook.locate(), os.environ),
        **cupti_of(os.environ, path),
    }


def _report(output: Path, metadata: dict[str, str], quiet: bool, stays: bool) -> int:
    """Reports the recording, unless `quiet` and nothing is wrong. Returns 1 if nothing was recorded, else 0."""

    def number(name: str) -> int:
        return int(metadata.get(f"cudasched.{name}", "0"))

    rows = int(metadata["rows"])
    if rows > 0:
        if not quiet:
            processes = counted(number("processes"), "process", "processes")
            launches = counted(rows, "launch", "launches")
            where = f"{output}: " if stays else "recorded "
            _say(f"{where}{launches} of {processes}, timed by {metadata['cudasched.timing']}")
    else:
        kept = f"; {output} was there before, and is kept as it was" if "kept" in metadata else ""
        _say(
            "error: no launch was recorded: no process made one under the hook, or collecting could not start (a line "
            f"above says why){kept}"
        )
    for name, what in (
        ("lost", "launches have no row, for want of memory or disk"),
        ("untimed", "launches have no time, because the device gave none"),
        ("mismatched", "launches have no time, because CUPTI's records did not fit them"),
        ("by_order", "launches were joined with their times by their order alone, because CUPTI gave no correlation"),
        ("cut_short", "of the processes did not come to their end; the launches written before are there"),
    ):
        if number(name):
            _say(f"warning: {number(name):,} {what}")
    return 0 if rows > 0 else 1


def run_collected(
    program: Sequence[str], *, output: Path, timing: str, quiet: bool, label: str = "", stays: bool = False
) -> int:
    """Runs a program with its launches recorded, or finishes a killed collection.

    Args:
        program: Its name and arguments; empty: there is one to finish.
        output: The Parquet file. While the program runs, its journals are in ``<output>.journals``. Where nothing was
            recorded, an earlier file stays.
        timing: "cupti", "events" or "both".
        label: Of every launch that has no label of its own.
        quiet: Only errors and warnings are said.
        stays: The output is no temporary file: of one that cannot be written, the journals stay.

    Returns:
        The program's exit code, 128 + n where signal n killed it; 1 where it succeeded and nothing was recorded.

    Raises:
        ConfigError: An option has no meaning, or the output cannot be written.
        HookError: There is no driver, or the installation is broken.
        ProgramError: The program cannot be run.
        Error: pyarrow is missing, another collection into the same file runs, or the data set cannot be written; the
            journals beside a file stay then.
    """
    if timing not in _TIMINGS:
        raise ConfigError(f"--timing is one of {', '.join(_TIMINGS)}; got {timing!r}")
    arrow()
    target = Output(output, option="-o", formats=FORMATS)
    if target.is_stream:
        with Scratch("collect") as scratch:
            directory = journals_of(scratch / "data.parquet")
            return _collect(program, directory, target, timing=timing, label=label, quiet=quiet, stays=False)
    return _collect(program, journals_of(output), target, timing=timing, label=label, quiet=quiet, stays=stays)


def _collect(
    program: Sequence[str], directory: Path, target: Output, *, timing: str, label: str, quiet: bool, stays: bool
) -> int:
    output = target.path
    if not program:
        if not directory.is_dir():
            raise ConfigError(f"name a program to run after `--`; there is nothing to finish in {directory}")
        with claimed(directory, output, "collect", new=False):
            return _finish(directory, target, 0, quiet, stays)
    path = find_program(program[0], os.environ.get("PATH", os.defpath))
    if (apart := unreached(path)) and not apart.passes_on:
        raise ProgramError(f"the launches of {program[0]} cannot be recorded: {apart.why}")
    configure()
    driver = hook.load_core().find_driver()
    environment = _environment(path, directory, timing, label)
    if hook.is_simulated(driver) and timing != "events" and "CUDASCHED_CUPTI" not in os.environ:
        raise ConfigError(
            "CUPTI knows nothing of the simulated driver: `--timing events` of `cudasched collect` needs none"
        )
    with claimed(directory, output, "collect", new=True):
        progress = _Progress(directory, quiet)
        try:
            code = run_to_end(path, program, environment, progress.show)
        except ProgramError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        progress.end()
        return _finish(directory, target, code, quiet, stays)


def _finish(directory: Path, target: Output, code: int, quiet: bool, stays: bool) -> int:
    try:
        metadata = convert(directory, target)
    except OSError as error:
        raise unwritten(target.path, error, directory, "collect", stays=stays) from error
    shutil.rmtree(directory, ignore_errors=True)
    nothing = _report(target.path, metadata, quiet, stays or target.is_stream)
    if stays and not quiet and not nothing:
        pa = arrow()
        with pa.parquet.ParquetFile(target.path) as file:
            parts = (pa.Table.from_batches([batch]) for batch in file.iter_batches(columns=list(COLUMNS)))
            if text := slowed(parts, metadata["cudasched.timing"]):
                _say(text)
    return code or nothing
