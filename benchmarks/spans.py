"""Figures in prose: a span names the rows that it comes from, and `python -m benchmarks.tables` writes it.

    P99 is <!-- figure:breadth median p99_ratio arm=cudasched_mps .2f -->1.12<!-- end --> x alone

A query is benchmarks/results/FILE.json and words, in any order:

- a field of the rows (`latency_ms.p99`), or a name of `DERIVED`;
- conditions: `arm=mps,mps_priority` is either text, `p99_ratio>2` and `best_effort_of_time_slices<0.97` compare;
- `median`, `mean`, `min`, `max` or `sum` of several rows, or their `count`; without one there is one row;
- a format of Python's for the figure (`.2f`, `.0%`, `,.0f`); `.3g` by default.

In `CLAIMS` a measured figure outside of a span is an error. Where it comes from no results file, the reason is given:

    <!-- stated: the length that is set -->1 us<!-- end -->
"""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import best_effort_of_time_slices, p50_of_alone
from benchmarks.results.schema import ColocationRow, Results, load

SPAN = re.compile(r"(?P<start><!-- figure:(?P<file>\w+) (?P<query>[^\n]*?) -->)(?P<was>.*?)(?P<end><!-- end -->)")

REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "sum": sum,
    "count": len,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}
_CONDITION = re.compile(r"(?P<field>[\w.]+)(?P<how>[=<>])(?P<wanted>\S+)$")
_FORMAT = re.compile(r",?\.\d+[fg%]$")


def _p99_of_bound(_: Results, row: ColocationRow) -> float | None:
    return row.latency_ms.p99 / row.bound_p99_ms if row.latency_ms and row.bound_p99_ms else None


def _best_effort_of_alone(_: Results, row: ColocationRow) -> float | None:
    return (
        row.best_effort_per_s / row.best_effort_alone_per_s
        if row.best_effort_per_s and row.best_effort_alone_per_s
        else None
    )


#: Values of a colocation row that follow from several of its fields, or from another row.
DERIVED: dict[str, Callable[[Results, ColocationRow], float | None]] = {
    "best_effort_of_time_slices": best_effort_of_time_slices,
    "best_effort_of_alone": _best_effort_of_alone,
    "p50_of_alone": lambda _, row: p50_of_alone(row),
    "p99_of_bound": _p99_of_bound,
}

#: The part of a document that claims something: all of README but its section on versions, the first screen of results.
CLAIMS = {
    "README.md": re.compile(r"^## Install\n.*?(?=^## )", re.MULTILINE | re.DOTALL),
    "results.md": re.compile(r"^## How to read the tables\n.*", re.MULTILINE | re.DOTALL),
}
_CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
#: Generated tables and targets of links: no claims either.
_HIDDEN = re.compile(r"<!-- table:.*?<!-- end -->|\]\([^)\n]*\)", re.DOTALL)
_STATED = re.compile(r"<!-- stated: \S[^\n]*? -->.*?<!-- end -->", re.DOTALL)
_NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|two|three|four|five|six|seven|eight|nine|ten|half)"
#: A number with a unit, also "6 to §%", and each one with a decimal point. § stands for a span.
_MEASURED = re.compile(
    rf"(?<![\w.§]){_NUMBER}(?:%?(?:,? (?:to|and|or)|,) (?:{_NUMBER}|§))*(?:%|\s(?:x|ms|us|ns|times)\b)"
    r"|(?<![\w.§])\d+\.\d+"
)


class SpanError(ValueError):
    """A span asks for a row, a field or a file that is not there."""


def written(text: str, results: Path, stale: list[str] | None = None) -> str:
    """A document with the figures of its spans made anew.

    Args:
        text: The document.
        results: The directory of results files.
        stale: Gets a line for each span that said something else.

    Raises:
        SpanError: A query names no file, no row or no value, or several rows without a word for how they are one.
    """
    loaded: dict[str, Results] = {}
    shown = _CODE.sub(_blank, text)
    for opened in re.finditer("<!-- figure:", shown):
        if not SPAN.match(shown, opened.start()):
            raise SpanError(f"{_line(text, opened.start())}: a figure's span does not end in its line, or has no query")

    def span(match: re.Match[str]) -> str:
        file, query = match["file"], match["query"]
        try:
            if file not in loaded:
                loaded[file] = load(results / f"{file}.json")
            says = figure(loaded[file], query)
        except (OSError, ValueError) as error:
            raise SpanError(f"figure:{file} {query}: {error}") from error
        if stale is not None and says != match["was"]:
            stale.append(f"{_line(text, match.start())}: figure:{file} {query}: {match['was']} is {says} now")
        return f"{match['start']}{says}{match['end']}"

    return SPAN.sub(span, text)


def figure(results: Results, query: str) -> str:
    """The text of one figure.

    Raises:
        ValueError: No row meets the conditions, which are named, or the query does not say one figure.
    """
    rows: Sequence[Any] = results.rows
    how, field, spec = "", "", ".3g"
    for word in query.split():
        condition = _CONDITION.match(word)
        if condition:
            rows = [row for row in rows if _meets(_value(results, row, condition["field"]), **condition.groupdict())]
            if not rows:
                raise ValueError(f"there is no row with {word}")
        elif word in REDUCTIONS:
            how = word
        elif _FORMAT.match(word):
            spec = word
        elif field:
            raise ValueError(f"it names two values, {field} and {word}")
        else:
            field = word
    if how == "count" and not field:
        return str(len(rows))
    if not any(_has(row, field) for row in rows):
        raise ValueError(f"no row has a field {field or '(none is named)'}")
    values = [value for row in rows if (value := _value(results, row, field)) is not None]
    if not values:
        raise ValueError(f"{field} was not measured in these rows")
    if not how and len(values) > 1:
        raise ValueError(f"{len(values)} rows meet it: add a condition, or one of {', '.join(REDUCTIONS)}")
    made = REDUCTIONS[how or "max"](values)
    return str(made) if how == "count" else format(made, spec)


def unmarked(name: str, text: str) -> list[str]:
    """The measured figures in a document's claims that stand in no span, each with its line."""
    if name not in CLAIMS:
        return []
    for pattern in (CLAIMS[name], _CODE, SPAN, _STATED, _HIDDEN):
        text = pattern.sub(_blank, text)
    return [f"{_line(text, each.start())}: {each[0]!r} is in no span" for each in _MEASURED.finditer(text)]


def _blank(match: re.Match[str]) -> str:
    """What takes a match's place: a mark for a span, and as many lines."""
    return ("§" if match.re is SPAN else "") + "\n" * match[0].count("\n")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _has(row: object, field: str) -> bool:
    return hasattr(row, field.partition(".")[0]) or (field in DERIVED and isinstance(row, ColocationRow))


def _value(results: Results, row: object, field: str) -> Any:
    """A row's value by its name; None where it has none."""
    if field in DERIVED:
        return DERIVED[field](results, row) if isinstance(row, ColocationRow) else None
    for part in field.split("."):
        row = getattr(row, part, None)
    return row


def _meets(value: object, field: str, how: str, wanted: str) -> bool:
    if how == "=":
        return str("" if value is None else value) in wanted.split(",")
    return isinstance(value, (int, float)) and _COMPARE[how](value, float(wanted))
