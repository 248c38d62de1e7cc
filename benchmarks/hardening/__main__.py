"""What damaged files do, how long an import takes and how large the wheel is: benchmarks/results/hardening.json.

    python -m benchmarks.hardening [--count 5000] [--wheel dist/cudasched-*.whl]

Needs no GPU. Takes about half an hour; a figure that cannot be made here (a wheel that was not named) is left out.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hardening import damage, tables
from benchmarks.meta import command_line, current_commit
from benchmarks.results.schema import RESULTS, FigureRow, Meta, Results

GOALS = {"wheel_MB": 4.0, "import_ms": 80.0}
IMPORTS = 30


def figure(name: str, values: Sequence[float], n: int, limited_by: str = "") -> FigureRow:
    """A figure of which less is better; its value is the median."""
    return FigureRow.judged(
        figure=name,
        value=statistics.median(values),
        goal=GOALS.get(name, 0.0),
        better="less",
        low=min(values),
        high=max(values),
        n=n,
        limited_by=limited_by,
    )


def import_ms() -> FigureRow:
    """What `import cudasched` adds to starting Python, in processes that take turns; there is no driver."""

    def started(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    started("import cudasched")
    times = [started("import cudasched") - started("pass") for _ in range(IMPORTS)]
    return figure("import_ms", times, IMPORTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hardening", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="damaged files of each kind")
    parser.add_argument("--wheel", type=Path, help="the wheel whose size counts")
    parser.add_argument("--out", type=Path, default=RESULTS / "hardening.json")
    options = parser.parse_args(arguments)
    rows = []
    if options.wheel:
        rows.append(figure("wheel_MB", [options.wheel.stat().st_size / 1e6], 1))
    rows.append(import_ms())
    rows.append(FigureRow.model_validate(tables.measure(count=options.count)))
    for kind in damage.FILES:
        failed, said = damage.run(kind, options.count)
        print(*said, sep="\n")
        rows.append(figure(f"damaged_{kind}_failed", [failed], options.count, "; ".join(said[:3])))
    meta = Meta(
        gpu="none",
        driver=None,
        cuda=None,
        torch=None,
        python=platform.python_version(),
        commit=current_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        sm_clock_mhz=None,
        command=command_line(),
    )
    Results(meta=meta, rows=rows).write(options.out)
    for row in rows:
        print(f"{row.figure}: {row.value:g} (goal {row.goal:g}, {'met' if row.met else 'missed'}; n = {row.n})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
