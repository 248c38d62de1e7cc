from __future__ import annotations

import itertools
import math

import pytest
from cudasched.demo.arrivals import ARRIVALS, BURST_ON, BURST_PERIOD_S, schedule
from hypothesis import given
from hypothesis import strategies as st

kinds = st.sampled_from(ARRIVALS)
rates = st.floats(0.5, 2000)
lengths = st.floats(0.05, 20)
seeds = st.integers(0, 2**32)


@given(kinds, rates, lengths, seeds)
def test_times_ascend_within_the_run_and_follow_from_the_seed(kind, rate_hz, seconds, seed):
    times = schedule(kind, rate_hz, seconds, seed)
    assert times == sorted(times)
    assert all(0 <= time < seconds for time in times)
    assert times == schedule(kind, rate_hz, seconds, seed)


@pytest.mark.parametrize("kind", ["poisson", "bursts"])
def test_seeds_give_different_schedules(kind):
    assert schedule(kind, 100, 10, 1) != schedule(kind, 100, 10, 2)


@given(kinds, st.floats(5, 500), st.integers(0, 1000))
def test_the_mean_rate_is_the_one_asked_for(kind, rate_hz, seed):
    seconds = math.ceil(4000 / rate_hz / BURST_PERIOD_S) * BURST_PERIOD_S
    expected = rate_hz * seconds
    # Six standard deviations of a Poisson count.
    assert abs(len(schedule(kind, rate_hz, seconds, seed)) - expected) < 6 * math.sqrt(expected)


@given(st.floats(1, 1000), seeds)
def test_periodic_arrivals_are_equally_far_apart(rate_hz, seed):
    times = schedule("periodic", rate_hz, 5, seed)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap == pytest.approx(1 / rate_hz, rel=1e-6) for gap in gaps)
    assert times[0] < 1 / rate_hz


@given(st.floats(1, 1000), lengths, seeds)
def test_bursts_arrive_while_on(rate_hz, seconds, seed):
    on_s = BURST_PERIOD_S * BURST_ON
    assert all(time % BURST_PERIOD_S <= on_s * (1 + 1e-9) for time in schedule("bursts", rate_hz, seconds, seed))


def test_poisson_gaps_vary_as_an_exponential_does():
    times = schedule("poisson", 100, 200, 7)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("rate_hz, seconds", [(0, 1), (-1, 1), (1, 0)])
def test_a_rate_or_length_of_zero_is_refused(rate_hz, seconds):
    with pytest.raises(ValueError, match="above 0"):
        schedule("poisson", rate_hz, seconds, 0)


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'steady'.*poisson"):
        schedule("steady", 1, 1, 0)
