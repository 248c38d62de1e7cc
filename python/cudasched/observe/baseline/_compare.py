"""Which of many quantities got greater, judged by runs: a permutation test of the maximum, step by step.

A run of the program is one observation of each quantity: its launches share a clock, a placement in memory and a
temperature. So thousands of launches say no more about the next run than their mean does. The logarithm of that mean is
compared.

The statistic of a quantity is the difference of the two sides' means over its standard error. A quantity's variance is
drawn towards the median variance of its group, because a few runs tell the variance of one quantity badly. Exchanges of
runs between the sides show the differences that chance alone makes. Of each exchange, the greatest statistic of all
quantities counts (Westfall and Young's max-T, stepped down). Runs are exchangeable where nothing changed. There the
probability of one or more false findings among all quantities is at most `alpha`, exactly. This holds for any
distribution of the noise and any dependence among the quantities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from cudasched.errors import Error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "MOST_EXCHANGES",
    "Difference",
    "compare",
    "exchanges",
    "least_runs",
    "refuse_too_few",
    "runs_needed",
    "scipy_stats",
]

MOST_EXCHANGES = 20_000
"""Of more ways to exchange the runs than these, so many are drawn at random."""

_SEED = 20_261_123
_PRIOR_DEGREES = 4.0
_LEAST_DEVIATION = 2e-4  # of a logarithm: below any clock's resolution
_POWER = 0.95


@dataclass(frozen=True)
class Difference:
    """One quantity on both sides.

    Attributes:
        ratio: Now over then, of the geometric means of the runs.
        low: Least ratio of its 95% interval, by runs.
        high: Greatest ratio of the interval.
        p: Probability that chance alone makes some quantity appear so much greater, of all quantities together.
        deviation: Standard deviation of runs, as a share.
        detectable: The least change, as a share, that is found in 95% of such comparisons; None: none is.
    """

    ratio: float
    low: float
    high: float
    p: float
    deviation: float
    detectable: float | None


def exchanges(before: int, after: int) -> int:
    """In how many ways the runs can be shared out."""
    return math.comb(before + after, after)


def least_runs(before: int, alpha: float) -> int:
    """With how many runs now anything can be found beside so many then."""
    after = 1
    while exchanges(before, after) * alpha < 1:
        after += 1
    return after


def refuse_too_few(before: int, after: int, alpha: float) -> None:
    """Raises where no runs could show a difference.

    Args:
        before: Runs in the baseline.
        after: Runs now.
        alpha: How probable one or more false findings may be.

    Raises:
        Error: With the necessary number of runs.
    """
    if min(before, after) < 1 or before + after < 4 or before < 2:
        raise Error(f"{before} runs in the baseline and {after} now cannot be compared: at least 2 and 4 together")
    if exchanges(before, after) * alpha < 1:
        raise Error(
            f"{before} runs in the baseline and {after} now cannot show any difference at a probability of "
            f"{alpha:g} for false findings: it takes {least_runs(before, alpha)} now"
        )


def _labels(before: int, after: int) -> NDArray[np.float64]:
    """Of each exchange a row, 1 for runs that count as now; the first is as it was."""
    import numpy as np

    runs = before + after
    if exchanges(before, after) <= MOST_EXCHANGES:
        chosen = np.array(list(combinations(range(runs), after)))[::-1]  # the last is the real order
    else:
        generator = np.random.default_rng(_SEED)
        drawn = np.argsort(generator.random((MOST_EXCHANGES - 1, runs)), axis=1)[:, :after]
        chosen = np.vstack([np.arange(before, runs), drawn])
    labels = np.zeros((len(chosen), runs))
    labels[np.arange(len(chosen))[:, None], chosen] = 1.0
    return labels


def _drawn(variance: NDArray[np.float64], degrees: float, groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Variances (rows, quantities), each drawn towards the median of its row and group."""
    import numpy as np

    drawn = np.empty_like(variance)
    for group in np.unique(groups):
        own = variance[:, groups == group]
        common = np.median(own, axis=1, keepdims=True)
        drawn[:, groups == group] = (_PRIOR_DEGREES * common + degrees * own) / (_PRIOR_DEGREES + degrees)
    return drawn + _LEAST_DEVIATION**2


def _statistics(
    values: NDArray[np.float64], labels: NDArray[np.float64], groups: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One row an exchange, one column a quantity."""
    import numpy as np

    runs = values.shape[0]
    after = labels[0].sum()
    before = runs - after
    squares = values**2
    now, all_of_it = labels @ values, values.sum(axis=0)
    then = all_of_it - now
    within = squares.sum(axis=0) - now**2 / after - then**2 / before
    degrees = runs - 2.0
    drawn = _drawn(np.maximum(within, 0.0) / degrees, degrees, groups)
    difference = now / after - then / before
    found: NDArray[np.float64] = difference / np.sqrt(drawn * (1 / after + 1 / before))
    return found


def _stepped_down(statistics: NDArray[np.float64]) -> NDArray[np.float64]:
    """The adjusted p of each quantity, from the statistics of all exchanges, the real order first."""
    import numpy as np

    observed = statistics[0]
    order = np.argsort(-observed, kind="stable")
    # Of each exchange, the greatest among this quantity and those that were observed to be smaller.
    greatest = np.maximum.accumulate(statistics[:, order][:, ::-1], axis=1)[:, ::-1]
    # Statistics that are equal but for rounding count as equal: exchanges of equal runs.
    reached = greatest >= observed[order] - 1e-9 * np.maximum(1.0, np.abs(observed[order]))
    adjusted = np.empty(len(observed))
    adjusted[order] = np.maximum.accumulate(reached.mean(axis=0))
    return adjusted


def scipy_stats() -> Any:
    """The module ``scipy.stats``.

    Raises:
        Error: SciPy is not installed.
    """
    try:
        from scipy import stats
    except ImportError as error:
        raise Error(f"baselines need SciPy ({error}): pip install 'cudasched[baseline]'") from None
    return stats


def compare(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    *,
    alpha: float,
    groups: Sequence[int] | None = None,
) -> list[Difference]:
    """Compares two sides.

    Args:
        before: Logarithms, one row a run and one column a quantity.
        after: The same quantities now.
        alpha: How probable one or more false findings may be.
        groups: Of each quantity, the number of those that vary about alike; None: all do.

    Raises:
        Error: There are too few runs for anything to be found, or SciPy is missing.
    """
    import numpy as np

    stats = scipy_stats()
    refuse_too_few(len(before), len(after), alpha)
    values = np.vstack([before, after])
    # About the middle, which changes nothing but the rounding.
    numbers = np.zeros(values.shape[1], np.int64) if groups is None else np.asarray(groups, np.int64)
    statistics = _statistics(values - np.median(values, axis=0), _labels(len(before), len(after)), numbers)
    adjusted = _stepped_down(statistics)
    critical = float(np.quantile(statistics[1:].max(axis=1), 1 - alpha))
    share = 1 / len(before) + 1 / len(after)
    degrees = len(values) - 2
    sides = [side - side.mean(axis=0) for side in (before, after)]
    variance = (sides[0] ** 2).sum(axis=0) / degrees + (sides[1] ** 2).sum(axis=0) / degrees
    drawn = _drawn(variance[None, :], degrees, numbers)[0]
    found = []
    for place, p in enumerate(adjusted):
        difference = float(after[:, place].mean() - before[:, place].mean())
        half = float(stats.t.ppf(0.975, degrees)) * math.sqrt(float(variance[place]) * share)
        detectable = math.expm1((critical + float(stats.norm.ppf(_POWER))) * math.sqrt(float(drawn[place]) * share))
        found.append(
            Difference(
                ratio=math.exp(difference),
                low=math.exp(difference - half),
                high=math.exp(difference + half),
                p=float(p),
                deviation=math.sqrt(float(variance[place])),
                detectable=detectable if math.isfinite(detectable) and detectable < 1 else None,
            )
        )
    return found


def runs_needed(deviation: float, quantities: int, *, change: float, alpha: float, most: int = 200) -> int | None:
    """How many runs a side it takes to find a change in 95% of comparisons.

    By Student's t with Bonferroni's correction, an upper bound for the test of the maximum. At least as many runs as
    can be exchanged in 1 / alpha ways.

    Args:
        deviation: Standard deviation of runs, as a share.
        quantities: How many are compared.
        change: As a share.
        alpha: How probable one or more false findings may be.
        most: The answer is at most this.

    Returns:
        None if `most` are not enough.
    """
    from scipy import stats

    shift = math.log1p(change)
    spread = math.hypot(deviation, _LEAST_DEVIATION)
    for runs in range(2, most + 1):
        if exchanges(runs, runs) * alpha < 1:
            continue
        degrees = 2 * runs - 2
        noncentral = shift / (spread * math.sqrt(2 / runs))
        critical = float(stats.t.ppf(1 - alpha / max(quantities, 1), degrees))
        if noncentral > 40 or float(stats.nct.sf(critical, degrees, noncentral)) >= _POWER:
            return runs
    return None
