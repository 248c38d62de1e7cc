"""`cudasched top`: who uses the GPUs now, live, in a terminal, and keys that change them.

Needs textual (``pip install 'cudasched[observe]'``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from cudasched import control
from cudasched._text import counted, printable
from cudasched.errors import Error
from cudasched.observe._gpus import with_gpus
from cudasched.observe._metrics import clients
from cudasched.observe._rates import Look, Row, rows

__all__ = ["Top"]

_GIB = 2**30
_MOST_FOREIGN = 4  # are named: the table needs room
_LARGEST_PRIORITY = 8
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100.0
_POLICIES = ("strict", "slack", "harvest", "open")


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(scale * value, form)


def _missed(row: Row) -> float:
    """The share of requests that missed their target: clients without targets come behind those that kept all."""
    return -1.0 if row.attainment is None else 1.0 - row.attainment


@dataclass(frozen=True)
class _Column:
    """One column.

    Attributes:
        title: The heading.
        text: A row's cell.
        order: By which rows are sorted.
        rank: The least width of the terminal that shows the column, characters. Where long cells leave no room, columns
            of the greatest rank go; those of 0 stay.
        descends: The greatest come first.
    """

    title: str
    text: Callable[[Row], str]
    order: Callable[[Row], Any]
    rank: int
    descends: bool = True


_COLUMNS = (
    _Column("pid", lambda r: str(r.pid), lambda r: r.pid, 0, descends=False),
    _Column("name", lambda r: printable(r.name)[:24], lambda r: r.name.lower(), 0, descends=False),
    _Column("class", lambda r: "+".join(r.classes), lambda r: r.classes, 0, descends=False),
    _Column("GPU %", lambda r: _number(r.sm_ratio, ".0f", 100), lambda r: r.sm_ratio or 0, 0),
    _Column("state", lambda r: r.state, lambda r: r.state, 70, descends=False),
    _Column("in SLO %", lambda r: _number(r.attainment, ".1f", 100), _missed, 60),
    _Column("GiB", lambda r: f"{r.memory_bytes / _GIB:.1f}", lambda r: r.memory_bytes, 75),
    _Column("P99 ms", lambda r: _number(r.request_ms, ".2f"), lambda r: r.request_ms or 0, 80),
    _Column("SLO ms", lambda r: _number(r.slo_ms, "g"), lambda r: r.slo_ms or 0, 100),
    _Column("predicted %", lambda r: _number(r.best_effort_ratio, ".0f", 100), lambda r: r.best_effort_ratio or 0, 95),
    _Column("closed %", lambda r: _number(r.closed_ratio, ".0f", 100), lambda r: r.closed_ratio or 0, 110),
    _Column("gate P95 ms", lambda r: _number(r.gate_wait_ms, ".2f"), lambda r: r.gate_wait_ms or 0, 100),
    _Column("in flight ms", lambda r: _number(r.in_flight_ms, ".3f"), lambda r: r.in_flight_ms, 120),
    _Column("launches/s", lambda r: _number(r.launches_per_s, ".0f"), lambda r: r.launches_per_s or 0, 90),
    _Column("prio", lambda r: str(r.priority), lambda r: r.priority, 110),
    _Column("weight", lambda r: f"{r.weight:g}", lambda r: r.weight, 130),
    _Column("policy", lambda r: r.policy or "-", lambda r: r.policy, 130, descends=False),
    _Column("past gate", lambda r: str(r.past_gate), lambda r: r.past_gate, 150),
)


def columns_of(shown: Sequence[Row], width: int) -> list[_Column]:
    """Those that a terminal of so many characters has room for, whole."""
    chosen = [column for column in _COLUMNS if column.rank <= width]
    widths = {column: 2 + max(map(cell_len, (column.title, *map(column.text, shown)))) for column in chosen}
    for least in sorted(chosen, key=lambda column: column.rank, reverse=True):
        if least.rank == 0 or sum(widths[column] for column in chosen) <= width:
            break
        chosen.remove(least)
    return chosen


class Top(App[int]):
    """The program; returns 0.

    Args:
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.
        interval_s: Between two looks.
    """

    TITLE = "cudasched top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: auto; padding: 0 1; }
    #table { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "quit", "quit"),
        Binding("s", "sort(1)", "sort by next"),
        Binding("S", "sort(-1)", "previous", show=False),
        Binding("r", "reverse", "reverse"),
        Binding("space", "pause", "pause"),
        Binding("l", "set_class('latency')", "latency"),
        Binding("n", "set_class('normal')", "normal"),
        Binding("b", "set_class('best_effort')", "best effort"),
        Binding("plus", "step_priority(1)", "prio", key_display="+/-"),
        Binding("minus", "step_priority(-1)", show=False),
        Binding("w", "scale_weight(2)", "weight", key_display="w/W"),
        Binding("W", "scale_weight(0.5)", show=False),
        Binding("p", "next_policy", "policy"),
    ]

    def __init__(self, directory: str | os.PathLike[str] | None = None, interval_s: float = 1.0) -> None:
        super().__init__()
        self._directory = directory
        self._interval_s = interval_s
        self._before: Look | None = None
        self._now: Look | None = None
        self._rows: list[Row] = []
        self._error = ""
        self._paused = False
        self._sorted = "GPU %"
        self._reversed = False
        self._shown: list[Row] = []  # in the table's order
        self._said = ""  # of the last change

    def compose(self) -> ComposeResult:
        """The parts of the screen."""
        yield Static(id="summary")
        yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """The first look, and one each interval."""
        self._look()
        self.set_interval(self._interval_s, self._look)

    def on_resize(self) -> None:
        """Other columns fit."""
        self._show()

    def action_sort(self, step: int) -> None:
        """By the next of the columns that are shown, or the one before."""
        titles = [column.title for column in self._columns()]
        place = titles.index(self._sorted) if self._sorted in titles else 0
        self._sorted = titles[(place + step) % len(titles)]
        self._show()

    def action_reverse(self) -> None:
        """The other way round."""
        self._reversed = not self._reversed
        self._show()

    def action_pause(self) -> None:
        """Freezes the display."""
        self._paused = not self._paused
        self._show()

    def action_set_class(self, client_class: str) -> None:
        """Of the chosen row's client."""
        self._change(lambda row: {"client_class": client_class})

    def action_step_priority(self, step: int) -> None:
        """Of the chosen row's client, by one."""
        self._change(lambda row: {"priority": max(-_LARGEST_PRIORITY, min(_LARGEST_PRIORITY, row.priority + step))})

    def action_scale_weight(self, factor: float) -> None:
        """Of the chosen row's client."""
        self._change(lambda row: {"weight": max(_LEAST_WEIGHT, min(_MOST_WEIGHT, row.weight * factor))})

    def action_next_policy(self) -> None:
        """Of the chosen row's client."""
        self._change(
            lambda row: {
                "policy": _POLICIES[(_POLICIES.index(row.policy) + 1) % len(_POLICIES)]
                if row.policy in _POLICIES
                else _POLICIES[0]
            }
        )

    def _change(self, wanted: Callable[[Row], dict[str, Any]]) -> None:
        place = self.query_one("#table", DataTable).cursor_row
        if not 0 <= place < len(self._shown):
            return
        row = self._shown[place]
        values = wanted(row)
        ((setting, value),) = values.items()
        what = (
            f"{setting.removeprefix('client_')} {value:g}"
            if isinstance(value, float)
            else f"{setting.removeprefix('client_')} {value}"
        )
        self._said = f"{row.name} ({row.pid}): {what}: asked"
        self._show()
        # The answer may take a second; the screen goes on meanwhile.
        self.run_worker(lambda: self._ask(row, values, what), thread=True, group="change")

    def _ask(self, row: Row, values: dict[str, Any], what: str) -> None:
        try:
            control.change(f"{row.number:016x}", directory=self._directory, **values)
            said = f"{row.name} ({row.pid}): {what}"
        except Error as error:
            said = f"{row.name} ({row.pid}): {error}"
        self.call_from_thread(self._answered, said)

    def _answered(self, said: str) -> None:
        self._said = said
        self._look()
        self._show()

    def _look(self) -> None:
        if self._paused:
            return
        try:
            devices, processes = clients(self._directory)
            devices = with_gpus(devices, processes)
            self._error = ""
        except Error as error:
            devices, processes, self._error = [], [], str(error)
        self._before, self._now = self._now, Look(time.monotonic(), tuple(devices), tuple(processes))
        self._rows = rows(self._now, self._before)
        self._show()

    def _columns(self) -> list[_Column]:
        return columns_of(self._rows, self.size.width)

    def _summary(self) -> Text:
        lines = []
        for device in self._now.devices if self._now else ():
            text = f"{device.name or 'GPU'} {device.uuid[:13]}"
            if device.error:
                text += f": {device.error}"
            if (gpu := device.gpu) is not None:
                if gpu.sm_ratio is not None:
                    text += f"  {100 * gpu.sm_ratio:.0f}% busy"
                if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
                    text += f"  {gpu.memory_used_bytes / _GIB:.1f} of {gpu.memory_total_bytes / _GIB:.0f} GiB"
                if gpu.power_w is not None:
                    text += f"  {gpu.power_w:.0f} W"
                foreign = sorted(gpu.foreign, key=lambda each: not each.elsewhere)
                for each in foreign[:_MOST_FOREIGN]:
                    where = "with another run directory" if each.elsewhere else "not under cudasched"
                    text += f"\n  {each.name} ({each.pid}) is {where}"
                if more := len(foreign[_MOST_FOREIGN:]):
                    text += f"\n  and {counted(more, 'more program', 'more programs')}: see `cudasched status`"
                if gpu.unaccounted_bytes:
                    text += f"\n  unaccounted memory: {gpu.unaccounted_bytes / _GIB:.1f} GiB"
            lines.append(text)
        if self._error:
            lines.append(self._error)
        elif not self._rows:
            lines.append("no clients: no program runs under cudasched")
        order = "ascending" if self._ascends() else "descending"
        lines.append(f"by {self._sorted}, {order}" + ("  PAUSED" if self._paused else ""))
        if self._said:
            lines.append(" ".join(self._said.split()))
        return Text(printable("\n".join(lines), newlines=True))

    def _ascends(self) -> bool:
        column = next(column for column in _COLUMNS if column.title == self._sorted)
        return column.descends == self._reversed

    def _show(self) -> None:
        if self._now is None:
            return
        self.query_one("#summary", Static).update(self._summary())
        table: DataTable[Text] = self.query_one("#table", DataTable)
        columns = self._columns()
        chosen = next((column for column in columns if column.title == self._sorted), columns[0])
        cursor = table.cursor_row
        chosen_number = self._shown[cursor].number if 0 <= cursor < len(self._shown) else None
        table.clear(columns=True)
        for column in columns:
            table.add_column(column.title)
        self._shown = sorted(self._rows, key=lambda row: (chosen.order(row), row.pid), reverse=not self._ascends())
        for row in self._shown:
            table.add_row(*(Text(column.text(row)) for column in columns))
        if self._shown:
            # A key changes the client that was chosen, wherever its row is by now.
            numbers = [row.number for row in self._shown]
            place = numbers.index(chosen_number) if chosen_number in numbers else min(cursor, len(numbers) - 1)
            table.move_cursor(row=place)
