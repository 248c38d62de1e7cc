"""Options that a command would pass over: a user who gave one is told."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from cudasched.errors import ConfigError

if TYPE_CHECKING:
    import typer

__all__ = ["refuse"]


def refuse(context: typer.Context, names: Container[str | None], why: str) -> None:
    """Refuses options.

    Args:
        context: The command's.
        names: The parameters that have no effect.
        why: The reason, and the options that have one.

    Raises:
        ConfigError: The command line has some of them.
    """
    given = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            given.append(parameter.opts[-1])
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")
