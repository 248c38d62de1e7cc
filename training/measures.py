"""How wrong predictions are: median, mean, by time, and their bias, each with its interval.

Launches of one shape, kernel or program are alike, so intervals come from resampling such groups, not launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from training.data import Codes, Floats, Mask

#: What is held out, and the most that the median error may then be.
SPLITS = {"repeat": "processes", "new_shape": "shapes", "unseen_kernel": "kernels"}
TARGETS = {"repeat": 0.03, "new_shape": 0.09, "unseen_kernel": 0.30}
RESAMPLES = 200
#: Ends of what a duration is called, in ns.
BINS = {"under 2 us": (0, 2e3), "2 to 10 us": (2e3, 1e4), "10 to 100 us": (1e4, 1e5), "over 100 us": (1e5, np.inf)}


@dataclass(frozen=True)
class Measure:
    """A figure and the ends of its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Errors:
    """What predictions were wrong by, as fractions of what was measured.

    Attributes:
        median: Of |predicted / measured - 1|.
        mean: The same's mean.
        time_weighted: Sum of |predicted - measured| over the sum of measured: an error where the time is.
        bias: Sum of predicted - measured over the sum of measured.
        n: Launches.
        groups: What the intervals resample.
    """

    median: Measure
    mean: float
    time_weighted: Measure
    bias: Measure
    n: int
    groups: int

    def row(self, **about: Any) -> dict[str, Any]:
        """A row of kind accuracy."""
        return {
            "kind": "accuracy",
            **about,
            "mdape": self.median.value,
            "low": self.median.low,
            "high": self.median.high,
            "mape": self.mean,
            "time_weighted": self.time_weighted.value,
            "bias": self.bias.value,
            "n": self.n,
            "groups": self.groups,
        }


def errors_of(predicted: Floats, measured: Floats, groups: Codes) -> Errors:
    """Errors of predictions that are all there.

    Raises:
        ValueError: There are none.
    """
    if not len(predicted):
        raise ValueError("there are no predictions to judge")
    error = np.abs(predicted - measured) / measured
    number = np.unique(groups, return_inverse=True)[1]
    count = int(number.max()) + 1
    order = np.argsort(error, kind="stable")
    sorted_errors, sorted_groups = error[order], number[order]
    wrong, over, total = (
        np.bincount(number, weights, count)
        for weights in (np.abs(predicted - measured), predicted - measured, measured)
    )
    random = np.random.default_rng(1)
    found: list[tuple[float, float, float]] = []
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(count, size=count), minlength=count).astype(np.float64)
        found.append(
            (
                weighted_median(sorted_errors, times[sorted_groups]),
                float(times @ wrong / (times @ total)),
                float(times @ over / (times @ total)),
            )
        )
    low, high = np.quantile(np.array(found), (0.025, 0.975), axis=0)
    values = float(np.median(error)), float(wrong.sum() / total.sum()), float(over.sum() / total.sum())
    median, time_weighted, bias = (Measure(v, float(a), float(b)) for v, a, b in zip(values, low, high, strict=True))
    return Errors(median, float(error.mean()), time_weighted, bias, len(error), count)


def weighted_median(rising: Floats, weights: Floats) -> float:
    """Of values in rising order."""
    total = np.cumsum(weights)
    return float(rising[int(np.searchsorted(total, total[-1] / 2))])


def bins_of(measured: Floats) -> dict[str, Mask]:
    """The launches of each range of durations."""
    return {name: (measured >= least) & (measured < most) for name, (least, most) in BINS.items()}


def share_interval(inside: Mask, groups: Codes) -> tuple[float, float]:
    """95% interval of a share, from resampling groups."""
    random = np.random.default_rng(1)
    numbers = np.unique(groups, return_inverse=True)[1]
    counts = np.bincount(numbers).astype(np.float64)
    hits = np.bincount(numbers, inside).astype(np.float64)
    shares = []
    for _ in range(RESAMPLES):
        drawn = random.integers(len(counts), size=len(counts))
        shares.append(hits[drawn].sum() / counts[drawn].sum())
    low, high = np.quantile(shares, (0.025, 0.975))
    return float(low), float(high)
