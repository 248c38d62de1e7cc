"""The histories of allocations, and what the pool makes of them without a GPU; copies and moves beside requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.lab.run import run
from benchmarks.memory.benchmark import find
from benchmarks.memory.traces import TRACES
from benchmarks.results.schema import load


@pytest.mark.parametrize("name", TRACES)
def test_a_history_frees_what_it_allocates(name: str) -> None:
    live: dict[int, int] = {}
    most = 0
    for identity, size in TRACES[name](6):
        if size:
            assert identity not in live
            live[identity] = size
            most = max(most, sum(live.values()))
        else:
            del live[identity]
    assert not live and 0.1 < most / 2**30 < 60
    assert TRACES[name](6) == TRACES[name](6)


def test_figures_are_of_the_worst_history_and_size() -> None:
    done = {f"replays/{name}/pool": {"used": 100, "reserved": 100 + place} for place, name in enumerate(TRACES)}
    done["hot/async"] = {"ns": [100.0, 300.0, 200.0]}
    assert find(done) == {
        "pool_odd_of_used": (1.03, 1.03, 1.03, 1),
        "pool_reserved_of_used": (1.02, 1.0, 1.02, 3),
        "async_alloc_ns": (300.0, 100.0, 300.0, 3),
    }


def test_copies_are_compared_with_the_requests_alone_and_the_bare_program() -> None:
    done = {
        f"copies/{arm}/{repeat}": {"latency_ms": [latency] * 100, "bytes_per_s": [rate, rate]}
        for repeat, factor in enumerate((1.0, 1.5))
        for arm, latency, rate in (
            ("alone", 1.0, 0),
            ("bare", 0, 50e9),
            ("time_slices", 2.0 * factor, 45e9),
            ("cudasched", 1.1 * factor, 40e9 * factor),
        )
    }
    del done["copies/cudasched/1"]  # the run ended before it
    assert find(done) == {
        "copy_p99_ratio": (1.1, 1.1, 1.1, 100),
        "copy_rate": (0.8, 0.8, 0.8, 1),
        "copy_p99_ratio_time_slices": (2.0, 2.0, 2.0, 100),
        "copy_rate_time_slices": (0.9, 0.9, 0.9, 1),
    }


def test_moves_are_compared_with_a_plain_copy_and_the_server_alone() -> None:
    mib = 1 << 20
    first = [[500.0, "parked", 1, 100.0], [700.0, "brought back", 1, 100.0]]
    done = {
        "moves/rate": [1000 * mib, 2000 * mib],  # 1 and 2 MiB a ms
        "moves/0": {
            "needed": 90 * mib,
            "rescue_ms": [300.0, 110.0, 130.0],
            "moves": [*first, [1000.0, "parked", 95, 100.0], [2000.0, "brought back", 160, 100.0]],
            "alone": [[0.0, 2.0], [9.0, 2.0]],
            "served": [[899.0, 3.0], [1000.5, 9.0], [1950.0, 3.0]],  # the second is between two moves
        },
        "bits/eager": {"same": True, "moves": 9},
        "bits/graph": {"same": False, "moves": 9},
        "idle/off/0": {"step_ms": 2.0, "alloc_us": [100.0, 200.0]},
        "idle/on/0": {"step_ms": 3.0, "alloc_us": [300.0, 200.0]},
        "idle/off/1": {"step_ms": 2.0, "alloc_us": [100.0, 200.0]},  # the run ended behind it
    }
    assert find(done) == {
        "rescue_time_ratio": (pytest.approx(1.2), 1.1, 1.3, 2),
        "rescue_first_ratio": (3.0, 3.0, 3.0, 1),
        "move_rate": (0.8, 0.8, 0.95, 2),
        "move_p99_ratio": (1.5, 1.5, 1.5, 2),
        "move_worst": (1.5, 1.5, 1.5, 2),
        "bits_failed": (1.0, 0.0, 1.0, 2),
        "idle_step": (1.5, 1.5, 1.5, 1),
        "pageable_alloc_ratio": (3.0, 1.0, 3.0, 2),
    }


def test_turns_are_compared_with_the_steps_one_after_the_other() -> None:
    part = {"steps": [10, 30], "alone_ms": [2.0, 1.0], "together_ms": 62.5, "moves": [[], []]}
    assert find({"turns/0": part}) == {"park_sum": (0.8, 0.8, 0.8, 1)}


# The pool's share of reserved memory goes by the history alone, on a GPU or not.
@pytest.mark.usefixtures("simulated_driver")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the replaying program")
def test_a_rehearsal_replays_them(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    assert run("memory", ["--rehearse", "--out", str(out)]) == 0
    found = {row.figure: row.value for row in load(out).rows}
    assert 1 <= found["pool_reserved_of_used"] <= 1.02
    assert found["pool_alloc_ns"] > 0 and found["async_reserved_of_used"] >= 1
    copied = {f"copy_{name}{arm}" for name in ("p99_ratio", "rate") for arm in ("", "_time_slices")}
    moved = {"rescue_time_ratio", "rescue_first_ratio", "move_rate", "move_p99_ratio", "move_worst"}
    assert {name for name, value in found.items() if value > 0} >= {
        *copied,
        *moved,
        "idle_step",
        "pageable_alloc_ratio",
        "park_sum",
    }
    assert found["bits_failed"] == 0
