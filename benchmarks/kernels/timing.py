"""Times arms in turns: each round has a few samples of each, so that a drift of the machine meets all of them.

On a GPU, events stand around each call, behind fills that flush the L2 and hide the host's time: where the GPU reached
the call before the host had launched all of it, it is timed again behind more of them. Without a GPU, the host's clock:
a rehearsal, whose figures say nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Arms = Mapping[str, Callable[[], Any]]
Rounds = dict[str, list[float]]
"""The median of each round, us, by arm."""
Timer = Callable[[Callable[[], Any]], float]
"""The time of one call, us, on an L2 without its arrays."""


class GpuTimer:
    """By events on the current stream."""

    MOST_FILLS = 64

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 << 20
        self._room = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
        self._fills = 4
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, call: Callable[[], Any]) -> float:
        """See `Timer`."""
        while True:
            for _ in range(self._fills):
                self._room.zero_()
            self._begin.record()
            call()
            self._end.record()
            waited = self._begin.query()  # the GPU, for the host
            self._end.synchronize()
            if not waited or self._fills >= self.MOST_FILLS:
                return float(self._begin.elapsed_time(self._end)) * 1e3
            self._fills *= 2


def host_time_us(call: Callable[[], Any]) -> float:
    """By the host's clock; nothing is flushed."""
    began = time.perf_counter()
    call()
    return max((time.perf_counter() - began) * 1e6, 1e-3)


def in_turns(timer: Timer, arms: Arms, *, rounds: int, samples: int, warm_up: int = 3) -> Rounds:
    """Times arms in turns; each round begins with another one."""
    for call in arms.values():
        for _ in range(warm_up):
            call()
    names = list(arms)
    found: Rounds = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(statistics.median(timer(arms[name]) for _ in range(samples)))
    return found
