from __future__ import annotations

import pytest
from cudasched.demo.harness import percentile, summary
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.colocation.bound import CONTEXT_SWITCH_MS, bound_p99_ms


@pytest.mark.parametrize(("busy", "adds"), [(0.0, 0.0), (0.5, 0.98), (1.0, 0.99)])
def test_one_kernel_length_leaves_a_uniform_remainder_where_the_gpu_is_busy(busy, adds):
    # P(total <= alone + x) = 1 - busy + busy x / d = 0.99, for kernels of d = 1 ms.
    assert bound_p99_ms([0.5], [(1000.0, 7)], busy) == pytest.approx(0.5 + adds, abs=0.01)


def test_long_kernels_are_met_in_proportion_to_their_time():
    # Half of the time is spent in kernels of 1 ms, though only one in eleven is one: 0.5 (1 - x) = 0.01 above 0.1 ms.
    assert bound_p99_ms([0.0], [(100.0, 10), (1000.0, 1)], busy=1.0) == pytest.approx(0.98, abs=0.01)


def test_the_context_switch_is_added():
    kernels = [(200.0, 1)]
    without = bound_p99_ms([0.5], kernels, 1.0)
    assert bound_p99_ms([0.5], kernels, 1.0, CONTEXT_SWITCH_MS) == pytest.approx(without + 0.13)


def test_equal_seeds_give_equal_bounds():
    arguments = ([0.4, 0.5, 0.6], [(63.0, 5), (158.0, 2)], 0.9)
    assert bound_p99_ms(*arguments, seed=3) == bound_p99_ms(*arguments, seed=3)
    assert bound_p99_ms(*arguments, seed=3) != bound_p99_ms(*arguments, seed=4)


@pytest.mark.parametrize("alone, kernels", [([], [(1.0, 1)]), ([1.0], [])])
def test_nothing_to_draw_from_is_an_error(alone, kernels):
    with pytest.raises(ValueError, match="latencies alone"):
        bound_p99_ms(alone, kernels, 1.0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_lie_between_the_extremes_and_rise(values, share):
    assert min(values) <= percentile(values, share) <= max(values)
    assert percentile(values, share) <= percentile(values, min(1.0, share + 0.1))


def test_percentiles_of_a_ramp():
    values = [float(value) for value in range(101)]
    assert summary(values) == {"p50": 50, "p95": 95, "p99": 99, "mean": 50, "max": 100, "n": 101}
    assert percentile([1.0, 2.0], 0.5) == 1.5
