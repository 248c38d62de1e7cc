"""The histories of allocations, and what the pool makes of them without a GPU."""

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


# The pool's share of reserved memory goes by the history alone, on a GPU or not.
@pytest.mark.usefixtures("simulated_driver")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the replaying program")
def test_a_rehearsal_replays_them(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    assert run("memory", ["--rehearse", "--out", str(out)]) == 0
    found = {row.figure: row.value for row in load(out).rows}
    assert 1 <= found["pool_reserved_of_used"] <= 1.02
    assert found["pool_alloc_ns"] > 0 and found["async_reserved_of_used"] >= 1
