"""The pool of `cudasched.memory` against other allocators: two figures of benchmarks/results/memory.json.

Histories of allocations (traces.py) are replayed by a process of each allocator's own, without work on the GPU.
`pool_reserved_of_used` is the most memory that the pool takes of the GPU over the most that the history uses, of the
worst history. Large blocks of odd sizes, of which every second one is freed, have a figure of their own, because the
blocks that remain share their pages with nothing. `pool_alloc_ns` is the time of an allocation or a free of a size that
the pool has free, on the host, of the slowest size. The rivals are the driver's own pool (cudaMallocAsync), PyTorch's
allocator with expandable segments, and RMM's pool where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudasched import hook
from cudasched.demo.harness import HarnessError

from benchmarks.c_program import compile_cpp
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Session
from benchmarks.memory.traces import TRACES

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
TIMEOUT_S = 120
IN_C = ("pool", "async")
IN_PYTHON = ("torch", "rmm")


class Program:
    """The replaying program, compiled once."""

    def __init__(self, session: Session) -> None:
        sources = [*sorted((CSRC / "memory").glob("*.cpp")), CSRC / "driver" / "driver.cpp", CSRC / "base" / "log.cpp"]
        self.path = compile_cpp(session.builds / "replay", HERE / "replay.cpp", *sources)
        self.environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", CUDASCHED_OFF="1")
        if session.rehearsal:
            device = session.builds / "device"
            device.mkdir(mode=0o700)
            self.environment |= {
                "LD_LIBRARY_PATH": str(hook.locate().simulated_driver.parent),
                "CUDASCHED_SIM_DIR": str(device),
                "CUDASCHED_SIM_SCALE": "1",
            }

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink()

    def run(self, arm: str, history: str) -> dict[str, Any]:
        """What one replay prints. Raises HarnessError: it failed."""
        command = [str(self.path), arm, history]
        if arm in IN_PYTHON:
            command = [sys.executable, "-m", "benchmarks.memory.rivals", arm, history]
        return said(command, self.environment)


def said(command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """The JSON object that a process prints. Raises HarnessError."""
    try:
        done = subprocess.run(
            command,
            cwd=HERE.parents[1],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        made: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise HarnessError(f"{' '.join(command)}: {error}") from error
    return made


def replays(session: Session) -> None:
    """Each history with each allocator that is here."""
    program = session.shared(Program)
    installed = [name for name in IN_PYTHON if importlib.util.find_spec(name) and not session.rehearsal]
    for name, make in TRACES.items():
        history = session.builds / name
        history.write_text("".join(f"{identity} {size}\n" for identity, size in make(session.options.steps)))
        for arm in (*IN_C, *installed):
            session.need(TIMEOUT_S / 4)
            made = program.run(arm, str(history))
            session.store.keep(f"replays/{name}/{arm}", made)
            session.say(f"{name} {arm}: {made['reserved'] / made['used']:.3f} reserved of used, {made['s']:.2f} s")


def hot(session: Session) -> None:
    """Allocations and frees of sizes that are free."""
    for arm in IN_C:
        made = session.shared(Program).run(arm, "hot")
        session.store.keep(f"hot/{arm}", made)
        session.say(f"{arm}: {made['ns']} ns, by size an allocation and a free")


def find(done: Done) -> Found:
    """The figures of what was measured."""
    found: Found = {}
    for arm in (*IN_C, *IN_PYTHON):
        parts = {name: done.get(f"replays/{name}/{arm}") for name in TRACES}
        ratios = {name: part["reserved"] / part["used"] for name, part in parts.items() if part}
        if len(ratios) == len(TRACES):
            odd = ratios.pop("odd")
            found[f"{arm}_odd_of_used"] = odd, odd, odd, 1
            found[f"{arm}_reserved_of_used"] = (
                max(ratios.values()),
                min(ratios.values()),
                max(ratios.values()),
                len(ratios),
            )
        if (times := done.get(f"hot/{arm}")) is not None:
            found[f"{arm}_alloc_ns"] = max(times["ns"]), min(times["ns"]), max(times["ns"]), len(times["ns"])
    return found


BENCHMARK = Benchmark(
    about="the memory pool against other allocators",
    groups={"replays": replays, "hot": hot},
    goals={
        "pool_reserved_of_used": (1.02, "less"),
        "pool_alloc_ns": (300.0, "less"),
        **{f"{arm}_reserved_of_used": (0.0, "more") for arm in ("async", *IN_PYTHON)},
        **{f"{arm}_odd_of_used": (0.0, "more") for arm in (*IN_C, *IN_PYTHON)},
        "async_alloc_ns": (0.0, "more"),
    },
    find=find,
    settings={"steps": (40, 6)},
    torch=False,
)
