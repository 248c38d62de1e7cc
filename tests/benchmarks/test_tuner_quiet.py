"""The tuner beside others: which configurations are right, and a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab.run import run
from benchmarks.results.schema import load
from benchmarks.tune.quiet import BENCHMARK, find, right

IDLE = {"a": [1.0, 1.01, 2.0], "b": [3.0, 2.0]}


@pytest.mark.parametrize(
    ("times", "share"),
    [({"a": [1, 2, 3], "b": [2, 1]}, 1.0), ({"a": [2, 1, 3], "b": [1, 2]}, 0.5), ({"a": [3, 2, 1], "b": [1, 2]}, 0.0)],
)
def test_a_configuration_within_two_percent_of_the_best_is_right(times: dict[str, list[float]], share: float) -> None:
    assert right(times, IDLE) == (share, share, share, 2)


def test_figures_are_against_the_same_server_and_training_without_a_tuner() -> None:
    def part(ms: float, steps: float) -> dict[str, object]:
        return {"latency_ms": [ms] * 4, "steps_per_s": steps, "times_ms": IDLE, "tune_s": 2.0}

    kept = {"idle": IDLE, "idle_s": 1.0, "idle again": {"a": [1.1, 1.0, 2.0], "b": [3.0, 2.0]}}
    kept |= {"bare/without": part(1, 10), "bare": part(5, 9), "quiet/without": part(2, 10), "quiet": part(3, 8)}
    found = find({"quiet": kept})
    assert found["bare_server_p99"][0] == 5 and found["quiet_server_p99"][0] == 1.5
    assert found["bare_training"][0] == 0.9 and found["quiet_training"][0] == 0.8
    assert found["idle_winners"][0] == found["quiet_winners"][0] == 1
    assert set(found) == set(BENCHMARK.goals) and find({}) == {}


def test_a_rehearsal_has_all_figures(tmp_path: Path) -> None:
    out = tmp_path / "quiet.json"
    assert run("tuner_quiet", ["--rehearse", "--out", str(out)]) == 0
    assert {row.figure for row in load(out).figures} == set(BENCHMARK.goals)
