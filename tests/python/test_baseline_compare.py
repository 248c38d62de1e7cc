"""The test of what got slower: exact where nothing changed, and it finds what did. All seeds are fixed."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from cudasched.errors import Error
from hypothesis import given, settings
from hypothesis import strategies as st

np = pytest.importorskip("numpy", reason="baselines need NumPy")
pytest.importorskip("scipy", reason="baselines need SciPy")

from cudasched.observe.baseline._compare import compare, exchanges, least_runs, runs_needed  # noqa: E402

ALPHA = 0.01


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6),
    st.sampled_from(["normal", "heavy", "skewed", "constant", "together", "ties"]),
    st.integers(0, 2**32 - 1),
)
def test_of_all_ways_to_share_out_unchanged_runs_at_most_alpha_find_anything(
    quantities: int, noise: str, seed: int
) -> None:
    """A theorem of the test, whatever the noise, so it holds for each example and not only for most."""
    generator = np.random.default_rng(seed)
    shape = (8, quantities)
    runs = {
        "normal": lambda: generator.normal(0, 0.01, shape),
        "heavy": lambda: generator.standard_cauchy(shape) * 0.01,
        "skewed": lambda: generator.exponential(0.02, shape),
        "constant": lambda: np.zeros(shape),
        "together": lambda: generator.normal(0, 0.01, (8, 1)) + generator.normal(0, 0.002, shape),
        "ties": lambda: generator.integers(0, 2, shape) * 0.01,
    }[noise]()
    alpha = 0.05
    found = 0
    for chosen in combinations(range(8), 4):
        others = [run for run in range(8) if run not in chosen]
        judged = compare(runs[others], runs[list(chosen)], alpha=alpha)
        found += any(one.p <= alpha for one in judged)
    assert found <= alpha * exchanges(4, 4)


def noisy(generator: np.random.Generator, runs: int, quantities: int = 25) -> np.ndarray:
    """Logarithms of runs as GPUs have them: half a percent together, and up to one percent each."""
    own = generator.normal(0, 0.01, (runs, quantities)) * np.linspace(0.2, 1, quantities)
    return generator.normal(0, 0.005, (runs, 1)) + own


def test_unchanged_programs_raise_no_more_alarms_than_said() -> None:
    generator = np.random.default_rng(7)
    alarms = sum(
        any(
            one.p <= ALPHA and one.ratio >= 1.03
            for one in compare(noisy(generator, 6), noisy(generator, 6), alpha=ALPHA)
        )
        for _ in range(150)
    )
    # At 1% more than 6 of 150 have a probability of 0.0009; the least change makes alarms rarer still.
    assert alarms <= 6


def test_five_percent_in_one_kernel_is_found_and_nothing_else() -> None:
    generator = np.random.default_rng(8)
    found = others = 0
    for _ in range(60):
        before, after = noisy(generator, 6), noisy(generator, 6)
        after[:, 20] += math.log(1.05)
        judged = compare(before, after, alpha=ALPHA)
        found += judged[20].p <= ALPHA and judged[20].ratio >= 1.03
        others += any(one.p <= ALPHA and one.ratio >= 1.03 for one in judged[:20])
    assert found >= 57
    assert others <= 3


def test_a_shift_of_everything_is_found_in_everything() -> None:
    generator = np.random.default_rng(9)
    before, after = noisy(generator, 8, 6), noisy(generator, 8, 6) + math.log(1.1)
    assert all(one.p <= ALPHA for one in compare(before, after, alpha=ALPHA))


def test_what_got_faster_is_not_slower() -> None:
    generator = np.random.default_rng(10)
    before, after = noisy(generator, 6, 4), noisy(generator, 6, 4) - math.log(1.1)
    assert not any(one.p <= ALPHA for one in compare(before, after, alpha=ALPHA))


def test_the_unit_is_a_run_however_many_launches_it_has() -> None:
    """Two runs that differ say nothing, however precisely each is measured."""
    before = np.log(np.array([[100.0], [110.0], [100.0], [110.0], [105.0]]))
    after = np.log(np.array([[110.0], [100.0], [110.0], [111.0], [105.0]]))
    (one,) = compare(before, after, alpha=ALPHA)
    assert one.p > 0.05 and one.low < 1 < one.high


def test_too_few_runs_are_refused_with_how_many_it_takes() -> None:
    runs = np.zeros((5, 3))
    with pytest.raises(Error, match="it takes 4 now"):
        compare(runs, runs[:3], alpha=ALPHA)
    assert (least_runs(5, ALPHA), least_runs(10, ALPHA), least_runs(20, ALPHA)) == (4, 3, 2)
    with pytest.raises(Error, match="at least 2"):
        compare(runs[:1], runs, alpha=ALPHA)
    compare(runs, runs, alpha=ALPHA)


def test_results_are_the_same_each_time_with_more_exchanges_than_are_tried() -> None:
    generator = np.random.default_rng(11)
    before, after = noisy(generator, 12, 3), noisy(generator, 12, 3)
    assert compare(before, after, alpha=ALPHA) == compare(before, after, alpha=ALPHA)


def test_groups_do_not_lend_each_other_their_noise() -> None:
    """Kernels that hardly vary beside waits that vary by half: 3% more in one is found all the same."""
    generator = np.random.default_rng(12)

    def side() -> np.ndarray:
        return np.hstack([generator.normal(0, 0.003, (6, 2)), generator.normal(0, 0.5, (6, 4))])

    before, after = side(), side()
    after[:, 0] += math.log(1.03)
    judged = compare(before, after, alpha=ALPHA, groups=[0, 0, 1, 1, 1, 1])
    assert judged[0].p <= ALPHA
    assert compare(before, after, alpha=ALPHA)[0].p > ALPHA


def test_how_many_runs_it_takes_is_what_a_simulation_needs() -> None:
    needed = runs_needed(0.012, 25, change=0.05, alpha=ALPHA)
    assert needed is not None and 5 <= needed <= 9
    generator = np.random.default_rng(13)

    def found(runs: int) -> float:
        hits = 0
        for _ in range(40):
            before, after = (generator.normal(0, 0.012, (runs, 25)) for _ in range(2))
            after[:, 3] += math.log(1.05)
            hits += compare(before, after, alpha=ALPHA)[3].p <= ALPHA
        return hits / 40

    assert found(needed) >= 0.85
    assert runs_needed(0.001, 25, change=0.05, alpha=ALPHA) == 5  # fewer cannot be exchanged in 100 ways
    assert runs_needed(1.0, 25, change=0.05, alpha=ALPHA) is None
