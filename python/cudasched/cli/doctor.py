"""`cudasched doctor`: can cudasched work here, and what is to be done where it cannot?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "Example: cudasched doctor"

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def command(json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/json.md).")] = False) -> int:
    """Check the installation: driver, hook, run directory, settings, MPS, PyTorch; each problem with its remedy.

    Exits with 1 if there is a problem. Example: cudasched doctor --json
    """
    from cudasched._document import document
    from cudasched.doctor import examine

    checks = examine()
    problems = sum(check.outcome == "problem" for check in checks)
    if json:
        print(document("doctor", [asdict(check) for check in checks]))
        return 1 if problems else 0

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from cudasched._table import terminal_columns
    from cudasched._text import printable

    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold", ratio=1)
    for check in checks:
        about = Text(printable(check.found))
        if check.remedy:
            about.append(f"\n-> {printable(check.remedy)}", style="bold" if check.outcome == "problem" else "dim")
        lines.add_row(Text(check.outcome, style=_STYLES[check.outcome]), Text(check.name), about)
    console = Console(width=terminal_columns())
    console.print(lines)
    console.print(f"{problems} problem{'' if problems == 1 else 's'}" if problems else "no problems", highlight=False)
    return 1 if problems else 0
