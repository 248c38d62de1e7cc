"""The physical bound: what a request waits for even if nothing starts once it has arrived.

A request that arrives at a random moment finds one kernel in flight, long ones more likely than short ones, and waits
for its remainder. Added to a request's time on an idle GPU, that is a distribution; its P99 is the bound. The idle GPU
is best one that best-effort work has just left, for a hint (rows.py): its caches hold other data than those of a GPU of
the request's own.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence

#: What changing from one process's context to another's takes without MPS.
CONTEXT_SWITCH_MS = 0.13
#: Requests that are drawn.
DRAWS = 20_000


def bound_p99_ms(
    alone_ms: Sequence[float],
    kernel_us: Sequence[tuple[float, int]],
    busy: float,
    switch_ms: float = 0.0,
    seed: int = 0,
) -> float:
    """P99 of a request on an idle GPU plus the remainder of the one kernel in flight, by Monte Carlo.

    Args:
        alone_ms: Latencies of requests alone.
        kernel_us: Durations of the best-effort load's kernels and how often each occurs.
        busy: Share of the time, 0 to 1, in which the best-effort load has a kernel in flight.
        switch_ms: Added to every draw: the best-effort process's context is the one on the GPU, kernel or not.
        seed: Equal seeds give equal bounds.

    Raises:
        ValueError: No latencies or no kernels.
    """
    if not alone_ms or not kernel_us:
        raise ValueError("a bound needs latencies alone and the durations of kernels")
    chance = random.Random(seed)
    reached = list(itertools.accumulate(duration * count for duration, count in kernel_us))
    totals = []
    for _ in range(DRAWS):
        total = chance.choice(alone_ms) + switch_ms
        if chance.random() < busy:
            place = min(bisect.bisect_right(reached, chance.random() * reached[-1]), len(kernel_us) - 1)
            total += chance.random() * kernel_us[place][0] / 1e3
        totals.append(total)
    totals.sort()
    return totals[int(0.99 * (DRAWS - 1))]
