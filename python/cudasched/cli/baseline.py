"""`cudasched baseline`: save how long a program's kernels, regions and waits take, and check which got slower since."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudasched._document import document, report_file
from cudasched._output import Output
from cudasched._table import terminal_columns
from cudasched._text import counted
from cudasched.cli._options import refuse
from cudasched.cli.advise import _output_to_stderr
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from cudasched.observe.baseline import Baseline

__all__ = ["SLOWER", "app"]

SLOWER = 3
"""The exit code of a check that found something slower."""

_TIMINGS = ("cupti", "events")
_RUNS = 6
_MOST_RUNS = 1000

app = typer.Typer(
    name="baseline",
    help="Find the kernels, regions and waits of a program that got slower, beyond the noise from run to run.",
    no_args_is_help=True,
)

_Program = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROGRAM [ARGS]...", help="The program to record, after `--`."),
]
_Data = Annotated[
    list[Path] | None,
    typer.Option(help="A recording of `cudasched collect`, one run, in place of a program; give several."),
]
_Timing = Annotated[
    str | None,
    typer.Option(
        help="cupti, or events where another profiler has CUPTI: coarser.",
        show_default="the baseline's where there is one, else cupti",
    ),
]
_Runs = Annotated[
    int, typer.Option(min=1, max=_MOST_RUNS, help="How often to run the program: each run is one observation.")
]


def _measured(
    program: list[str] | None,
    data: list[Path] | None,
    *,
    runs: int,
    timing: str | None,
    quiet: bool,
    earlier: Baseline | None,
) -> Baseline:
    from cudasched.observe import baseline

    if data:
        return baseline.from_recordings(data, session=baseline.new_session())
    with _output_to_stderr() if quiet else contextlib.nullcontext():
        timing = timing or (earlier.timing if earlier else "") or _TIMINGS[0]
        return baseline.record(program or [], runs, timing=timing, beside=earlier)


def _check_options(
    context: typer.Context, program: list[str] | None, data: list[Path] | None, timing: str | None
) -> None:
    if bool(program) == bool(data):
        raise ConfigError("name a program after `--`, or recordings with --data; one of the two")
    if timing is not None and timing not in _TIMINGS:
        raise ConfigError(f"--timing {timing}: it is {' or '.join(_TIMINGS)}")
    if data:
        refuse(
            context,
            ("runs", "timing"),
            "it is for a program's runs, and each recording of --data is one, timed already",
        )
    doubled = [path for place, path in enumerate(data or []) if path in (data or [])[:place]]
    if doubled:
        raise ConfigError(f"--data {doubled[0]} is given twice: each recording is one run")


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Other commands that save into the output's directory wait until the block's end."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a directory that may not be read, or a file system without locks
            directory = os.open(Path(os.path.realpath(output)).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory)
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield


@app.command(
    "save",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: cudasched baseline save -o baseline.json -- python train.py",
)
def save(
    context: typer.Context,
    program: _Program = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The baseline, a JSON file.")] = Path("baseline.json"),
    add: Annotated[bool, typer.Option("--add", help="Add the runs to those of the file, if it is there.")] = False,
    runs: _Runs = _RUNS,
    data: _Data = None,
    timing: _Timing = None,
) -> int:
    """Run a program several times, and keep how long its kernels, regions and waits took."""
    _check_options(context, program, data, timing)
    from cudasched.observe import baseline

    target = Output(output, option="-o")
    earlier = baseline.load(output) if add and output.exists() else None
    made = _measured(program, data, runs=runs, timing=timing, quiet=False, earlier=earlier)
    with _alone(output):
        if add and output.exists():  # another command may have added runs since, or made it
            made = baseline.merged(baseline.load(output), made, str(output), "the new recording")
        target.write(made.model_dump_json(indent=1) + "\n")
    sessions = len({run.session for run in made.runs})
    recorded = f"{counted(len(made.runs), 'run', 'runs')} of {counted(sessions, 'session', 'sessions')}"
    print(f"cudasched: {output}: {recorded} on {made.gpu}", file=sys.stderr)
    return 0


@app.command(
    "check",
    epilog="Example: cudasched baseline check baseline.json -o report.html -- python train.py",
)
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="BASELINE", help="A file of `cudasched baseline save`.")],
    program: _Program = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the report: report.html or report.json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md) in place of a table.")] = False,
    runs: _Runs = _RUNS,
    data: _Data = None,
    timing: _Timing = None,
    least_change: Annotated[
        float, typer.Option("--least", min=0, max=1000, metavar="PERCENT", help="A smaller change is no regression, %.")
    ] = 3.0,
    false_alarms: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=20,
            metavar="PERCENT",
            help="In how many checks of an unchanged program something is found, %.",
        ),
    ] = 1.0,
    top: Annotated[int, typer.Option(min=0, help="Show so many rows, 0: all.")] = 20,
) -> int:
    """Run a program several times, and list all that got slower than the baseline; exit with 3 if something did."""
    _check_options(context, program, data, timing)
    target = report_file(output, "baseline")
    if target is not None:
        target.refuse(file, "a report would replace the baseline")

    from rich.console import Console

    from cudasched.observe import baseline
    from cudasched.observe.baseline._compare import refuse_too_few, scipy_stats

    # Before the program runs, which may take long.
    scipy_stats()
    before = baseline.load(file)
    refuse_too_few(len(before.runs), len(data) if data else runs, false_alarms / 100)
    now = _measured(program, data, runs=runs, timing=timing, quiet=json, earlier=before)
    found = baseline.check(before, now, alpha=false_alarms / 100, least_change=least_change / 100)
    if target is not None:
        as_html = target.path.suffix.lower() == ".html"
        target.write(baseline.html(found) if as_html else found.model_dump_json(indent=2) + "\n")
    if json:
        print(document("baseline", found.model_dump(mode="json")))
    else:
        console = Console(width=terminal_columns())
        console.print(baseline.terminal(found, columns=console.width, top=top))
    if output is not None:
        print(f"cudasched: report written to {output}", file=sys.stderr)
    return SLOWER if found.slower else 0
