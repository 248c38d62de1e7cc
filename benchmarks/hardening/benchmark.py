"""What damaged tables do: benchmarks/results/hardening.json. `python -m tests.soak.mutations` damages files."""

from __future__ import annotations

from benchmarks.hardening import tables
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Found, Session


def damaged_tables(session: Session) -> Found:
    """How many tables of clients harmed a program, and in which ways the first of them did."""
    count, why = tables.measure(count=session.options.count)
    session.limits["damaged_tables_failed"] = "; ".join(why[:3])
    return {"damaged_tables_failed": (count, count, count, session.options.count)}


BENCHMARK = Benchmark(
    about="damaged tables of clients",
    groups={"tables": damaged_tables},
    goals={"damaged_tables_failed": (0.0, "less")},
    settings={"count": (5000, 40)},
    gpu=False,
)
