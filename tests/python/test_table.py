"""Tables fit their terminal: columns are left out by importance, and no figure is cut short."""

from __future__ import annotations

import io

import pytest
from cudasched._table import Column, fitted
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

COLUMNS = [
    Column("pid", ["19640", "19643"], is_number=True),
    Column("name", ["a-server-with-a-very-long-name.py", "train.py"], may_shorten=True),
    Column("gate wait", ["-", "10.1 ms in 12"], importance=9),
    Column("SLO ms", ["5", "-"], importance=8, is_number=True),
    Column("launches", ["20", "1234567"], importance=3, is_number=True),
    Column("slot", ["0", "1"], importance=1, is_number=True),
]


def lines(columns: list[Column], width: int) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(fitted(columns, width))
    return output.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_what_is_shown_is_shown_whole(width: int) -> None:
    shown = lines(COLUMNS, width)
    assert max(map(len, shown)) <= width
    heading, *rows = (line for line in shown if "pid" in line or "196" in line)
    for column in COLUMNS:
        if f" {column.title} " not in heading or column.may_shorten:
            continue
        for row, cell in zip(rows, column.cells, strict=True):
            assert f" {cell} " in row, (column.title, row)
    assert " train.py " in rows[1]


@pytest.mark.parametrize("width", [20, 30, 35])
def test_where_nothing_has_room_a_name_gets_short_and_no_number_is_cut(width: int) -> None:
    shown = [line for line in lines(COLUMNS, width) if "196" in line]
    assert [line.split()[1] for line in shown] == ["19640", "19643"]
    assert max(map(len, shown)) <= width


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_wide_characters_take_two_columns_each(width: int) -> None:
    """Guards against a name of them that was shortened to twice its room, and cut the columns behind."""
    columns = [COLUMNS[0], Column("name", ["推論" * 20, "学習.py"], may_shorten=True), *COLUMNS[2:]]
    shown = [line for line in lines(columns, width) if "196" in line]
    assert len(shown) == 2 and {cell_len(line) for line in shown} <= set(range(width + 1))
    assert all(line.endswith("│") for line in shown) and " 学習.py " in shown[1]


def test_the_least_important_columns_go_first() -> None:
    gone: list[str] = []
    for width in range(140, 39, -1):
        heading = next(line for line in lines(COLUMNS, width) if "pid" in line)
        gone += [column.title for column in COLUMNS if column.title not in heading and column.title not in gone]
    assert gone == ["slot", "launches", "SLO ms", "gate wait"]


@given(st.lists(st.text(max_size=30), min_size=2, max_size=2), st.integers(50, 200))
def test_any_name_takes_one_line_and_moves_no_cursor(names: list[str], width: int) -> None:
    columns = [COLUMNS[0], Column("name", names, may_shorten=True), *COLUMNS[2:]]
    shown = lines(columns, width)
    assert sum("196" in line for line in shown) >= 2
    assert not any(character in line for line in shown for character in "\x1b\r\b\x07")
