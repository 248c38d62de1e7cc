"""95% intervals by the bootstrap: percentiles of requests, and figures over repeats."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from cudasched.demo.harness import percentile

Interval = tuple[float, float]
Part = TypeVar("Part")

DRAWS = 1000
#: Requests from which on a P99 is stated: ten are longer.
LEAST_FOR_P99 = 1000


def percentile_draw(ordered: Sequence[float], share: float, source: random.Random) -> float:
    """A percentile of as many values drawn with replacement.

    The k-th smallest of n such draws is the value at the place n x Beta(k, n - k + 1), so nothing is drawn or sorted.
    """
    count = len(ordered)
    rank = 1 + round(share * (count - 1))
    return ordered[min(count - 1, int(count * source.betavariate(rank, count - rank + 1)))]


def of_draws(draws: Sequence[float]) -> Interval:
    """The middle 95% of them."""
    return percentile(draws, 0.025), percentile(draws, 0.975)


def too_few(requests: int, share: float) -> bool:
    """Whether so few requests bear no such percentile."""
    return share > 0.95 and requests < LEAST_FOR_P99


def of_requests(latency_ms: Sequence[float], share: float, alone_ms: Sequence[float] = ()) -> Interval | None:
    """Of a percentile of requests, or its ratio to that of other requests; None where a P99 has too few of them."""
    if too_few(min(len(values) for values in (latency_ms, alone_ms or latency_ms)), share):
        return None
    source, own, other = random.Random(0), sorted(latency_ms), sorted(alone_ms)
    return of_draws(
        [
            percentile_draw(own, share, source) / (percentile_draw(other, share, source) if other else 1.0)
            for _ in range(DRAWS)
        ]
    )


def of_repeats(parts: Sequence[Sequence[Part]], figure: Callable[[Sequence[Part]], float | None]) -> Interval | None:
    """Of a figure of several parts, each with its repeats, which are drawn within the part.

    Returns:
        None where a part has one repeat, or the figure does not exist.
    """
    if not parts or min(map(len, parts)) < 2:
        return None
    source = random.Random(0)
    draws = [figure([one for part in parts for one in source.choices(part, k=len(part))]) for _ in range(DRAWS)]
    known = [value for value in draws if value is not None]
    return of_draws(known) if known else None
