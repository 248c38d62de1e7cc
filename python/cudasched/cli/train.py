"""`cudasched train`: from a program, or a recording of it, to a model that the scheduler uses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cudasched._scratch import Scratch
from cudasched._text import printable
from cudasched.cli.collect import run_collected
from cudasched.config import resolve
from cudasched.errors import ConfigError

__all__ = ["command"]


def command(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROGRAM [ARGS]...]", help="The program to record, after `--`."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A recording of `cudasched collect`, in place of a program.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The model's file. Without it, the scheduler finds the model by itself."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Of XGBoost.", min=1, max=1024)] = 2,
) -> int:
    """Train the predictor on a program's launches, for this GPU, and put the model into use."""
    from cudasched.predictor import train
    from cudasched.predictor._train import place_of

    if (data is None) == (not program):
        raise ConfigError("name either a program to record, after `--`, or a recording with --data")
    place = place_of(output)  # before the program runs, which may take long
    with Scratch("train") as directory:
        if data is None:
            data = directory / "data.parquet"
            code = run_collected(program or [], output=data, timing="cupti", quiet=False)
            if not data.exists():  # nothing was recorded, as the line above says
                return code
            if code != 0:
                print(f"cudasched: the program ended with {code}; its launches are trained on", file=sys.stderr)
        trained = train(data, output, threads=threads)
    report = [
        f"{trained.path}: a model for {printable(trained.gpu)} ({trained.architecture})",
        f"trained on {trained.different:,} different launches of {trained.launches:,}",
        f"on launches held out: median error {trained.error:.1%}, {trained.time_weighted:.1%} of the time",
    ]
    if output is None and (chosen := resolve().origins.get("model")):
        report.append(f"the scheduler uses the model that {chosen} names; without that, this one")
    elif output is None:
        report.append("the scheduler uses it from the next program on")
    elif not place.is_stream:
        report.append(f"set CUDASCHED_MODEL={trained.path} to use it")
    print("\n".join(report), file=sys.stderr if place.is_stream else sys.stdout)
    return 0
