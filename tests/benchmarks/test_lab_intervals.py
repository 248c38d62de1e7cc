"""benchmarks/lab/intervals.py: what the bootstrap says of percentiles and of figures over repeats."""

from __future__ import annotations

import random
import statistics

import pytest
from cudasched.demo.harness import percentile

from benchmarks.lab.intervals import DRAWS, of_draws, of_repeats, of_requests, percentile_draw


def served(seed: int, requests: int, factor: float = 1.0) -> list[float]:
    source = random.Random(seed)
    return [factor * source.lognormvariate(0.0, 0.3) for _ in range(requests)]


def test_a_percentile_is_drawn_as_from_values_drawn_with_replacement() -> None:
    values, source = served(0, 1000), random.Random(1)
    plain = of_draws([percentile(source.choices(values, k=1000), 0.99) for _ in range(DRAWS)])
    ordered = sorted(values)
    assert of_draws([percentile_draw(ordered, 0.99, source) for _ in range(DRAWS)]) == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_an_interval_holds_the_truth_19_times_of_20(share: float) -> None:
    every = sorted(served(0, 200_000))
    truth = every[int(share * len(every))]
    found = [of_requests(served(seed, 1000), share) for seed in range(1, 101)]
    assert 88 <= sum(each is not None and each[0] <= truth <= each[1] for each in found) <= 100
    ratios = [of_requests(served(seed, 1000, 2.0), share, served(seed + 1000, 1000)) for seed in range(1, 101)]
    assert 88 <= sum(each is not None and each[0] <= 2.0 <= each[1] for each in ratios) <= 100


def test_fewer_than_a_thousand_requests_bear_no_p99() -> None:
    assert of_requests(served(0, 999), 0.99) is None and of_requests(served(0, 999), 0.95)
    assert of_requests(served(0, 1000), 0.99, served(1, 999)) is None


def test_repeats_are_drawn_within_their_part_and_one_repeat_has_no_interval() -> None:
    assert of_repeats([[1.0, 1.0], [3.0, 3.0]], statistics.fmean) == (2.0, 2.0)
    low, high = of_repeats([[1.0, 1.2, 1.4], [1.1, 1.2, 1.3]], max) or (0.0, 0.0)
    assert low < high == 1.4
    assert of_repeats([[1.0, 2.0], [3.0]], max) is None and of_repeats([], max) is None
    assert of_repeats([[1.0, 2.0]], lambda _: None) is None
