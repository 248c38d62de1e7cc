"""``cudasched torch``: the PyTorch extension."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from cudasched import _text
from cudasched.errors import HookError

__all__ = ["app"]

app = typer.Typer(name="torch", help="The extension for PyTorch.", no_args_is_help=True)


@app.command(epilog="Example: cudasched torch build")
def build(
    again: Annotated[bool, typer.Option("--again", help="Compile again.")] = False,
) -> None:
    """Compile the PyTorch extension for the PyTorch that is installed, which is else done at its first use."""
    from cudasched.torch import _extension

    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise HookError(f"PyTorch is not installed here: {error}") from error
    print(_text.printable(str(_extension.build(torch, again=again))))


@app.command(epilog="Example: cudasched torch check")
def check() -> int:
    """Check whether the PyTorch extension can be built here, and list missing parts; exit with 1 if there are any."""
    from cudasched.torch import _extension

    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise HookError(f"PyTorch is not installed here: {error}") from error
    found = _extension.check(torch)
    for well, text in found:
        print(_text.printable(f"{'ok' if well else 'problem':<9}{text}"))
    return 0 if all(well for well, _ in found) else 1
