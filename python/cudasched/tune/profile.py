"""Looking closely at a few configurations: Nsight Compute's counters, compute-sanitizer's findings.

Both run one configuration in a process of its own. Clocks are left unchanged (``--clock-control none``).
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections.abc import Mapping

from cudasched.errors import Error
from cudasched.tune.compile import CompileError
from cudasched.tune.workers import Live

__all__ = ["METRICS", "parse", "profile", "require", "sanitize"]

METRICS: Mapping[str, str] = {
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "compute_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
}
"""The shown metrics of a configuration, and their names in Nsight Compute."""
_TOOL_S = 120.0
_FOUND = 86


def require(name: str) -> str:
    """Where a tool is.

    Raises:
        Error: The tool is missing.
    """
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if found is None:
        raise Error(f"there is no {name} on the PATH: it is part of CUDA's toolkit")
    return found


def parse(text: str) -> dict[str, float]:
    """The metrics in the output of ``ncu --csv``.

    Raises:
        Error: The output has none; the text has ncu's message.
    """
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    names = {metric: name for name, metric in METRICS.items()}
    found = {}
    if first is not None:
        for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
            name = names.get(row.get("Metric Name") or "")
            if name:
                try:
                    found[name] = float((row.get("Metric Value") or "").replace(",", ""))
                except ValueError:
                    continue
    if not found:
        said = [line for line in lines if line.startswith("==")] or lines[-3:]
        raise Error(f"Nsight Compute gave no counters: {' '.join(said)[:300]}")
    return found


def profile(live: Live, index: int) -> dict[str, float]:
    """Counters of one launch of a configuration, by the names of `METRICS`.

    Raises:
        Error: ncu is not there, may not read the counters, or took too long.
    """
    ncu = require("ncu")
    command = [ncu, "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS.values())]
    command += ["--kernel-name", live.problem.space.kernel, "--launch-count", "1", "--target-processes", "all"]
    try:
        code, text = live.under(lambda program: [*command, *program], index, 1, _TOOL_S)
    except (OSError, CompileError) as error:
        raise Error(f"--profile: {error}") from None
    if code == 124:
        raise Error(f"--profile: Nsight Compute did not end within {_TOOL_S:g} s")
    return parse(text)


def sanitize(live: Live, index: int) -> str:
    """The faults that compute-sanitizer finds in a configuration; empty: none.

    Raises:
        Error: compute-sanitizer is not there, or cannot look.
    """
    tool = require("compute-sanitizer")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(_FOUND)]
    try:
        code, text = live.under(lambda program: [*command, *program], index, 1, _TOOL_S)
    except (OSError, CompileError) as error:
        raise Error(f"--sanitize: {error}") from None
    if code == 124:
        return f"under compute-sanitizer it did not end within {_TOOL_S:g} s"
    if code == _FOUND:
        lines = [re.sub(r"^=+ ?", "", line) for line in text.splitlines() if line.startswith("=========")]
        told = [line for line in lines if line.strip() and not line.startswith("COMPUTE-SANITIZER")]
        return "compute-sanitizer: " + "; ".join(line.strip() for line in told[:3])
    if code != 0:
        raise Error(f"--sanitize: the run under compute-sanitizer ended with {code}: {text.strip()[-300:]}")
    return ""
