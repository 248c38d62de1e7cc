"""`cudasched advise`: record a program, or take a recording, and advise on its kernels."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cudasched._document import document
from cudasched._output import Output
from cudasched._scratch import Scratch
from cudasched._table import terminal_columns
from cudasched.errors import ConfigError

__all__ = ["EXAMPLE", "command"]

_FORMATS = (".html", ".json")
EXAMPLE = "Examples: cudasched advise -- python train.py; cudasched advise --data data.parquet -o report.html"
_TIMINGS = ("cupti", "events")


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Output of programs that are started meanwhile goes to standard error: standard output is the report's."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _record(program: Sequence[str], recording: Path, *, timing: str, quiet: bool) -> int:
    """Runs a program with recorded launches.

    Args:
        program: The name and arguments.
        recording: Where the data set goes.
        timing: "cupti" or "events".
        quiet: Standard output is wanted for the report alone.

    Returns:
        The program's exit code, 128 + n where signal n killed it.

    Raises:
        Error: As `cudasched.cli.collect.run_collected`.
    """
    from cudasched.cli.collect import run_collected

    with _output_to_stderr() if quiet else contextlib.nullcontext():
        return run_collected(program, output=recording, timing=timing, label="", quiet=False)


def _checked(output: Path | None) -> Output | None:
    """Before the program runs, which may take long."""
    if output is None:
        return None
    target = Output(output, option="-o")
    if not target.is_stream and output.suffix.lower() not in _FORMATS:
        raise ConfigError(f"-o {output}: a report is a file that ends in {' or '.join(_FORMATS)}")
    return target


def command(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM [ARGS]...", help="The program to record, after `--`.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the report: report.html or report.json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md) in place of a table.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="A recording of `cudasched collect`, in place of a program.")
    ] = None,
    timing: Annotated[str, typer.Option(help="cupti, or events where another profiler has CUPTI: coarser.")] = "cupti",
    top: Annotated[int, typer.Option(min=0, help="Show so many kernels, 0: all.")] = 20,
    before: Annotated[
        Path | None, typer.Option(help="A report.json of an earlier run: also show which kernels' times changed.")
    ] = None,
) -> int:
    """Advise on a program's kernels, with possible gains: occupancy, grids, blocks, spills, launches."""
    if bool(program) == bool(data):
        raise ConfigError("name a program after `--`, or a recording with --data; one of the two")
    if timing not in _TIMINGS:
        raise ConfigError(f"--timing {timing}: it is {' or '.join(_TIMINGS)}")
    target = _checked(output)

    from rich.console import Console

    from cudasched.advise import Report, advise, diff, html
    from cudasched.advise.view import changes, terminal

    earlier = None
    if before is not None:
        try:
            earlier = Report.model_validate_json(before.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--before {before} is no report of this version: {reason}") from None

    code = 0
    if data is not None:
        report = advise(data)
    else:
        with Scratch("advise") as directory:
            recording = directory / "data.parquet"
            code = _record(program or [], recording, timing=timing, quiet=json)
            report = advise(recording)
    if target is not None:
        as_html = target.path.suffix.lower() == ".html"
        target.write(html(report) if as_html else report.model_dump_json(indent=2) + "\n")
    if json:
        print(document("advise", report.model_dump(mode="json")))
    else:
        console = Console(width=terminal_columns())
        console.print(terminal(report, columns=console.width, top=top))
        if earlier is not None:
            console.print("\nsince the earlier report, the greatest change first:", style="bold")
            console.print(changes(diff(earlier, report), top=top))
    if output is not None:
        print(f"cudasched: report written to {output}", file=sys.stderr)
    return code
