"""The ``cudasched`` command. Errors are one line on standard error; a setting without meaning exits with 2."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from cudasched._cpp import get_cmake_dir, get_include
from cudasched._version import __version__
from cudasched.cli import advise, collect, simulate
from cudasched.errors import ConfigError, Error

__all__ = ["main"]

_USAGE = 2
_INTERRUPTED = 130

app = typer.Typer(
    name="cudasched",
    help="Share one GPU between programs: latency-critical work hardly notices best-effort work.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cudasched {__version__}")
        raise typer.Exit


def _show_include_dir(wanted: bool) -> None:
    if wanted:
        print(get_include())
        raise typer.Exit


def _show_cmake_dir(wanted: bool) -> None:
    if wanted:
        print(get_cmake_dir())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    include_dir: Annotated[
        bool,
        typer.Option("--include-dir", callback=_show_include_dir, is_eager=True, help="Print where C++ headers are."),
    ] = False,
    cmake_dir: Annotated[
        bool,
        typer.Option("--cmake-dir", callback=_show_cmake_dir, is_eager=True, help="Print where the CMake package is."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _lead(value: str) -> float | str:
    if value == "auto":
        return value
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor auto") from None


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    program: Annotated[list[str], typer.Argument(metavar="PROGRAM [ARGS]...", help="What to run, after `--`.")],
    client_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="latency, normal or best-effort.")
    ] = None,
    slo_ms: Annotated[float | None, typer.Option(help="The program's latency target, ms.")] = None,
    priority: Annotated[int | None, typer.Option(help="Within the class, higher first.")] = None,
    policy: Annotated[str | None, typer.Option(help="strict, slack or open: best effort beside latency work.")] = None,
    lead_us: Annotated[
        Any,
        typer.Option(
            metavar="US|auto",
            parser=_lead,
            help="Best-effort GPU time in flight at the next submission, us; auto: found on line.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|auto|off",
            help="Best effort holds back on all GPUs of the job together; auto: by MASTER_ADDR and MASTER_PORT.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="How `cudasched status` calls the program.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings.")] = None,
    check_coverage: Annotated[
        bool, typer.Option(help="Count what the device runs, and say how much of it cudasched saw.")
    ] = False,
    mps: Annotated[
        bool,
        typer.Option(
            "--mps",
            help="Run it under CUDA's multi-process service; where none runs, start a private one, which ends with the "
            "last program that uses it.",
        ),
    ] = False,
) -> int:
    """Run an unmodified program under cudasched; without a driver it runs as it is, with one warning."""
    from cudasched.cli.run import run_program

    settings = {
        "client_class": client_class,
        "slo_ms": slo_ms,
        "priority": priority,
        "policy": policy,
        "lead_us": lead_us,
        "job": job,
        "name": name,
    }
    return run_program(program, settings, config_file=config, check_coverage=check_coverage, with_mps=mps)


_RUNS_A_PROGRAM = {"allow_interspersed_args": False}
app.command("collect", context_settings=_RUNS_A_PROGRAM)(collect.command)
app.command("advise", context_settings=_RUNS_A_PROGRAM)(advise.command)
app.command("simulate")(simulate.command)


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew each second until Ctrl-C.")] = False,
) -> int:
    """Show who is on which GPU: class, activity, time in flight, launches, coverage."""
    from cudasched.cli.status import show_status

    return show_status(as_json=json, watch=watch)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure, s.")] = 20.0,
    output: Annotated[Path, typer.Option(help="The plot, a PNG; the figures go beside it, as JSON.")] = Path(
        "demo-out/demo.png"
    ),
    simulate: Annotated[bool, typer.Option("--simulate", help="Use the simulated GPU even if there is a real one.")] = (
        False
    ),
) -> int:
    """Latency-critical beside best-effort clients: alone, unmanaged and managed; without a GPU, on a simulated one."""
    from cudasched import demo

    return demo.main(seconds=seconds, output=output, simulate=simulate)


def _fail(message: str, code: int) -> NoReturn:
    print(f"cudasched: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def main() -> NoReturn:
    """The entry point. Exits with the command's code: of a program it ran, 127 and 126 as a shell's, 2 for usage."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="cudasched", standalone_mode=False)
        sys.stdout.flush()
    except ConfigError as error:
        _fail(str(error), _USAGE)
    except Error as error:
        _fail(str(error), getattr(error, "exit_code", 1))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left; nothing is to be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # Usage errors: their class is click's or typer's own copy of it, as typer's version has it.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message() or str(error), getattr(error, "exit_code", _USAGE))
    sys.exit(code if isinstance(code, int) else 0)
