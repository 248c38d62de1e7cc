"""`cudasched advise`: record a program, or take a recording, and advise on its kernels; or forecast how two share."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudasched._document import document, report_file
from cudasched._scratch import Scratch
from cudasched._table import Column, fitted, terminal_columns
from cudasched._text import printable
from cudasched.cli._options import refuse
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from cudasched.advise.beside import Forecast, Interval, Memory

__all__ = ["EXAMPLE", "command", "memory_text", "within"]

EXAMPLE = (
    "Examples: cudasched advise -- python train.py; cudasched advise --data data.parquet -o report.html; "
    "cudasched advise --rate-hz 60 --beside serve.parquet train.parquet"
)
_TIMINGS = ("cupti", "events")
_OF_FORECASTS = ("rate_hz", "arrivals", "slo_ms", "alone_ms", "request_gap_ms", "recording_us")
_OF_ADVICE = ("output", "data", "timing", "top", "before")


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
        return run_collected(program, output=recording, timing=timing, quiet=False)


def within(interval: Interval, form: str = ".2f") -> str:
    """A value and its interval."""
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _show(found: Sequence[Forecast], ranked: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from cudasched.advise.beside import MODES

    console = Console(width=terminal_columns())

    def line(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style))

    if ranked:
        chosen = [one.modes[one.choice] for one in found]
        columns = [
            Column("beside", [one.program for one in found], may_shorten=True),
            Column("take", [MODES[one.choice].title for one in found], 3),
            Column("P99 / alone", [within(mode.p99_ratio) for mode in chosen], 5, is_number=True),
            Column("best effort", [within(mode.best_effort, ".0%") for mode in chosen], 5, is_number=True),
            Column("cost", [f"{one.cost:.2f}" for one in found], 4, is_number=True),
            Column("memory", [memory_text(one.memory) for one in found], 1),
        ]
        line(f"partners of {found[0].server}, {found[0].rate_hz:g}/s on {found[0].gpu}, the best first")
        console.print(fitted(columns, console.width))
    for one in () if ranked else found:
        line(
            f"{one.server}, {one.rate_hz:g}/s, beside {one.program} on {one.gpu}; alone P50 {one.alone_p50_ms:.2f} ms, "
            f"P99 {one.alone_p99_ms:.2f} ms"
        )
        rows = list(one.modes.values())
        columns = [
            Column("mode", [f"{MODES[name].title}{' *' * (name == one.choice)}" for name in one.modes]),
            Column("P50 / alone", [within(mode.p50_ratio) for mode in rows], 2, is_number=True),
            Column("P99 / alone", [within(mode.p99_ratio) for mode in rows], 4, is_number=True),
            Column("P99 ms", [within(mode.p99_ms) for mode in rows], 1, is_number=True),
            Column("best effort", [within(mode.best_effort, ".0%") for mode in rows], 3, is_number=True),
        ]
        console.print(fitted(columns, console.width))
        line(f"* take {MODES[one.choice].title}: {one.modes[one.choice].settings}", "bold")
        for reason in (*one.why, f"memory: {memory_text(one.memory)}"):
            line(f"- {reason}")
    for note in dict.fromkeys(note for one in found for note in one.notes):
        of = [one.program for one in found if note in one.notes and not note.startswith(f"{one.program}: ")]
        line(note if len(of) in (0, len(found)) else f"beside {', '.join(of)}: {note}", "dim")


def memory_text(memory: Memory) -> str:
    """Whether programs fit, and of how much."""
    if memory.fits is None:
        return "not known"
    held, gpu = sum(memory.programs) / 2**30, memory.gpu / 2**30
    return f"{'fits' if memory.fits else 'does not fit'}: {held:.1f} GiB of {gpu:.1f}"


def _foresee(
    server: Path,
    programs: Sequence[str],
    ranked: bool,
    json: bool,
    request_gap_ms: float | None,
    recording_us: float | None,
    **options: Any,
) -> int:
    """Forecasts of a server beside programs, each of a recording."""
    from dataclasses import asdict

    from cudasched.advise import beside

    option = "--rank" if ranked else "--beside"
    # A shell's pattern of all recordings has the server's, too.
    others = [Path(path) for path in programs if not (ranked and Path(path).resolve() == server.resolve())]
    for word in programs:
        if word.startswith("-"):
            raise ConfigError(f"{word}: options come before the recordings")
    if not others:
        raise ConfigError(f"{option} {server}: name the recording of a best-effort program behind it")
    if not ranked and len(others) > 1:
        raise ConfigError(f"--beside {server}: it takes one program's recording; --rank compares several")
    asked = beside.read(server, request_gap_ms=request_gap_ms, recording_us=recording_us)
    found = beside.rank(asked, [beside.read(path, recording_us=recording_us) for path in others], **options)
    if json:
        print(document("forecast", [asdict(one) for one in found]))
    else:
        _show(found, ranked)
    return 0


def command(
    context: typer.Context,
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM [ARGS]...",
            help="The program to record, after `--`; with --beside or --rank, recordings of best-effort programs.",
        ),
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
    beside: Annotated[
        Path | None, typer.Option(help="A server's recording: forecast it beside a program's, in each mode. No GPU.")
    ] = None,
    rank: Annotated[
        Path | None, typer.Option(help="A server's recording: rank the programs of other recordings as its partners.")
    ] = None,
    rate_hz: Annotated[float | None, typer.Option(help="Requests a second; default: as recorded.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, periodic or bursts.")] = "poisson",
    slo_ms: Annotated[float | None, typer.Option(help="Target for the server's P99, ms from the arrival.")] = None,
    alone_ms: Annotated[
        float | None, typer.Option(help="P50 of its requests alone, ms: what exceeds the GPU's time is the host's.")
    ] = None,
    request_gap_ms: Annotated[
        float | None, typer.Option(help="A request ends where the GPU had nothing for so long, ms; default: as found.")
    ] = None,
    recording_us: Annotated[
        float | None, typer.Option(help="The cost of recording for each launch, us; default: by its timing.")
    ] = None,
) -> int:
    """Advise on a program's kernels, with possible gains; or forecast what a server and a program cost one another."""
    server = beside or rank
    if server is not None:
        why = "--beside and --rank take recordings of a server and programs, and no other option's input"
        refuse(context, _OF_ADVICE, why)
        if beside and rank:
            raise ConfigError(why)
        return _foresee(
            server,
            program or [],
            rank is not None,
            json,
            request_gap_ms,
            recording_us,
            rate_hz=rate_hz,
            arrivals=arrivals,
            slo_ms=slo_ms,
            alone_ms=alone_ms,
        )
    refuse(context, _OF_FORECASTS, "it is for forecasts, of --beside or --rank")
    if bool(program) == bool(data):
        raise ConfigError("name a program after `--`, or a recording with --data; one of the two")
    if program and program[0].endswith(".parquet"):
        raise ConfigError(f"{program[0]} is a recording: --data {program[0]} for advice, --beside SERVER for forecasts")
    if data:
        refuse(context, ("timing",), "the recording's launches are timed already")
    if timing not in _TIMINGS:
        raise ConfigError(f"--timing {timing}: it is {' or '.join(_TIMINGS)}")
    target = report_file(output, "advise")

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
            if not recording.exists():  # nothing was recorded, as the line above says
                return code
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
