"""A report for people: as a table in a terminal of any width, and as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cudasched._document import page
from cudasched._text import duration, printable
from cudasched.advise.diff import Change
from cudasched.advise.report import Finding, Function, Kernel, Report

__all__ = ["changes", "html", "terminal"]

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_STYLES = {"critical": "bold red", "warning": "yellow", "good": "green", "not judged": "dim"}
_MOST_AFFECTED = 5
_MEDIUM_COLUMNS = 70
_LEAST_NAME_CHARS, _MAX_NAME_CHARS = 30, 48


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f}%" if 0 < part < 0.1 else f"{100 * part:.0f}%"


def _shape(sizes: tuple[int, int, int]) -> str:
    kept = list(sizes)
    while len(kept) > 1 and kept[-1] <= 1:
        kept.pop()
    return "x".join(map(str, kept))


def _waves(kernel: Kernel) -> str:
    if kernel.waves is None:
        return "-"
    return f"{kernel.waves:.2f}" if kernel.waves < 100 else f"{kernel.waves:.0f}"


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _MAX_NAME_CHARS else "..." + name[3 - _MAX_NAME_CHARS :]


_Cell = Callable[[Function, Kernel], str]

_COLUMNS: tuple[tuple[str, int, _Cell], ...] = (
    ("time", 0, lambda function, _: duration(function.time_ns)),
    ("share", 9, lambda function, _: _percent(function.share)),
    ("at stake", 0, lambda function, _: duration(function.time_at_stake_ns) if function.level != "not judged" else "-"),
    ("launches", 8, lambda function, _: str(function.launches)),
    ("shapes", 3, lambda function, _: str(len(function.shapes))),
    ("grid", 5, lambda _, kernel: _shape(kernel.grid) if kernel.kind == "kernel" else "-"),
    ("block", 4, lambda _, kernel: _shape(kernel.block) if kernel.kind == "kernel" else "-"),
    ("each", 7, lambda _, kernel: duration(kernel.mean_ns)),
    ("predicted", 6, lambda _, kernel: duration(kernel.predicted_ns)),
    ("occupancy", 5, lambda _, kernel: _percent(kernel.occupancy)),
    ("waves", 2, lambda _, kernel: _waves(kernel)),
    ("lanes", 1, lambda _, kernel: _percent(kernel.block_efficiency)),
    ("of peak", 4, lambda _, kernel: _percent(kernel.peak_share)),
)
"""Title, importance, and the cell; a shape is the one with the most time.

The least important columns go first where there is no room for names; 0: never.
"""


def _fitting(rows: Sequence[tuple[Function, Kernel]], columns: int, left_out: Collection[str]) -> list[int]:
    """The places in `_COLUMNS` of those that leave the names room.

    Args:
        rows: The rows to show.
        columns: Width of the terminal.
        left_out: Titles that are not wanted.
    """

    def width(place: int) -> int:
        title, _, cell = _COLUMNS[place]
        return 2 + max(len(title), *(len(cell(*row)) for row in rows))

    chosen = [place for place, (title, _, _) in enumerate(_COLUMNS) if title not in left_out]
    taken = 2 + len(str(len(rows))) + sum(map(width, chosen))
    while columns - taken < _LEAST_NAME_CHARS and any(_COLUMNS[place][1] for place in chosen):
        least = min((place for place in chosen if _COLUMNS[place][1]), key=lambda place: _COLUMNS[place][1])
        chosen.remove(least)
        taken -= width(least)
    return chosen


def _advice(findings: tuple[Finding, ...]) -> Iterator[Text]:
    for finding in findings:
        gain = f"up to {_percent(finding.expected_gain)}"
        at_stake = "" if finding.time_at_stake_ns is None else f", {duration(finding.time_at_stake_ns)}"
        yield Text.assemble(
            (f"{finding.level}: ", _STYLES[finding.level]),
            printable(finding.reason),
            "; ",
            printable(finding.recommendation),
            (f" ({_estimate(finding)} {gain}{at_stake})", "dim"),
        )
        for affected in finding.kernels[:_MOST_AFFECTED]:
            yield Text(
                f"  {_short(affected.name)}: {affected.launches} launches, {duration(affected.time_at_stake_ns)}",
                style="dim",
            )
        if len(finding.kernels) > _MOST_AFFECTED:
            yield Text(f"  and {len(finding.kernels) - _MOST_AFFECTED} more kernels", style="dim")


def _estimate(finding: Finding) -> str:
    """The evidence for a gain."""
    made_for_it = "the advice helped a kernel made for it" if finding.shown else "not yet measured on a kernel"
    return f"an estimate, {made_for_it}:"


def terminal(report: Report, *, columns: int, top: int) -> RenderableType:
    """The report for a terminal.

    Args:
        report: The report to show.
        columns: Width of the terminal; a narrow one gets fewer columns and the same advice.
        top: At most so many kernels; 0: all.
    """
    title = f"{report.launches} launches, {duration(report.time_ns)} on {printable(report.gpu) or 'an unnamed GPU'}"
    parts: list[RenderableType] = [
        Text(f"{printable(report.command)}: {title}" if report.command else title, style="bold")
    ]
    parts += _advice(report.program)
    shown = report.functions[:top] if top else report.functions
    if shown:
        narrow = columns < _MEDIUM_COLUMNS
        table = Table(expand=False, box=None, pad_edge=False)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("kernel", overflow="fold", ratio=1)
        rows = [(function, report.kernels[function.shapes[0]]) for function in shown]
        known = {
            "predicted": any(kernel.predicted_ns is not None for kernel in report.kernels),
            "of peak": any(kernel.peak_share is not None for kernel in report.kernels),
        }
        places = _fitting(rows, columns, [title for title, there in known.items() if not there])
        chosen = [_COLUMNS[place] for place in places]
        for heading, _, _ in chosen:
            table.add_column(heading, justify="right", no_wrap=True)
        for number, (function, most) in enumerate(rows, 1):
            label = Text(_short(function.name), style=_STYLES[function.level])
            if function.origin not in ("own", "graph") and not narrow:
                label.append(f" [{function.origin}]", style="dim")
            table.add_row(str(number), label, *(Text(cell(function, most)) for _, _, cell in chosen))
        parts += [Text(), table]
        advised = [(number, function) for number, function in enumerate(shown, 1) if _advised(report, function)]
        if advised:
            parts.append(Text())
        for number, function in advised:
            parts.append(_of_function(number, function, _advised(report, function)))
        judged = any(function.level != "not judged" for function in shown)
        if not advised and not report.program:
            nothing = "nothing to change in launch shapes" if judged else "no kernel here is the user's to change"
            parts += [Text(), Text(nothing, style="green" if judged else "dim")]
        if len(shown) < len(report.functions):
            parts.append(
                Text(f"and {len(report.functions) - len(shown)} more kernels: --top 0 shows them all", style="dim")
            )
    parts += [Text(f"note: {printable(note)}", style="dim") for note in report.notes]
    return Group(*parts)


def _advised(report: Report, function: Function) -> list[Kernel]:
    """The launch shapes of a function that there is advice on."""
    return [report.kernels[place] for place in function.shapes if report.kernels[place].findings]


def _of_function(number: int, function: Function, shapes: list[Kernel]) -> RenderableType:
    """The advice on a function: on its shape with the most time, and how many others have some too."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(justify="right", no_wrap=True)
    lines.add_column(overflow="fold")
    most = shapes[0]
    head = f"{_short(function.name)} (grid {_shape(most.grid)}, block {_shape(most.block)})"
    lines.add_row(f"{number}", Text(head, style="bold"))
    for line in _advice(most.findings):
        lines.add_row("", line)
    if len(shapes) > 1:
        lines.add_row("", Text(f"and {len(shapes) - 1} more of its launch shapes: see --json", style="dim"))
    return lines


def changes(found: Sequence[Change], *, top: int) -> RenderableType:
    """The changes between two runs, for a terminal.

    Args:
        found: The result of `cudasched.advise.diff`.
        top: At most so many kernels; 0: all.
    """
    table = Table(expand=False, box=None, pad_edge=False)
    table.add_column("kernel", overflow="fold", ratio=1)
    for heading in ("before", "after", "change", "launches", "each"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in found[:top] if top else found:
        sign = "-" if change.change_ns < 0 else "+"
        launches = str(change.before_launches)
        if change.after_launches != change.before_launches:
            launches += f" -> {change.after_launches}"
        table.add_row(
            Text(_short(change.name)),
            duration(change.before_ns),
            duration(change.after_ns),
            f"{sign}{duration(abs(change.change_ns))}",
            launches,
            "-" if change.each is None else f"{change.each:.2f} x",
        )
    return table


def html(report: Report) -> str:
    """The report as one HTML document: the advice first, by the time at stake; no script, nothing fetched, all escaped.

    Raises:
        Error: jinja2 is not installed.
    """
    filters: dict[str, Callable[..., Any]] = {
        "time": duration,
        "percent": _percent,
        "shape": _shape,
        "waves": _waves,
        "estimate": _estimate,
    }
    advised = [(place, kernel) for place, kernel in enumerate(report.kernels) if kernel.findings]
    advised.sort(key=lambda one: -(one[1].time_at_stake_ns or 0))
    return page(_TEMPLATE, "advise", filters, report=report, advised=advised)
