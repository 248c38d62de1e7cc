"""Graphs that are cut into slices have the bits of those that are not, under a gate that closes at random."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S, PROGRAMS, Start, finish, line_of

NAMES = ("training", "nodes", "branches", "host", "children", "changed_children")
LAUNCHES = 200
HOST_CALLS = 4 * (LAUNCHES + 1)


def said(output: str, name: str) -> str:
    """What the program printed after a name, on the one line that begins with it."""
    (found,) = [line.removeprefix(f"{name} ") for line in output.splitlines() if line.startswith(f"{name} ")]
    return found


@pytest.fixture(scope="module")
def bare() -> str:
    """What the programs say without cudasched."""
    command = [sys.executable, str(PROGRAMS / "graph_bits.py"), *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("slices", ["short", "long", "random"])
def test_sliced_graphs_have_the_bits_of_whole_ones(start: Start, bare: str, slices: str) -> None:
    """200 launches of each: three programs change their graphs, the others have branches, host nodes, child graphs."""
    slice_us = {"short": 40, "long": 150, "random": random.randint(20, 300)}[slices]
    server = start("server.py", "100000", client_class="latency")
    line_of(server, "ready")
    settings = {
        "CUDASCHED_GRAPH_SLICES": "always",
        "CUDASCHED_GRAPH_SLICE_US": str(slice_us),
        "CUDASCHED_TIME_SLICE_US": "off",  # or the gate would step aside
    }
    managed = finish(start("graph_bits.py", *NAMES, client_class="best-effort", settings=settings))
    assert server.poll() is None
    for name in NAMES:
        sliced = f"{said(managed, f'{name}_sliced')} launches in slices of {slice_us} us"
        assert said(managed, name) == said(bare, name), f"{name}, {sliced}"
    assert said(managed, "called") == said(bare, "called") == str(HOST_CALLS)
    for name in NAMES:
        launches, parts = int(said(managed, f"{name}_sliced")), int(said(managed, f"{name}_slices"))
        least = 1 if slices == "random" else 2  # long ones may cut a program in two
        assert launches > 0 and parts > least * launches, f"{name}: whole because of {said(managed, f'{name}_whole')}"


def test_nothing_is_sliced_while_no_latency_client_is_there(start: Start, bare: str) -> None:
    settings = {"CUDASCHED_GRAPH_SLICES": "auto"}
    managed = finish(start("graph_bits.py", *NAMES, client_class="best-effort", settings=settings))
    for name in NAMES:
        assert said(managed, name) == said(bare, name)
        assert int(said(managed, f"{name}_sliced")) == 0


@pytest.mark.parametrize("check", ["memcheck", "synccheck"])
def test_sanitizers_find_nothing_in_slices(check: str, tmp_path: Path) -> None:
    """A small program, some 10 s each; its launches go in slices although a tool is there."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("compute-sanitizer is not installed")
    settings = {
        "CUDASCHED_RUN_DIR": str(tmp_path / "run"),
        "CUDASCHED_OFFLOAD_BESIDE_TOOLS": "1",
        "CUDASCHED_GRAPH_SLICES": "always",
        "CUDASCHED_GRAPH_SLICE_US": "10",
    }
    done = subprocess.run(
        [
            *(tool, "--tool", check, "--error-exitcode", "99", "--target-processes", "all"),
            # That a kernel has no further parameter is said by the driver as an error, and no other way.
            *(["--report-api-errors", "no"] if check == "memcheck" else []),
            *(sys.executable, "-m", "cudasched", "run", "--class", "best-effort", "--"),
            *(sys.executable, str(PROGRAMS / "graph_sanitized.py")),
        ],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "done" in done.stdout and "ERROR SUMMARY: 0 errors" in said, said
