"""A run's result, as a header, as JSON and as text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from cudasched._version import __version__
from cudasched.tune.space import number
from cudasched.tune.tuner import Tuned

__all__ = ["as_header", "as_json", "summary"]


def summary(tuned: Tuned, count: int = 10) -> dict[str, Any]:
    """A run as plain data: `cudasched tune --json` and the file of ``-o NAME.json`` have it."""
    problem = tuned.problem
    return {
        "kernel": problem.space.kernel,
        "gpu": problem.gpu.name,
        "compute_capability": problem.gpu.capability,
        "shape": dict(problem.shape),
        "strategy": tuned.strategy,
        "configurations": len(problem.configurations),
        "evaluations": tuned.evaluations,
        "known": len(tuned.measurements),
        "interrupted": tuned.interrupted,
        "best": dict(tuned.configuration),
        "time_us": tuned.time_us,
        "work_per_s": tuned.work_per_s,
        "failures": tuned.failures(),
        "trace_us": [None if math.isinf(one) else one for one in tuned.trace],
        "configurations_by_time": [
            {
                "configuration": dict(problem.configurations[index]),
                "time_us": one.time_us,
                "samples": len(one.samples_us),
                "registers": one.registers,
                "local_bytes": one.local_bytes,
                "occupancy": one.occupancy,
                "workspace_bytes": one.workspace_bytes,
                "sm_clock_mhz": one.sm_clock_mhz,
                "profile": one.profile,
            }
            for index, one in tuned.best(count)
        ],
    }


def as_json(tuned: Tuned) -> str:
    """The file of ``-o NAME.json``."""
    return json.dumps(summary(tuned), indent=1) + "\n"


def as_header(tuned: Tuned) -> str:
    """The best configuration as macros, for a build that compiles the kernel with ``-include NAME.h``."""
    problem = tuned.problem
    shape = ", ".join(f"{name} = {number(value)}" for name, value in problem.shape.items())
    guard = re.sub(r"\W", "_", f"CUDASCHED_TUNED_{problem.space.kernel}_H").upper()
    launch = problem.launch(tuned.configuration)
    lines = [
        f"// {problem.space.kernel} on {_plain(problem.gpu.name)} for {shape or 'any shape'}: {tuned.time_us:.2f} us.",
        f"// Written by cudasched {__version__} after {len(tuned.measurements)} of "
        f"{len(problem.configurations)} configurations.",
        f"#ifndef {guard}",
        f"#define {guard}",
        *(f"#define {name} {value}" for name, value in launch.macros),
        f"#define {problem.space.kernel.upper()}_THREADS {launch.threads}",
        f"#define {problem.space.kernel.upper()}_SHARED_BYTES {launch.shared_bytes}",
        "#endif",
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Without characters that would end a comment line."""
    return re.sub(r"[^ -~]|\\", "?", text)
