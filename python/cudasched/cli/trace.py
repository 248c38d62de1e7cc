"""`cudasched trace`: runs a program, and makes a timeline of its use of the GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudasched import _preload, hook
from cudasched._output import Output, claimed
from cudasched._scratch import Scratch
from cudasched._text import counted, one_line
from cudasched.cli._options import refuse
from cudasched.cli.coverage import cupti_of, run_to_end
from cudasched.cli.program import ProgramError, find_program, unreached
from cudasched.cli.run import configure
from cudasched.errors import ConfigError

if TYPE_CHECKING:
    from cudasched.observe.trace._timeline import Summary

__all__ = ["EXAMPLE", "command", "run_traced"]

EXAMPLE = (
    "Examples: cudasched trace -o out.pftrace -- python train.py; cudasched trace -o out.pftrace --flame flame.html "
    "--device-times -- python train.py; cudasched trace -o out.pftrace (finishes one that was killed)"
)


def command(
    context: typer.Context,
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROGRAM [ARGS]...]",
            help="The program, after `--`. Without it, a trace that was killed is finished.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace; an earlier file is replaced.")] = Path(
        "out.pftrace"
    ),
    format: Annotated[
        str | None,
        typer.Option(
            metavar="perfetto|json",
            help="perfetto: for ui.perfetto.dev; json: for chrome://tracing. By the file's name if not given.",
        ),
    ] = None,
    device_times: Annotated[
        bool,
        typer.Option(
            "--device-times",
            help="Have CUPTI time each launch on the device: about 2 us a launch more, and nothing is deferred.",
        ),
    ] = False,
    flame: Annotated[
        Path | None, typer.Option(help="An HTML file with the GPU time by region, library and kernel.")
    ] = None,
    limit_mb: Annotated[
        int, typer.Option(metavar="MB", help="Most space for the records of each process, MiB; the oldest go.")
    ] = 256,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing of a trace that is whole.")] = False,
) -> int:
    """Trace an unmodified program: launches, gate waits and why, regions, graph slices, memory, by stream."""
    if not program:
        refuse(context, ("device_times", "limit_mb"), "the launches of a killed trace are recorded already")
    return run_traced(
        program or [],
        output=output,
        form=format,
        device_times=device_times,
        flame=flame,
        limit_mb=limit_mb,
        quiet=quiet,
    )


def _say(message: str) -> None:
    print(f"cudasched: {one_line(message)}", file=sys.stderr, flush=True)


def _environment(path: Path, directory: Path, limit_mb: int, device_times: bool) -> dict[str, str]:
    environment = {
        **os.environ,
        "CUDASCHED_TRACE_DIR": str(directory.absolute()),
        "CUDASCHED_TRACE_LIMIT_MB": str(limit_mb),
        **_preload.added(hook.locate(), os.environ),
    }
    if device_times:
        environment["CUDASCHED_COLLECT_DIR"] = str(directory.absolute())
        environment["CUDASCHED_COLLECT_TIMING"] = "cupti"
        environment |= cupti_of(environment, path)
    return environment


def _report(output: Path, summary: Summary, quiet: bool) -> int:
    """Reports the trace. Returns 1 if nothing was traced, else 0."""
    if summary.processes == 0:
        _say(
            "error: nothing was traced: no process made a CUDA call under the hook, or tracing could not start (a line "
            "above says why)"
        )
        return 1
    if not quiet:
        held = f", {summary.waits:,} waits at the gate ({summary.wait_ns / 1e6:,.1f} ms)" if summary.waits else ""
        timed = f", {summary.device_times:,} with device times" if summary.device_times else ""
        launches = counted(summary.launches, "launch", "launches")
        _say(f"{output}: {launches} of {counted(summary.processes, 'process', 'processes')}{timed}{held}")
    for count, what in (
        (summary.dropped, "records were dropped, for want of room in memory"),
        (summary.rotated_away, "records, the oldest, were deleted to keep --limit-mb"),
        (summary.cut_short, "of the processes did not come to their end; the launches written before are there"),
        (
            summary.without_time,
            "launches have no time in the flame graph: only best-effort ones are predicted; --device-times times all",
        ),
        (summary.damaged, "files end in something that was not written whole; it was left out"),
    ):
        if count:
            _say(f"warning: {count:,} {what}")
    return 0


def run_traced(
    program: Sequence[str],
    *,
    output: Path,
    form: str | None,
    device_times: bool,
    flame: Path | None,
    limit_mb: int,
    quiet: bool,
) -> int:
    """Runs a program, with all its processes traced, or finishes a killed trace.

    Args:
        program: Its name and arguments; empty: there is one to finish.
        output: The trace. While the program runs, its parts are in ``<output>.parts``. Where nothing was traced, an
            earlier file stays.
        form: "perfetto" or "json"; None: by the name.
        device_times: By CUPTI, for each launch.
        flame: An HTML file; None: none.
        limit_mb: Most space for the records of each process.
        quiet: Nothing is said of a trace that is whole.

    Returns:
        The program's exit code, 128 + n where signal n killed it; 1 where it succeeded and nothing was traced.

    Raises:
        ConfigError: An option has no meaning, or the output cannot be written.
        HookError: There is no driver, or the installation is broken.
        ProgramError: The program cannot be run.
        Error: Another trace into the same file runs, numpy is missing, or the trace cannot be written; the parts beside
            a file stay then.
    """
    from cudasched.observe.trace._device import check
    from cudasched.observe.trace._parts import check_limit, convert, format_of, parts_of, remove

    form = format_of(output, form)
    check_limit(limit_mb)
    if device_times:
        check()
    target = Output(output, option="-o")
    picture = Output(flame, option="--flame") if flame is not None else None
    if picture is not None:
        picture.refuse(output, "the trace goes there")

    def traced(directory: Path) -> int:
        if not program:
            if not directory.is_dir():
                raise ConfigError(f"name a program to run after `--`; there is nothing to finish in {directory}")
            with claimed(directory, output, "trace", new=False):
                return finish(directory, 0)
        path = find_program(program[0], os.environ.get("PATH", os.defpath))
        if (apart := unreached(path)) and not apart.passes_on:
            raise ProgramError(f"{program[0]} cannot be traced: {apart.why}")
        configure()
        hook.load_core().find_driver()
        with claimed(directory, output, "trace", new=True):
            try:
                environment = _environment(path, directory, limit_mb, device_times)
                code = run_to_end(path, program, environment, lambda: None)
            except ProgramError:
                remove(directory)
                raise
            return finish(directory, code)

    def finish(directory: Path, code: int) -> int:
        summary = convert(directory, target, form, picture)
        remove(directory)
        nothing = _report(output, summary, quiet)
        return code or nothing

    if target.is_stream:
        with Scratch("trace") as scratch:
            return traced(parts_of(scratch / "out"))
    return traced(parts_of(output))
