"""A comparison for people: as a table in a terminal, and as one HTML file with plots that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudasched._document import page
from cudasched._table import Column, fitted
from cudasched._text import printable
from cudasched.observe.baseline._model import Compared, Comparison

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["html", "terminal"]

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_STYLES = {"slower": "bold red", "below the limit": "yellow", "no change": "", "faster": "green"}


def _time(time_ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.4g} {unit}"
    return f"{time_ns:.0f} ns"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _change(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _finds(one: Compared) -> str:
    return "-" if one.detectable is None else f"{100 * one.detectable:.1f}%"


def _p(probability: float) -> str:
    return f"{probability:.2g}"


def headline(found: Comparison) -> str:
    """The outcome in one line."""
    what = (
        f"{len(found.compared)} kernels, regions and waits, {found.before_runs} runs before and {found.after_runs} now"
    )
    if not found.slower:
        return f"nothing got slower beyond noise, of {what}"
    return f"{found.slower} got slower beyond noise, of {what}"


def terminal(found: Comparison, *, columns: int, top: int) -> RenderableType:
    """The comparison for a terminal.

    Args:
        found: The comparison to show.
        columns: Width of the terminal; a narrow one gets fewer columns.
        top: At most so many rows, 0: all; slowdowns are always shown.
    """
    from rich.console import Group
    from rich.text import Text

    shown = found.compared[: max(top, found.slower)] if top else found.compared
    parts: list[RenderableType] = [Text(headline(found), style="bold red" if found.slower else "bold green")]
    if shown:
        parts.append(
            fitted(
                [
                    Column("", [one.verdict for one in shown]),
                    Column("kernel, region or wait", [one.label for one in shown], may_shorten=True),
                    Column("before", [_time(one.before_ns) for one in shown], 5, is_number=True),
                    Column("now", [_time(one.after_ns) for one in shown], 6, is_number=True),
                    Column("change", [_change(one.change) for one in shown], is_number=True),
                    Column("95% interval", [f"{_change(one.low)} to {_change(one.high)}" for one in shown], 7),
                    Column("p", [_p(one.p_slower) for one in shown], 3, is_number=True),
                    Column("noise", [_percent(one.noise) for one in shown], 2, is_number=True),
                    Column("finds", [_finds(one) for one in shown], 4, is_number=True),
                    Column("share", [_percent(one.share) for one in shown], 1, is_number=True),
                ],
                columns,
            )
        )
    if len(shown) < len(found.compared):
        parts.append(Text(f"and {len(found.compared) - len(shown)} more: --top 0 shows them all", style="dim"))
    parts += [Text(f"note: {printable(note)}", style="dim") for note in (*found.notes, _power(found))]
    return Group(*parts)


def _power(found: Comparison) -> str:
    """The necessary number of runs."""
    if found.runs_for_5_percent is None:
        return "5% in the compared kernel with the most noise would not be found by 200 runs a side"
    runs = found.runs_for_5_percent
    return f"5% in the compared kernel with the most noise is found in 95% of checks by {runs} runs a side"


# ---- plots: SVG of our own -------------------------------------------------------------------------------------------

_LEFT, _RIGHT, _ROW, _TOP = 8, 28, 22, 26
_WIDTH = 760
_NAMES = 300


def _nice_step(span: float) -> float:
    """A step that gives about five ticks."""
    raw = max(span, 1e-9) / 5
    size = float(10 ** math.floor(math.log10(raw)))
    return next((factor * size for factor in (1, 2, 5) if factor * size >= raw), 10 * size)


def forest(found: Comparison, most: int = 40) -> dict[str, Any]:
    """Where the marks of the overview are: each change with its interval, over a common axis in percent."""
    rows = found.compared[:most]
    shown = [100 * value for one in rows for value in (one.low, one.high)] + [0.0, 100 * found.least_change]
    low, high = max(min(shown), -60.0), min(max(shown), 150.0)
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin
    left, right = _LEFT + _NAMES, _WIDTH - _RIGHT

    def x(percent: float) -> float:
        return round(left + (right - left) * (min(max(percent, low), high) - low) / (high - low), 1)

    step = _nice_step(high - low)
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {
        "width": _WIDTH,
        "height": _TOP + _ROW * len(rows) + 8,
        "bottom": _TOP + _ROW * len(rows),
        "top": _TOP,
        "ticks": [{"x": x(tick), "text": f"{tick:+g}%" if tick else "0"} for tick in ticks],
        "zero": x(0.0),
        "limit": x(100 * found.least_change),
        "rows": [
            {
                "y": _TOP + _ROW * place + _ROW / 2,
                "low": x(100 * one.low),
                "high": x(100 * one.high),
                "at": x(100 * one.change),
                "one": one,
            }
            for place, one in enumerate(rows)
        ],
        "names_end": left - 10,
    }


def strip(one: Compared) -> dict[str, Any]:
    """Where the dots of one quantity are: each run's time, the baseline's above those of now."""
    both = [*one.before_runs_ns, *one.after_runs_ns]
    low, high = min(both), max(both)
    margin = 0.08 * (high - low) or 0.02 * high or 1.0
    low, high = low - margin, high + margin
    left, right = _LEFT + 70, _WIDTH - 60

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    step = _nice_step(high - low)
    ticks = [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {
        "width": _WIDTH,
        "left": left,
        "right": right,
        "ticks": [{"x": x(tick), "text": _time(tick)} for tick in ticks],
        "sides": [
            {"name": name, "y": y, "dots": [x(value) for value in values], "mean": x(mean)}
            for name, y, values, mean in (
                ("baseline", 18, one.before_runs_ns, one.before_ns),
                ("now", 44, one.after_runs_ns, one.after_ns),
            )
        ],
    }


def _short(text: str, characters: int = 44) -> str:
    text = printable(text)
    return text if len(text) <= characters else "..." + text[3 - characters :]


def html(found: Comparison) -> str:
    """The comparison as one HTML document: no script, nothing fetched, every name escaped.

    Raises:
        Error: jinja2 is not installed.
    """
    filters: dict[str, Callable[..., Any]] = {
        "time": _time,
        "percent": _percent,
        "change": _change,
        "finds": _finds,
        "p": _p,
        "short": _short,
        "strip": strip,
    }
    return page(
        _TEMPLATE,
        "baseline",
        filters,
        found=found,
        headline=headline(found),
        power=_power(found),
        forest=forest(found),
    )
