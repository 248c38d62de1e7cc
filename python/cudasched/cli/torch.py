"""``cudasched torch``: the PyTorch extension."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from cudasched import _text
from cudasched.errors import HookError

__all__ = ["app"]

app = typer.Typer(name="torch", help="What belongs to PyTorch: its extension.", no_args_is_help=True)


@app.callback()
def _start() -> None:
    """Has one command, which is named all the same."""


@app.command(epilog="Example: cudasched torch build")
def build(
    again: Annotated[bool, typer.Option("--again", help="Compile it though it is there.")] = False,
) -> None:
    """Compile the PyTorch extension for the PyTorch that is installed, which is else done at its first use."""
    from cudasched.torch import _extension

    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise HookError(f"PyTorch is not installed here: {error}") from error
    print(_text.printable(str(_extension.build(torch, again=again))))
