"""Writes the tables of README.md and docs/ from benchmarks/results; `--check` only says which are stale.

A document asks for a table by a marker, and what stands between it and the end is replaced:

    <!-- table:colocation -->
    <!-- end -->

`table:NAME` is benchmarks/results/NAME.json. `--plots DIR` also writes a plot of each pair of loads that it holds.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from benchmarks.results.schema import RESULTS, ColocationRow, OverheadRow, Results, load, replace

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: Lines under the arms, and the modes that they hold for.
BOUNDS = {"bound, one process or MPS": ("one_process", "mps"), "bound, two processes": ("two_processes",)}


def documents(root: Path = ROOT) -> list[Path]:
    """Every document that may ask for a table."""
    return [path for path in [root / "README.md", *sorted((root / "docs").glob("**/*.md"))] if path.exists()]


def rendered(text: str, results: Path = RESULTS) -> str:
    """A document with its tables made anew.

    Raises:
        ValueError: It asks for results that are not there or do not meet the schema.
    """

    def table(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        try:
            return f"{match[1]}{table_of(load(path))}{match[3]}"
        except (OSError, ValidationError) as error:
            raise ValueError(f"table:{match['name']}: {path}: {error}") from error

    return MARKED.sub(table, text)


def table_of(results: Results) -> str:
    """The table of one results file, in markdown, and a line that says where it was measured."""
    meta = results.meta
    known = (("driver", meta.driver), ("CUDA", meta.cuda), ("PyTorch", meta.torch))
    versions = "".join(f", {name} {value}" for name, value in known if value)
    made = f"{meta.gpu}{versions}, {meta.date[:10]}, commit {meta.commit or 'unknown'}."
    if any(isinstance(row, OverheadRow) for row in results.rows):
        return f"{overhead_table(results)}\n{made}\n"
    return f"{colocation_table(results)}\n{made}\n"


def colocation_table(results: Results) -> str:
    """A table for each latency load and arrivals: an arm a line, a best-effort load a column."""
    rows = [row for row in results.rows if isinstance(row, ColocationRow)]
    tables = []
    for latency, arrivals, rate_hz in dict.fromkeys((row.latency_load, row.arrivals, row.rate_hz) for row in rows):
        these = [row for row in rows if (row.latency_load, row.arrivals, row.rate_hz) == (latency, arrivals, rate_hz)]
        loads = list(dict.fromkeys(row.best_effort_load for row in these))
        lines = [
            f"`{latency}`, {arrivals} {rate_hz:g}/s: P50/P95/P99 ms (P99 / alone), best effort of what is left to it.",
            "",
            f"| arm | {' | '.join(f'beside {beside}' for beside in loads)} |",
            f"|---|{'---|' * len(loads)}",
        ]
        for arm, lead_us in dict.fromkeys((row.arm, row.lead_us) for row in these):
            own = {row.best_effort_load: row for row in these if (row.arm, row.lead_us) == (arm, lead_us)}
            several = len({row.lead_us for row in these if row.arm == arm}) > 1
            name = arm.replace("_", " ") + (f", lead {lead_us:g} us" if several and lead_us is not None else "")
            cells = [_colocation_cell(own[beside]) if beside in own else "" for beside in loads]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        for name, modes in BOUNDS.items():
            bounded = [row for row in these if row.mode in modes]
            cells = [_bound_cell(row for row in bounded if row.best_effort_load == beside) for beside in loads]
            if any(cells):
                lines.append(f"| {name}: P99 | {' | '.join(cells)} |")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def overhead_table(results: Results) -> str:
    """A line for each thing measured."""
    lines = ["| what | median ns | P99 ns | without, median ns | added ns |", "|---|---|---|---|---|"]
    for row in results.rows:
        if isinstance(row, OverheadRow):
            added = row.ns_median - row.baseline_ns_median if row.added_ns_median is None else row.added_ns_median
            lines.append(
                f"| {row.what} | {row.ns_median:.0f} | {row.ns_p99:.0f} | {row.baseline_ns_median:.0f} | {added:+.0f} |"
            )
    return "\n".join(lines) + "\n"


def _colocation_cell(row: ColocationRow) -> str:
    parts = []
    if row.latency_ms:
        shares = "/".join(f"{value:.2f}" for value in (row.latency_ms.p50, row.latency_ms.p95, row.latency_ms.p99))
        parts.append(f"{shares} ({row.p99_ratio:.2f}x)" if row.p99_ratio else shares)
    if row.best_effort_per_s:
        rate = f"{row.best_effort_per_s:.1f}/s" if row.best_effort_per_s < 1000 else f"{row.best_effort_per_s:.0f}/s"
        parts.append(f"{rate}, {row.best_effort_ratio:.0%}" if row.best_effort_ratio else rate)
    return " · ".join(parts)


def _bound_cell(rows: Iterable[ColocationRow]) -> str:
    bounds = [row.bound_p99_ms for row in rows if row.bound_p99_ms]
    return f"{bounds[0]:.2f}" if bounds else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text. The exit status is 1 for stale tables under `--check` and for errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is stale")
    parser.add_argument("--plots", type=Path, help="write plots of the colocation results to this directory")
    options = parser.parse_args(arguments)
    stale = []
    try:
        for path in documents():
            text = path.read_text()
            new = rendered(text)
            if new != text:
                stale.append(path)
                if not options.check:
                    replace(path, new)
                print(f"{path.relative_to(ROOT)}: {'stale' if options.check else 'written'}")
    except ValueError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 1
    if options.plots:
        from benchmarks.colocation.__main__ import write_plots

        for path in sorted(RESULTS.glob("*.json")):
            write_plots(load(path), options.plots / path.name)
    if options.check and stale:
        print("stale tables: python -m benchmarks.tables makes them anew", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
