"""`cudasched tune`: the fastest configuration of a kernel."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from cudasched._document import document
from cudasched._output import Output
from cudasched._table import Column, fitted, terminal_columns

__all__ = ["EXAMPLE", "command"]

EXAMPLE = (
    "Examples: cudasched tune layernorm.cu --space layernorm.toml -o layernorm_tuned.h; "
    "cudasched tune --replay layernorm.npz"
)


def command(
    kernel: Annotated[
        Path | None,
        typer.Argument(metavar="[KERNEL.cu]", help="The kernel's source; else the one that the space names."),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="TOML: the possible values (docs/tuning.md).")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="A dimension of the problem; may be repeated.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("-o", "--output", help="Also write a header (.h) or JSON (.json)."),
    ] = None,
    strategy: Annotated[str, typer.Option(help="bayesian, random, exhaustive, optuna or botorch.")] = "bayesian",
    evaluations: Annotated[int, typer.Option(help="Configurations that are tried at most.")] = 200,
    seconds: Annotated[float, typer.Option(help="Time that the search takes at most, s.")] = math.inf,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    batch: Annotated[int, typer.Option(help="Configurations that are compiled at once.")] = 4,
    memory: Annotated[
        float, typer.Option(help="How much slower a kernel may be for needing no memory of its own: 0.1 for 10%.")
    ] = 0.0,
    min_occupancy: Annotated[float, typer.Option(help="Least occupancy, 0 to 1.")] = 0.0,
    launches: Annotated[int, typer.Option(help="Launches in a row for each sample: 1 for latency.")] = 1,
    cold: Annotated[
        bool, typer.Option("--cold", help="Begin without the results of other shapes and the predictor.")
    ] = False,
    compiler: Annotated[str, typer.Option(help="auto, nvrtc or nvcc.")] = "auto",
    device: Annotated[int, typer.Option(min=0, help="The GPU's ordinal.")] = 0,
    database: Annotated[Path | None, typer.Option(help="Where measurements are kept.")] = None,
    replay: Annotated[Path | None, typer.Option(help="A recorded space, in place of a GPU.")] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Run the winner under compute-sanitizer.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Counters of the best ones, by Nsight Compute.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md) in place of a table.")] = False,
) -> int:
    """Find the fastest configuration of a CUDA kernel."""
    from rich.console import Console

    from cudasched.tune import Objective, Progress, Settings, as_header, as_json, tune
    from cudasched.tune.output import summary
    from cudasched.tune.space import number, parse_shape

    targets = [Output(path, option="-o", formats=(".h", ".json")) for path in output or []]
    live = sys.stderr.isatty() and not json

    def show(progress: Progress) -> None:
        best = "" if progress.best_us is None else f", best {progress.best_us:.2f} us"
        print(f"\r{progress.evaluations} configurations{best}   ", end="", file=sys.stderr, flush=True)

    tuned = tune(
        kernel,
        space=space,
        shape=parse_shape(shape or []),
        settings=Settings(
            strategy=strategy,
            evaluations=evaluations,
            seconds=seconds,
            seed=seed,
            batch=batch,
            warm=not cold,
            objective=Objective(memory=memory, min_occupancy=min_occupancy),
        ),
        database=database,
        replay=replay,
        device=device,
        compiler=compiler,
        launches=launches,
        sanitize=sanitize,
        profile=profile,
        on_progress=show if live else None,
    )
    if live:
        print(file=sys.stderr)
    for target in targets:
        target.write(as_header(tuned) if target.path.suffix.lower() == ".h" else as_json(tuned))
    if json:
        print(document("tune", summary(tuned)))
        return 130 if tuned.interrupted else 0
    best = tuned.best()
    names = list(tuned.problem.space.parameters)
    columns = [
        Column("us", [f"{one.time_us:.2f}" for _, one in best], is_number=True),
        *(
            Column(name, [str(tuned.problem.configurations[i][name]) for i, _ in best], importance=2, is_number=True)
            for name in names
        ),
        Column("registers", [str(one.registers) for _, one in best], importance=1, is_number=True),
        Column("occupancy", [f"{one.occupancy:.0%}" for _, one in best], importance=1, is_number=True),
        *(
            Column(name, [f"{one.profile[name]:.0f}" if name in one.profile else "" for _, one in best], importance=3)
            for name in (best[0][1].profile if best else {})
        ),
    ]
    shown = " ".join(f"{name}={number(value)}" for name, value in tuned.problem.shape.items())
    title = f"{tuned.problem.space.kernel} {shown} on {tuned.problem.gpu.name}"
    Console(width=terminal_columns()).print(fitted(columns, terminal_columns(), title=title))
    print(f"best: {' '.join(f'{name}={value}' for name, value in tuned.configuration.items())}")
    print(
        f"{tuned.evaluations} of {len(tuned.problem.configurations)} configurations were tried"
        + "".join(f", {count} {status}" for status, count in tuned.failures().items())
    )
    if tuned.interrupted:
        print("cudasched: interrupted; the same command goes on", file=sys.stderr)
    return 130 if tuned.interrupted else 0
