"""`cudasched clean`: removes caches and tables."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "Example: cudasched clean --dry-run"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and remove none.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Trained models and the tuner's measurements, too.")
    ] = False,
) -> int:
    """Remove caches, tables and left files of this user; files that a running program uses stay.

    Exits with 1 if something belongs to another user or cannot be removed.
    """
    from cudasched._text import printable
    from cudasched.clean import clean

    words = {"unused": "unused" if dry_run else "removed", "used": "in use", "refused": "refused"}
    freed = refused = 0
    for each in clean(dry_run=dry_run, everything=everything):
        freed += each.bytes if each.outcome == "unused" else 0
        refused += each.outcome == "refused"
        why = f": {each.why}" if each.why else ""
        print(printable(f"{words[each.outcome]:8} {_size(each.bytes):>10}  {each.kind}: {each.path}{why}"))
    print(f"{_size(freed)} would be freed" if dry_run else f"{_size(freed)} freed")
    return 1 if refused else 0
