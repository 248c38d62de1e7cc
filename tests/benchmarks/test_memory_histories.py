"""The histories of allocations, and what the pool makes of them without a GPU; copies beside requests."""

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


# The pool's share of reserved memory goes by the history alone, on a GPU or not.
@pytest.mark.usefixtures("simulated_driver")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the replaying program")
def test_a_rehearsal_replays_them(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    assert run("memory", ["--rehearse", "--out", str(out)]) == 0
    found = {row.figure: row.value for row in load(out).rows}
    assert 1 <= found["pool_reserved_of_used"] <= 1.02
    assert found["pool_alloc_ns"] > 0 and found["async_reserved_of_used"] >= 1
    assert {name for name, value in found.items() if name.startswith("copy_") and value > 0} == {
        "copy_p99_ratio",
        "copy_rate",
        "copy_p99_ratio_time_slices",
        "copy_rate_time_slices",
    }
