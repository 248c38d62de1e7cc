"""What damaged files do, how long an import takes and how large the wheel is: benchmarks/results/hardening.json.

Takes about half an hour; the wheel has a figure where `--wheel` names it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.hardening import damage, tables
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session

IMPORTS = 30


def wheel(session: Session) -> Found:
    """Its size."""
    if session.options.wheel is None:
        return {}
    size = session.options.wheel.stat().st_size / 1e6
    return {"wheel_MB": (size, size, size, 1)}


def imported(session: Session) -> Found:
    """What `import cudasched` adds to starting Python, in processes that take turns; there is no driver."""
    del session

    def started(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    started("import cudasched")
    times = [started("import cudasched") - started("pass") for _ in range(IMPORTS)]
    return {"import_ms": (statistics.median(times), min(times), max(times), IMPORTS)}


def failed(session: Session, figure: str, count: int, why: list[str]) -> Found:
    """A count of failures, and what is said of the first of them."""
    session.limits[figure] = "; ".join(why[:3])
    return {figure: (count, count, count, session.options.count)}


def damaged_tables(session: Session) -> Found:
    """Tables of clients."""
    count, why = tables.measure(count=session.options.count)
    return failed(session, "damaged_tables_failed", count, why)


def damaged_files(session: Session, kind: str) -> Found:
    """Files of one kind."""
    count, why = damage.run(kind, session.options.count)
    print(*why, sep="\n")
    return failed(session, f"damaged_{kind}_failed", count, why)


BENCHMARK = Benchmark(
    about="damaged files, the time of an import and the size of the wheel",
    groups={
        "wheel": wheel,
        "import": imported,
        "tables": damaged_tables,
        **{kind: partial(damaged_files, kind=kind) for kind in damage.FILES},
    },
    goals={
        "wheel_MB": (4.0, "less"),
        "import_ms": (80.0, "less"),
        "damaged_tables_failed": (0.0, "less"),
        **{f"damaged_{kind}_failed": (0.0, "less") for kind in damage.FILES},
    },
    settings={"count": (5000, 40), "wheel": Path},
    gpu=False,
)
