"""How long batches of each size take."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from cudasched._text import shown
from cudasched.errors import ConfigError

__all__ = ["LONGEST_MS", "Times"]

LONGEST_MS = 3_600_000
"""Of all times that are given."""

_RECENT = 64
_COVERAGE = 0.9
_FEW = 4
"""Runs of a size that do not yet say that it takes longer than smaller batches of as many requests."""


class _Recent:
    """The last values, and the same ascending."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_RECENT)
        self.ascending: list[float] = []

    def add(self, value: float) -> None:
        if len(self._values) == _RECENT:
            del self.ascending[bisect_left(self.ascending, self._values[0])]
        self._values.append(value)
        insort(self.ascending, value)


class Times:
    """A bound for each size: a time that nine of ten recent batches do not exceed.

    A size typically takes the median of its last 64 runs, and the bound is longer by as much as nine of ten of the last
    64 batches, of all sizes, took at most beyond that. So a size that runs seldom has no bound of a single slow run,
    for which it would never run again. A larger size takes no less than a smaller one: where medians say otherwise,
    both have that of the one that ran more often. A size of few runs takes no longer than batches of the next smaller
    size that hold as many requests.

    A size that has not run yet has the time that `predict` gives. Without that its time lies on a line between the
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
        self._predicted: dict[int, int] = {}
        self.forget()
        if predict is not None:
            self._predicted = {size: _predicted_ns(predict, size) for size in self.sizes}
            self._renew(self._typical())

    def forget(self) -> None:
        """No size has run, and no time is predicted."""
        self._runs = [_Recent() for _ in self.sizes]
        self._longer = _Recent()  # times over typical ones
        self._predicted = {}
        self._renew([0.0] * len(self.sizes))

    def bound_ns(self, count: int) -> int:
        """Of a batch of so many requests; 0: not known."""
        return self.bounds_ns[bisect_left(self.sizes, count)]

    def typical_ns(self, count: int) -> int:
        """Half of the batches of so many requests take no longer; 0: not known."""
        return round(self._usual[bisect_left(self.sizes, count)])

    def record(self, count: int, duration_ns: int) -> None:
        """A batch of so many requests took so long."""
        place = bisect_left(self.sizes, count)
        self._runs[place].add(max(duration_ns, 1))
        typical = self._typical()
        self._longer.add(duration_ns / typical[place])
        self._renew(typical)

    def _renew(self, typical: Sequence[float]) -> None:
        ascending = self._longer.ascending
        rank = min(math.ceil(_COVERAGE * (len(ascending) + 1)), len(ascending))
        longer = ascending[rank - 1] if ascending else 1.0
        self._usual = typical
        for place, time_ns in enumerate(typical):
            self.bounds_ns[place] = round(time_ns * longer) or int(time_ns > 0)

    def _typical(self) -> list[float]:
        """Of each size, ns, ascending. At least one is known."""
        levels: list[tuple[float, int, list[int]]] = []  # a time, of so many runs, of these sizes
        below = 0.0, 0
        for size, runs in zip(self.sizes, self._runs, strict=True):
            count = len(runs.ascending)
            time_ns = runs.ascending[(count - 1) // 2] if count else float(self._predicted.get(size, 0))
            if not time_ns:
                continue
            if 0 < count < _FEW and below[1]:
                time_ns = min(time_ns, below[0] * size / below[1])
            below = time_ns, size
            levels.append((time_ns, max(count, 1), [size]))
            while len(levels) > 1 and levels[-2][0] > levels[-1][0]:
                second, first = levels.pop(), levels.pop()
                time_ns, _, _ = max(first, second, key=lambda level: level[1])
                levels.append((time_ns, first[1] + second[1], first[2] + second[2]))
        known = {size: time_ns for time_ns, _, sizes in levels for size in sizes}
        return [known[size] if size in known else _between(size, known) for size in self.sizes]


def _between(size: int, known: Mapping[int, float]) -> float:
    """The time of a size that is not known."""
    below = max((other for other in known if other < size), default=0)
    above = min((other for other in known if other > size), default=0)
    if not above:
        return known[below] * size / below
    if not below:
        return known[above]
    return known[below] + (known[above] - known[below]) * (size - below) / (above - below)


def _predicted_ns(predict: Callable[[int], float], size: int) -> int:
    predicted_ms = predict(size)
    if not isinstance(predicted_ms, (int, float)) or not 0 < predicted_ms <= LONGEST_MS:
        raise ConfigError(f"predict({size}) = {shown(predicted_ms)}: a time in ms, over 0 and at most {LONGEST_MS:,}")
    return round(predicted_ms * 1e6) or 1
