"""What recording costs the host of the recorded program."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "COST_US", "slowed"]

COLUMNS = ("pid", "device", "submitted_ns", "start_ns", "duration_ns")
"""Those that `slowed` reads."""
COST_US: Mapping[str, float] = {"cupti": 1.7, "events": 3.0}
"""What recording adds to the host's time for a launch, by timing (benchmarks/results/collect.json)."""
_AHEAD_NS = 20_000
"""A launch that starts so long after its call waited for the GPU, and not the GPU for it (csrc/simulate/inputs.cpp)."""
_PAUSE_NS = 1_000_000
"""In a longer one the program has nothing to launch."""
_LEAST = 0.02
"""A smaller share of the time is not worth a word."""


def slowed(parts: Iterable[pa.Table], timing: str) -> str:
    """Whether recording slowed the program that launched most, for people; empty: not that we know.

    The time is that in which the program kept launching. A recording does not tell how long its launches had taken
    otherwise: the known cost counts where the GPU waited for the host, at most once for each such wait.

    Args:
        parts: Of a recording, one after another, with at least `COLUMNS`.
        timing: Of the recording.
    """
    import pyarrow.compute as pc

    cost_ns = round(COST_US.get(timing, 0.0) * 1e3)
    totals: dict[tuple[int, int], list[int]] = {}
    for part in parts if cost_ns else ():
        timed = part.select(COLUMNS).filter(
            functools.reduce(pc.and_, (pc.is_valid(part[each]) for each in COLUMNS[2:]))
        )
        for place in set(zip(timed["pid"].to_pylist(), timed["device"].to_pylist(), strict=True)):
            here = pc.and_(pc.equal(timed["pid"], place[0]), pc.equal(timed["device"], place[1]))
            found = _times(timed.filter(here).sort_by("start_ns"), cost_ns)
            totals[place] = [sum(both) for both in zip(totals.get(place, (0, 0, 0, 0)), found, strict=True)]
    _, worked, waits, known = max(totals.values(), default=(0, 1, 0, 0))
    if known <= _LEAST * worked:
        return ""
    return (
        f"recording slowed its host, for which the GPU waits {waits / worked:.0%} of the time: the known "
        f"{cost_ns / 1e3:g} us for each launch are {known / worked:.0%} of the time, and it may be more. Measure the "
        "program's speed without recording; --recording-us of forecasts is the difference for one launch"
    )


def _times(timed: pa.Table, cost_ns: int) -> tuple[int, int, int, int]:
    """Launches, the time in which the program kept launching, the GPU's waits for the host, and the cost in these."""
    import pyarrow.compute as pc

    submitted, start, duration = (timed[name] for name in COLUMNS[2:])
    until = pc.cumulative_max(pc.add(start, duration))
    later = start.slice(1)
    idle = pc.max_element_wise(pc.subtract(later, until.slice(0, len(until) - 1)), 0)
    pauses = pc.sum(idle.filter(pc.greater(idle, _PAUSE_NS))).as_py() or 0
    is_wait = pc.and_(pc.less_equal(idle, _PAUSE_NS), pc.less_equal(pc.subtract(later, submitted.slice(1)), _AHEAD_NS))
    waits = idle.filter(is_wait)
    known = pc.sum(pc.min_element_wise(waits, cost_ns)).as_py() or 0
    worked = max(until[-1].as_py() - start[0].as_py() - pauses, 1)
    return len(timed), worked, pc.sum(waits).as_py() or 0, known
