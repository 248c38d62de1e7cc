"""How long batches of each size take."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence

from cudasched._text import shown
from cudasched.errors import ConfigError

__all__ = ["LONGEST_MS", "Times"]

LONGEST_MS = 3_600_000
"""Of all times that are given."""

_RECENT = 64
_COVERAGE = 0.9


class Times:
    """A bound for each size: a time that nine of ten recent batches do not exceed.

    A size that has not run yet has the time that `predict` gives. Without that its bound lies on a line between the
    nearest sizes that have run, grows with the size beyond the largest of them, and is that of the smallest below it.

    Args:
        sizes: Of batches, ascending. A batch is of the smallest size that holds it.
        predict: The time of a batch of a size, in ms; None: not known.

    Raises:
        ConfigError: `predict` gives no time.
    """

    def __init__(self, sizes: Sequence[int], predict: Callable[[int], float] | None = None) -> None:
        self.sizes = list(sizes)
        self.bounds_ns = array("q", [0] * len(self.sizes))
        """Of each size, ascending; 0: not known."""
        self._recent: list[deque[int]] = [deque(maxlen=_RECENT) for _ in self.sizes]
        self._ascending: list[list[int]] = [[] for _ in self.sizes]
        self._known = {} if predict is None else {size: _predicted_ns(predict, size) for size in self.sizes}
        self._renew()

    def bound_ns(self, count: int) -> int:
        """Of a batch of so many requests; 0: not known."""
        return self.bounds_ns[bisect_left(self.sizes, count)]

    def record(self, count: int, duration_ns: int) -> None:
        """A batch of so many requests took so long."""
        place = bisect_left(self.sizes, count)
        recent, ascending = self._recent[place], self._ascending[place]
        if len(recent) == _RECENT:
            del ascending[bisect_left(ascending, recent[0])]
        recent.append(duration_ns)
        insort(ascending, duration_ns)
        rank = math.ceil(_COVERAGE * (len(recent) + 1))
        bound_ns = max(ascending[min(rank, len(recent)) - 1], 1)
        if self._known.get(self.sizes[place]) != bound_ns:
            self._known[self.sizes[place]] = bound_ns
            self._renew()

    def _renew(self) -> None:
        least_ns = 0  # a larger batch takes no less
        for place, size in enumerate(self.sizes):
            least_ns = self.bounds_ns[place] = max(least_ns, self._known.get(size) or self._between(size))

    def _between(self, size: int) -> int:
        if size in self._known:
            return self._known[size]
        below = max((known for known in self._known if known <= size), default=0)
        above = min((known for known in self._known if known >= size), default=0)
        if not above:
            return self._known[below] * size // below if below else 0
        if not below:
            return self._known[above]
        low, high = self._known[below], self._known[above]
        return low + (high - low) * (size - below) // (above - below)


def _predicted_ns(predict: Callable[[int], float], size: int) -> int:
    predicted_ms = predict(size)
    if not isinstance(predicted_ms, (int, float)) or not 0 < predicted_ms <= LONGEST_MS:
        raise ConfigError(f"predict({size}) = {shown(predicted_ms)}: a time in ms, over 0 and at most {LONGEST_MS:,}")
    return round(predicted_ms * 1e6) or 1
