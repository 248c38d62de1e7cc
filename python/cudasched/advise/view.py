"""A report for people: as a table in a terminal of any width, and as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cudasched.advise.report import Finding, Kernel, Report
from cudasched.errors import Error

__all__ = ["html", "terminal"]

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_STYLES = {"critical": "bold red", "warning": "yellow", "good": "green"}
_WIDE_COLUMNS, _MEDIUM_COLUMNS = 110, 70
_MAX_NAME_CHARS = 48


def _time(time_ns: float | None) -> str:
    if time_ns is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.3g} {unit}" if time_ns < 1000 * size else f"{time_ns / size:.0f} {unit}"
    return f"{time_ns:.0f} ns"


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


def _printable(text: str) -> str:
    """Names come from programs: what would move a terminal's cursor is shown as it is written in Python."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _short(name: str) -> str:
    name = _printable(name)
    return name if len(name) <= _MAX_NAME_CHARS else "..." + name[3 - _MAX_NAME_CHARS :]


def _label(kernel: Kernel) -> str:
    return f"graph {kernel.graph}" if kernel.kind == "graph" else kernel.name


_Cell = Callable[[Kernel], str]

_COLUMNS: tuple[tuple[str, int, _Cell], ...] = (
    ("time", 0, lambda kernel: _time(kernel.time_ns)),
    ("share", 0, lambda kernel: _percent(kernel.share)),
    ("at stake", 0, lambda kernel: _time(kernel.time_at_stake_ns)),
    ("launches", _MEDIUM_COLUMNS, lambda kernel: str(kernel.launches)),
    ("grid", _MEDIUM_COLUMNS, lambda kernel: _shape(kernel.grid) if kernel.kind == "kernel" else "-"),
    ("block", _MEDIUM_COLUMNS, lambda kernel: _shape(kernel.block) if kernel.kind == "kernel" else "-"),
    ("each", _WIDE_COLUMNS, lambda kernel: _time(kernel.mean_ns)),
    ("predicted", _WIDE_COLUMNS, lambda kernel: _time(kernel.predicted_ns)),
    ("occupancy", _WIDE_COLUMNS, lambda kernel: _percent(kernel.occupancy)),
    ("waves", _WIDE_COLUMNS, _waves),
    ("lanes", _WIDE_COLUMNS, lambda kernel: _percent(kernel.block_efficiency)),
)
"""Title, the least width of the terminal that it is shown in, and the cell."""


def _advice(findings: tuple[Finding, ...]) -> Iterator[Text]:
    for finding in findings:
        gain = f"up to {_percent(finding.expected_gain)}"
        at_stake = "" if finding.time_at_stake_ns is None else f", {_time(finding.time_at_stake_ns)}"
        yield Text.assemble(
            (f"{finding.level}: ", _STYLES[finding.level]),
            _printable(finding.reason),
            "; ",
            _printable(finding.recommendation),
            (f" ({gain}{at_stake})", "dim"),
        )


def terminal(report: Report, *, columns: int, top: int) -> RenderableType:
    """The report for a terminal.

    Args:
        report: What to show.
        columns: Width of the terminal; a narrow one gets fewer columns and the same advice.
        top: At most so many kernels; 0: all.
    """
    title = f"{report.launches} launches, {_time(report.time_ns)} on {_printable(report.gpu) or 'an unnamed GPU'}"
    parts: list[RenderableType] = [
        Text(f"{_printable(report.command)}: {title}" if report.command else title, style="bold")
    ]
    parts += _advice(report.program)
    shown = report.kernels[:top] if top else report.kernels
    if shown:
        narrow = columns < _MEDIUM_COLUMNS
        table = Table(expand=False, box=None, pad_edge=False)
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("kernel", overflow="fold", ratio=1)
        chosen = [column for column in _COLUMNS if columns >= column[1] and not (narrow and column[0] == "share")]
        if all(kernel.predicted_ns is None for kernel in shown):
            chosen = [column for column in chosen if column[0] != "predicted"]
        for heading, _, _ in chosen:
            table.add_column(heading, justify="right", no_wrap=True)
        for number, kernel in enumerate(shown, 1):
            label = Text(_short(_label(kernel)), style=_STYLES[kernel.level])
            if kernel.kind == "kernel" and kernel.origin != "own" and not narrow:
                label.append(f" [{kernel.origin}]", style="dim")
            table.add_row(str(number), label, *(Text(cell(kernel)) for _, _, cell in chosen))
        parts += [Text(), table]
        advised = [(number, kernel) for number, kernel in enumerate(shown, 1) if kernel.findings]
        if advised:
            parts.append(Text())
        for number, kernel in advised:
            lines = Table.grid(padding=(0, 1))
            lines.add_column(justify="right", no_wrap=True)
            lines.add_column(overflow="fold")
            head = Text(
                f"{_short(_label(kernel))} (grid {_shape(kernel.grid)}, block {_shape(kernel.block)})", style="bold"
            )
            lines.add_row(f"{number}", head)
            for line in _advice(kernel.findings):
                lines.add_row("", line)
            parts.append(lines)
        if not advised and not report.program:
            parts += [Text(), Text("nothing to change in launch shapes", style="green")]
        if len(shown) < len(report.kernels):
            parts.append(
                Text(f"and {len(report.kernels) - len(shown)} more kernels: --top 0 shows them all", style="dim")
            )
    parts += [Text(f"note: {_printable(note)}", style="dim") for note in report.notes]
    return Group(*parts)


def html(report: Report) -> str:
    """The report as one HTML document: no script, nothing fetched, every name escaped.

    Raises:
        Error: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise Error("HTML reports need jinja2: pip install 'cudasched[advise]'") from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Callable[..., Any]] = {
        "time": _time,
        "percent": _percent,
        "shape": _shape,
        "waves": _waves,
        "label": _label,
        "printable": _printable,
    }
    environment.filters.update(filters)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(report=report)
