"""How the figures of pytorch.json follow from what programs said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.run import run
from benchmarks.pytorch import benchmark
from benchmarks.pytorch.benchmark import (
    RATE_HZ,
    find,
    find_costs,
    find_give_back,
    find_reserved,
    find_threads,
    servers_together,
)
from benchmarks.results.schema import load


def phase(name: str, latency_ms: dict[str, float], per_s: dict[str, float]) -> dict[str, Any]:
    return {"phase": name, "latency_ms": {load: [ms] * 100 for load, ms in latency_ms.items()}, "per_s": per_s}


def two_threads() -> dict[str, Any]:
    both = {"bert_graph": 1.2}, {"transformer": 8.0}
    bare = [phase("0", {"bert_graph": 1.0}, {}), phase("1", {}, {"transformer": 10.0}), phase("all", *both)]
    done = {}
    for repeat in range(3):
        done[f"two_threads/bare/{repeat}"] = {"phases": bare, "reserved": 100}
        done[f"two_threads/regions/{repeat}"] = {"phases": [phase("all", *both)], "reserved": 110 + repeat}
    return done


def test_threads_are_compared_with_each_alone() -> None:
    found = find_threads(two_threads(), "two_threads")
    assert found["two_threads_p99_ratio"] == pytest.approx((1.2, 1.2, 1.2, 300))
    assert found["two_threads_best_effort"][0] == pytest.approx(0.8 / (1 - RATE_HZ * 1e-3))


def test_the_worst_server_counts_and_trainings_together() -> None:
    bare = [
        phase("0", {"bert_graph": 1.0}, {}),
        phase("1", {"mlp": 0.5}, {}),
        phase("2", {}, {"transformer": 10.0}),
        phase("3", {}, {"resnet50": 40.0}),
    ]
    ours = [phase("all", {"bert_graph": 1.1, "mlp": 0.7}, {"transformer": 5.0, "resnet50": 16.0})]
    done = {"four_threads/bare/0": {"phases": bare}, "four_threads/regions/0": {"phases": ours}}
    found = find_threads(done, "four_threads")
    assert found["four_threads_p99_ratio_worst"][0] == pytest.approx(1.4)
    assert found["four_threads_best_effort"][0] == pytest.approx(0.9 / (1 - RATE_HZ * 1.5e-3))


def test_servers_beside_one_another_say_what_no_training_does() -> None:
    bare = [
        phase("0", {"bert_graph": 1.0}, {}),
        phase("1", {"mlp": 0.5}, {}),
        phase("servers", {"bert_graph": 1.1, "mlp": 0.8}, {}),
    ]
    assert servers_together({"four_threads/bare/0": {"phases": bare}}, "four_threads") == [pytest.approx(1.6)]
    assert servers_together(two_threads(), "two_threads") == []


def test_requests_come_at_the_same_times_in_all_phases_and_at_others_than_another_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two servers had the same times, so that each request met one of the other's."""
    pytest.importorskip("torch")
    from benchmarks.pytorch import threads

    seen: dict[str, list[int]] = {}

    def run(self: threads.Thread, seconds: float, rate_hz: float, seed: int) -> None:
        seen.setdefault(self.name, []).append(seed)

    monkeypatch.setattr(threads.Thread, "run", run)
    phases = ("0", "1", "servers", "all")
    loads = ("--latency", "bert_graph", "mlp", "--training", "transformer")
    monkeypatch.setattr(sys, "argv", ["threads.py", "--how", "bare", *loads, "--simulate", "--phases", *phases])
    threads.main()
    assert [len(seen[name]) for name in ("bert_graph", "mlp", "transformer")] == [3, 3, 1]
    assert len(set(seen["bert_graph"])) == len(set(seen["mlp"])) == 1 and seen["bert_graph"] != seen["mlp"]
    assert [phase["phase"] for phase in json.loads(capsys.readouterr().out)["phases"]] == list(phases)


def test_costs_and_memory() -> None:
    done = {
        "costs/region": {"samples": [5.0, 4.0, 9.0]},
        "costs/observe": {"samples": [100.0, 120.0, 110.0], "differences": [0.0, 0.0, 512.0]},
        "costs/inference bare/0": {"samples": [10.0, 10.2]},
        "costs/inference install/0": {"samples": [10.201, 10.201]},
    }
    found = find_costs(done)
    assert found["region_us"] == (5.0, 4.0, 9.0, 3)
    assert found["observe_ns"][0] == 110.0
    assert found["accounting_difference_bytes"] == (512.0, 0.0, 512.0, 3), "the worst counts"
    assert found["install_overhead"][0] == pytest.approx(0.01)
    assert find_reserved(two_threads())["reserved_ratio"] == pytest.approx((1.11, 1.10, 1.12, 3))


def test_memory_given_back_is_compared_with_the_cache_emptied_sample_by_sample() -> None:
    times = {"bare": [10.0, 20.0, 10.0], "allocation": [80.0, 90.0, 70.0], "give_back": [94.0, 115.0, 83.0]}
    done = {"give_back/processes": {**times, "busy": [190.0]}}
    assert find_give_back(done)["give_back_over_empty_cache_ms"] == (4.0, 3.0, 5.0, 3)
    assert find_give_back({}) == {}


@pytest.mark.usefixtures("simulated_driver")
def test_the_two_processes_of_giving_back_do_as_they_are_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "pytorch.json"
    assert run("pytorch", ["--rehearse", "--only", "give_back", "--samples", "2", "--out", str(out)]) == 0
    found = json.loads(out.with_suffix(".cells").read_text())["done"]["give_back/processes"]
    times = {"bare": 2, "allocation": 2, "give_back": 2, "busy": 2, "refused": 0}
    assert {name: len(each) for name, each in found.items()} == times


def test_a_program_that_fails_keeps_no_other_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.py").write_text(
        "import sys\n"
        "if sys.argv[1] == 'region': sys.exit('no such thing')\n"
        "if sys.argv[1] == 'idle': sys.exit()\n"
        'print(\'{"samples": [10.0], "differences": [0]}\')\n'
    )
    monkeypatch.setattr(benchmark, "HERE", tmp_path)
    out = tmp_path / "pytorch.json"
    assert run("pytorch", ["--rehearse", "--only", "costs", "--out", str(out)]) == 1
    names = {row.figure for row in load(out).figures}
    assert names == {"install_overhead", "accounting_difference_bytes", "observe_ns"}
    said = capsys.readouterr().out
    assert "costs/region: costs.py region" in said and "no such thing" in said
    assert "costs/idle: costs.py idle" in said


def test_what_was_not_measured_has_no_figure() -> None:
    assert set(find(two_threads())) == {"two_threads_p99_ratio", "two_threads_best_effort", "reserved_ratio"}
