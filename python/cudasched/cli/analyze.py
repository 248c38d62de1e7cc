"""`cudasched analyze`: hardware counters of a program's kernels, beside the advice on their launches."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from cudasched._document import document, report_file
from cudasched._table import terminal_columns
from cudasched.cli.advise import _output_to_stderr
from cudasched.errors import ConfigError

__all__ = ["EXAMPLE", "command"]

_TIMINGS = ("cupti", "events")
EXAMPLE = "Example: cudasched analyze -o report.html -- python program.py"


def command(
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM [ARGS]...", help="The program, after `--`; runs twice.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the report: report.html or report.json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md) in place of tables.")] = False,
    kernels: Annotated[
        int, typer.Option(min=1, max=50, help="Count in so many kernels, those with the most time.")
    ] = 5,
    launches: Annotated[
        int, typer.Option(min=1, max=1000, help="In so many launches of each of their launch shapes.")
    ] = 3,
    ncu: Annotated[Path | None, typer.Option(help="Nsight Compute's program; searched for by default.")] = None,
    timing: Annotated[str, typer.Option(help="cupti, or events where another profiler has CUPTI: coarser.")] = "cupti",
    top: Annotated[int, typer.Option(min=0, help="Show the advice on so many kernels, 0: all.")] = 20,
) -> int:
    """Show the limits of a program's kernels by hardware counters, through Nsight Compute: sectors, caches, stalls."""
    if timing not in _TIMINGS:
        raise ConfigError(f"--timing {timing}: it is {' or '.join(_TIMINGS)}")
    target = report_file(output, "advise")

    from rich.console import Console

    from cudasched.observe.analyze import NcuError, analyze, html, terminal

    with _output_to_stderr() if json else contextlib.nullcontext():
        analysis = analyze(program, ncu=ncu, kernels=kernels, launches=launches, timing=timing)
    if target is not None:
        as_html = target.path.suffix.lower() == ".html"
        target.write(html(analysis) if as_html else analysis.model_dump_json(indent=2) + "\n")
    if json:
        print(document("analyze", analysis.model_dump(mode="json")))
    else:
        console = Console(width=terminal_columns())
        console.print(terminal(analysis, columns=console.width, top=top))
    if output is not None:
        print(f"cudasched: report written to {output}", file=sys.stderr)
    if analysis.problem:  # the advice above stands; but the user asked for counters
        raise NcuError(f"there are no counters: {analysis.problem}")
    return 0
