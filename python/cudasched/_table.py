"""Tables that fit their terminal: whole columns are left out, the least important first, and no cell is cut short."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from cudasched._text import printable

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PIPE_COLUMNS", "Column", "fitted", "terminal_columns"]

PIPE_COLUMNS = 160
_LEAST_NAME = 18
_SHORTEST_NAME = 8  # where the columns that never go have no room for more
_BORDERS = 3  # a column's: two blanks and a line


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: The heading.
        cells: One a row.
        importance: The least important columns go first where there is no room; 0: the column never goes.
        is_number: To the right.
        may_shorten: Cells may lose their middles, to a width of `_LEAST_NAME`: names, where there are others.
        style: Of its cells, as rich names styles.
    """

    title: str
    cells: Sequence[str]
    importance: int = 0
    is_number: bool = False
    may_shorten: bool = False
    style: str = ""


def terminal_columns() -> int:
    """Width of the terminal that standard output is, else `PIPE_COLUMNS`; ``COLUMNS`` says another one."""
    if not sys.stdout.isatty():
        return shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns if _columns_are_set() else PIPE_COLUMNS
    return shutil.get_terminal_size().columns


def _columns_are_set() -> bool:
    import os

    return os.environ.get("COLUMNS", "").isdigit()


def shortened(text: str, width: int) -> str:
    """The text without the middle, at most so wide: some characters take two columns of a terminal."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    room = width - 3
    head = max(end for end in range(room // 2 + 1) if cell_len(text[:end]) <= room // 2)
    room -= cell_len(text[:head])
    tail = min(begin for begin in range(max(len(text) - room, 0), len(text) + 1) if cell_len(text[begin:]) <= room)
    return text[:head] + "..." + text[tail:]


def _width(column: Column) -> int:
    from rich.cells import cell_len

    return max(cell_len(text) for text in (column.title, *column.cells))


def fitted(columns: Sequence[Column], width: int, *, title: str = "") -> Table:
    """A table that is at most `width` wide, if its most important columns are.

    Args:
        columns: In the order in which they are shown.
        width: Of the terminal, in characters.
        title: Above the table.
    """
    from rich.table import Table
    from rich.text import Text

    chosen = [column._replace(cells=[printable(cell) for cell in column.cells]) for column in columns]

    def needed() -> int:
        widths = (min(_width(column), _LEAST_NAME) if column.may_shorten else _width(column) for column in chosen)
        return 1 + sum(one + _BORDERS for one in widths)

    while needed() > width and any(column.importance for column in chosen):
        first = min((column for column in chosen if column.importance), key=lambda column: column.importance)
        chosen.remove(first)
    room = width - needed()
    table = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for place, column in enumerate(chosen):
        if column.may_shorten:
            full = _width(column)
            least = _LEAST_NAME if room >= 0 else min(full, _LEAST_NAME)
            most = min(full, max(least + room, _SHORTEST_NAME))
            chosen[place] = column._replace(cells=[shortened(cell, most) for cell in column.cells])
        # Where there is no room at all the terminal cuts the last column; rich would cut a bit of each number.
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, min_width=_width(chosen[place]))
    for cells in zip(*(column.cells for column in chosen), strict=True):
        table.add_row(*(Text(cell, style=column.style) for cell, column in zip(cells, chosen, strict=True)))
    return table
