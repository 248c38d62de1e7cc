"""The commands with options, for Typer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from cudasched._cpp import get_cmake_dir, get_include

__all__ = ["application"]

_MODULES = (
    "collect",
    "trace",
    "advise",
    "analyze",
    "simulate",
    "doctor",
    "clean",
    "metrics",
    "baseline",
    "top",
    "serve",
    "models",
    "torch",
    "dashboard",
    "tune",
    "train",
)
"""Commands that are modules of this package; the others are below."""
_RUN_A_PROGRAM = ("collect", "trace", "advise", "analyze", "train")
_RUNS_A_PROGRAM = {"allow_interspersed_args": False}

_STATUS_EXAMPLES = "Examples: cudasched status --watch; cudasched status --json | jq '.data[].clients[].name'"

app = typer.Typer(
    name="cudasched",
    help="Share one GPU between programs: latency-critical work hardly notices best-effort work. `cudasched doctor` "
    "says whether it can work here.",
    epilog="Example: cudasched run --class best_effort -- python train.py",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from cudasched.cli.version import describe

        print(describe())
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
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print version, build, driver and models.",
        ),
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


@app.command(
    context_settings=_RUNS_A_PROGRAM,
    epilog="Examples: cudasched run --class latency --slo-ms 5 -- python serve.py; "
    "cudasched run --class best_effort -- python train.py",
)
def run(
    program: Annotated[list[str], typer.Argument(metavar="PROGRAM [ARGS]...", help="The program, after `--`.")],
    client_class: Annotated[
        str | None, typer.Option("--class", metavar="CLASS", help="latency, normal or best_effort.")
    ] = None,
    slo_ms: Annotated[
        str | None, typer.Option(metavar="MS", help="The program's latency target, ms; of class latency.")
    ] = None,
    priority: Annotated[str | None, typer.Option(metavar="N", help="Within the class, higher first; -8 to 8.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="strict, slack, harvest or open: best effort beside latency.")
    ] = None,
    lead_us: Annotated[
        str | None,
        typer.Option(
            metavar="US|auto", help="Best-effort GPU time in flight at the next submission, us; auto: found on line."
        ),
    ] = None,
    time_slice_us: Annotated[
        str | None,
        typer.Option(
            metavar="US|auto|off",
            help="How long the GPU runs a best-effort program before it interrupts a kernel for another process, us.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|auto|off",
            help="Best effort holds back on all GPUs of the job together; auto: by MASTER_ADDR and MASTER_PORT.",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most memory that it may allocate on each GPU, such as 20GiB."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="How `cudasched status` calls the program.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings.")] = None,
    check_coverage: Annotated[
        bool, typer.Option(help="Count the device's launches, and say how many cudasched saw.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="With --check-coverage: JSON on standard error in place of the table.")
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
    """Run an unmodified program under cudasched; without a driver, the program runs unmanaged, with one warning."""
    from cudasched.cli.run import run_program

    settings = {
        "client_class": client_class,
        "slo_ms": slo_ms,
        "priority": priority,
        "policy": policy,
        "lead_us": lead_us,
        "time_slice_us": time_slice_us,
        "job": job,
        "memory_limit": memory_limit,
        "name": name,
    }
    return run_program(program, settings, config_file=config, check_coverage=check_coverage, as_json=json, with_mps=mps)


def status(
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md).")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew each second until Ctrl-C.")] = False,
) -> int:
    """Show who is on which GPU: class, state, time at the gate, latency target, time in flight, launches."""
    from cudasched.cli.status import show_status

    return show_status(as_json=json, watch=watch)


def demo(
    seconds: Annotated[float, typer.Option(help="About how long to measure, 1 to 3600 s.")] = 20.0,
    output: Annotated[Path, typer.Option(help="The plot, a PNG; the figures go beside it, as JSON.")] = Path(
        "demo-out/demo.png"
    ),
    simulate: Annotated[bool, typer.Option("--simulate", help="Use the simulated GPU even if there is a real one.")] = (
        False
    ),
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md) in place of the table.")] = False,
) -> int:
    """Latency-critical beside best-effort clients: alone, unmanaged and managed; without a GPU, on a simulated one."""
    from cudasched import demo

    return demo.main(seconds=seconds, output=output, simulate=simulate, as_json=json)


def application(asked: str) -> typer.Typer:
    """The commands, with only the requested one's module loaded: all modules take twice as long to load.

    Args:
        asked: The possible name of a command; where there is none of that name, all are there, for the help.
    """
    here = asked in ("run", "status", "demo")
    for name in () if here else (asked,) if asked in _MODULES else _MODULES:
        module = importlib.import_module(f"cudasched.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app)
        else:
            settings = _RUNS_A_PROGRAM if name in _RUN_A_PROGRAM else None
            app.command(name, context_settings=settings, epilog=getattr(module, "EXAMPLE", None))(module.command)
    app.command(epilog=_STATUS_EXAMPLES)(status)
    app.command(epilog="Example: cudasched demo --simulate --seconds 60")(demo)
    return app
