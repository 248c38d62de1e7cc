"""An analysis for people: tables in a terminal, and one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._document import page
from cudasched._table import Column, fitted
from cudasched._text import duration, printable
from cudasched.observe.analyze._model import Analysis, Counters

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["html", "terminal"]

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_SHOWN_STALLS = 3
_TELLING_CHARS = 12


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.0f}%"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _stalls(seen: Counters) -> str:
    most = [(reason, cycles) for reason, cycles in seen.stalls.items() if cycles >= 0.05][:_SHOWN_STALLS]
    return ", ".join(f"{reason.replace('_', ' ')} {cycles:.1f}" for reason, cycles in most) or "-"


def _name(name: str) -> str:
    """Without namespaces, where it says enough by itself."""
    last = name.rpartition("::")[2]
    return printable(last if len(last) >= _TELLING_CHARS else name)


def terminal(analysis: Analysis, *, columns: int, top: int) -> RenderableType:
    """The analysis for a terminal: the advice, then the counters, then the conclusions.

    Args:
        analysis: The analysis to show.
        columns: Width of the terminal; a narrow one gets fewer columns.
        top: At most so many kernels of the advice; 0: all.
    """
    from rich.console import Group
    from rich.text import Text

    from cudasched.advise.view import terminal as advice

    parts: list[RenderableType] = [advice(analysis.advice, columns=columns, top=top)]
    shown = analysis.kernels
    # Kernels have the numbers of the table above: names of a library are alike for half of the length.
    place = {one.function: number for number, one in enumerate(analysis.advice.functions, 1)}
    numbers = [str(place[one.function]) for one in shown]
    if shown:
        parts += [
            Text("\nhardware counters, the most time first", style="bold"),
            fitted(
                [
                    Column("#", numbers, is_number=True),
                    Column("kernel", [_name(one.name) for one in shown], may_shorten=True),
                    Column("share", [_share(one.share) for one in shown], 1, is_number=True),
                    Column("SMs", [_percent(one.counters.sm_percent) for one in shown], 7, is_number=True),
                    Column("DRAM", [_percent(one.counters.dram_percent) for one in shown], 9, is_number=True),
                    Column("L2 hits", [_percent(one.counters.l2_hit_percent) for one in shown], 5, is_number=True),
                    Column("tensor", [_percent(one.counters.tensor_percent) for one in shown], 6, is_number=True),
                    Column("warps", [_percent(one.counters.warps_percent) for one in shown], 2, is_number=True),
                    Column("sectors/load", [_ratio(one.counters.load_sectors) for one in shown], 4, is_number=True),
                    Column("/store", [_ratio(one.counters.store_sectors) for one in shown], 3, is_number=True),
                    Column("waits for (cycles)", [_stalls(one.counters) for one in shown], 8),
                ],
                columns,
            ),
        ]
        for number, one in zip(numbers, shown, strict=True):
            for conclusion in one.conclusions:
                parts.append(
                    Text.assemble(
                        (f"{number} {_name(one.name)}: ", "bold"),
                        conclusion.reason,
                        "; ",
                        conclusion.recommendation,
                    )
                )
        if not any(one.conclusions for one in shown):
            parts.append(Text("the counters show nothing to change", style="green"))
    parts += [Text(f"note: {printable(note)}", style="dim") for note in analysis.notes]
    return Group(*parts)


def html(analysis: Analysis) -> str:
    """The analysis as one HTML document: no script, nothing fetched, every name escaped.

    Raises:
        Error: jinja2 is not installed.
    """
    filters: dict[str, Callable[..., Any]] = {
        "time": duration,
        "share": _share,
        "percent": _percent,
        "ratio": _ratio,
        "stalls": _stalls,
    }
    advised = {kernel.function: kernel.findings for kernel in reversed(analysis.advice.kernels) if kernel.findings}
    return page(_TEMPLATE, "advise", filters, analysis=analysis, advised=advised)
