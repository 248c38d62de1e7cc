"""`cudasched dashboard`: the tuner in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "Example: cudasched dashboard layernorm.npz report.json"


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Recorded spaces, reports of advise, data sets of collect."),
    ] = None,
    address: Annotated[str, typer.Option(help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8501,
    any_address: Annotated[
        bool, typer.Option("--any-address", help="Allow an address that other machines reach: code can be run by it.")
    ] = False,
    database: Annotated[Path | None, typer.Option(help="The tuner's database.")] = None,
) -> int:
    """Tune kernels and look at the results in a browser; the command prints the address, which has a token."""
    from cudasched.tune.dashboard import Options, serve

    return serve(
        Options(
            address=address,
            port=port,
            any_address=any_address,
            database=database.resolve() if database else None,
            files=tuple(files or ()),
        )
    )
