"""What damaged files do: benchmarks/results/hardening.json. Takes about half an hour."""

from __future__ import annotations

from functools import partial

from benchmarks.hardening import damage, tables
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session


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
    about="damaged files",
    groups={
        "tables": damaged_tables,
        **{kind: partial(damaged_files, kind=kind) for kind in damage.FILES},
    },
    goals={
        "damaged_tables_failed": (0.0, "less"),
        **{f"damaged_{kind}_failed": (0.0, "less") for kind in damage.FILES},
    },
    settings={"count": (5000, 40)},
    gpu=False,
)
