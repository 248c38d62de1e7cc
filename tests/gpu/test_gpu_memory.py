"""Limits and giving memory back with PyTorch's own allocator; tests/python/test_memory.py is its twin without a GPU."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE_S, Start, finish, line_of

#: Each way in which PyTorch can have its memory.
ALLOCATORS = ["", "expandable_segments:True", "backend:cudaMallocAsync"]


def free_gib() -> int:
    code = "import torch; print(torch.cuda.mem_get_info()[0] >> 30)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def most_of_the_memory() -> Iterator[None]:
    """Held by one test at a time, whatever process runs it: two that take 60% each would find none."""
    with Path(tempfile.gettempdir(), "cudasched-tests-gpu-memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_limit_holds_and_the_gpu_is_as_large_as_that(allocator: str, start: Start) -> None:
    process = start(
        "memory.py",
        "limit",
        "4",
        client_class="normal",
        options=("--memory-limit", "4GiB"),
        settings={"PYTORCH_CUDA_ALLOC_CONF": allocator},
    )
    assert finish(process).splitlines()[-1] == "done"


@pytest.mark.parametrize("allocator", ALLOCATORS[:2])
def test_bytes_at_the_driver_are_what_pytorch_has_reserved(allocator: str, start: Start) -> None:
    process = start("memory.py", "accounts", client_class="normal", settings={"PYTORCH_CUDA_ALLOC_CONF": allocator})
    assert finish(process).splitlines()[-1] == "done"


@pytest.mark.parametrize("allocator", ALLOCATORS[:2])
def test_observed_bytes_are_pytorchs_at_every_step(allocator: str, start: Start) -> None:
    process = start("memory.py", "observed", client_class="normal", settings={"PYTORCH_CUDA_ALLOC_CONF": allocator})
    assert finish(process).splitlines()[-1] == "done"


def test_pageable_memory_is_plain_memory_to_pytorch(start: Start) -> None:
    process = start("memory.py", "pageable", client_class="best_effort", settings={"CUDASCHED_PAGEABLE": "on"})
    assert finish(process).splitlines()[-1] == "done"


# Little of the GPU is free, so that no more than 3 GiB move, on any GPU and beside any host's memory.
@pytest.mark.alone
def test_a_latency_client_gets_memory_that_a_training_uses(start: Start) -> None:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    telling = {"CUDASCHED_LOG": "info", "CUDA_VISIBLE_DEVICES": gpu}
    parks = {"CUDASCHED_PAGEABLE": "on", "CUDASCHED_PARK": "6GiB", **telling}
    patient = {"CUDASCHED_GIVE_BACK_MS": "30000", **telling}
    keeper = start("memory.py", "parked", "5", client_class="best_effort", settings=parks)
    line_of(keeper, "kept")
    line_of(start("memory.py", "fill", "2", client_class="normal", settings=telling), "kept")
    said = []
    for _ in range(2):
        needs = start("memory.py", "need", "4", client_class="latency", settings=patient)
        said.append(needs.communicate(timeout=PATIENCE_S)[0])
    said.append(keeper.communicate("\n", timeout=PATIENCE_S)[0])
    assert all("done" in each.splitlines() for each in said), "\n".join(said)
    print(*said, sep="\n")


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("what", ["keep", "silent"])
@pytest.mark.usefixtures("most_of_the_memory")
def test_a_best_effort_cache_goes_to_the_latency_client_that_needs_it(what: str, allocator: str, start: Start) -> None:
    built = subprocess.run([sys.executable, "-m", "cudasched", "torch", "build"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    gib = str(free_gib() * 6 // 10)
    keeper = start("memory.py", what, gib, client_class="best_effort", settings={"PYTORCH_CUDA_ALLOC_CONF": allocator})
    line_of(keeper, "kept")
    # Longer than it takes to unmap tens of GiB in small pieces beside other tests.
    needs = start("memory.py", "need", gib, client_class="latency", settings={"CUDASCHED_GIVE_BACK_MS": "30000"})
    output = finish(needs)
    assert output.splitlines()[-1] == "done" and re.search(r"^ms [\d.]+$", output, re.MULTILINE), output
    answer = keeper.communicate("\n", timeout=PATIENCE_S)[0]
    assert keeper.returncode == 0 and answer.splitlines()[-1] == "done", answer
