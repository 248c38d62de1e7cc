"""Nsight Compute: path, command line, and answers.

ncu runs with unchanged clocks (``--clock-control none``; the default locks them to a base that no program runs at). It
runs without cudasched's hook, whose launcher thread and events would be profiled too.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudasched._preload import removed
from cudasched.errors import ConfigError, Error

__all__ = ["Launch", "NcuError", "arguments", "environment", "find", "parse", "profile", "why"]

_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy")

METRICS: Mapping[str, tuple[str, ...]] = {
    "duration_ns": ("gpu__time_duration.sum",),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "dram_percent": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_bytes": ("dram__bytes.sum",),
    "l1_hit_percent": ("l1tex__t_sector_hit_rate.pct",),
    "l2_hit_percent": ("lts__t_sector_hit_rate.pct",),
    "load_sectors": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",),
    "store_sectors": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",),
    "tensor_percent": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "warps_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
"""Of each counter, the names that it has on one GPU or another, the best first."""

_UNITS: Mapping[str, float] = {
    **{"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9},
    **{"nsecond": 1.0, "usecond": 1e3, "msecond": 1e6, "second": 1e9},
    **{"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
}
"""Of times and bytes, should a version not print base units; other units stay."""

_STALL = re.compile(r"smsp__average_warps_issue_stalled_((?!selected_|\w*_not_issued)\w+?)_per_issue_active\.ratio")
_NOT_PERMITTED = "ERR_NVGPUCTRPERM"
_UNKNOWN_METRIC = re.compile(r"\bmetrics?\b.*?\b([a-z0-9]+__\w+(?:\.\w+)*)", re.IGNORECASE)
_MOST_SAID = 2000
_MOST_TRIES = 3


class NcuError(Error):
    """Nsight Compute gives no counters; the message has the reason and the remedy."""


@dataclass(frozen=True)
class Launch:
    """One profiled launch.

    Attributes:
        function: The kernel's mangled name.
        values: By counter; missing ones were not measured.
        stalls: Cycles by reason.
        shape: Its grid and block; None: ncu does not say.
    """

    function: str
    values: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None


def find(chosen: str | os.PathLike[str] | None = None) -> Path:
    """The path of ncu: the chosen one, on the PATH, or the newest in toolkits' places.

    Raises:
        NcuError: There is no ncu.
        ConfigError: The chosen program cannot be run.
    """
    if chosen is not None:
        # A path loses its "./", and a name without a slash would be looked for on the PATH alone.
        here = Path(chosen).absolute()
        found = shutil.which(here if here.is_file() else chosen)
        if found is None:
            raise ConfigError(f"--ncu {os.fspath(chosen)}: there is no such program, or it cannot be run")
        return Path(found)
    found = shutil.which("ncu")
    if found is not None:
        return Path(found)
    for pattern in _PLACES:
        places = sorted(Path("/").glob(pattern.lstrip("/")), key=_version)
        usable = [place for place in places if os.access(place, os.X_OK)]
        if usable:
            return usable[-1]
    raise NcuError(
        "Nsight Compute (ncu) is not there: hardware counters are read through it. Install it (Debian and Ubuntu: "
        "cuda-nsight-compute; a part of the CUDA toolkit), or name it with --ncu. `cudasched advise` needs none"
    )


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The program's, without the hook: neither preloaded nor put in by `import cudasched`."""
    made = {name: value for name, value in own.items() if not name.startswith("CUDASCHED_COLLECT_")}
    made["CUDASCHED_OFF"] = "1"
    return removed(made)


def arguments(
    ncu: Path,
    log: Path,
    functions: Sequence[str],
    launches: int,
    program: Sequence[str],
    without: Collection[str] = (),
) -> list[str]:
    """The command.

    Args:
        ncu: The profiler.
        log: Where its answer goes: standard output is the program's.
        functions: Mangled names of the kernels to profile.
        launches: How many of each launch shape.
        program: The name and arguments.
        without: Metrics that are not asked for.
    """
    names = "|".join(re.escape(name) for name in functions)
    metrics = ",".join(name for names_of in METRICS.values() for name in names_of if name not in without)
    return [
        str(ncu),
        *("--clock-control", "none"),
        *("--target-processes", "all"),
        *("--kernel-name-base", "mangled", "--kernel-name", f"regex:^({names})$"),
        *("--filter-mode", "per-launch-config", "--launch-count", str(launches)),
        *(option for section in _SECTIONS for option in ("--section", section)),
        *(("--metrics", metrics) if metrics else ()),
        *("--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "mangled"),
        *("--log-file", str(log)),
        *program,
    ]


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:  # "n/a", "nan" of some locale, or nothing
        return None
    return value if value == value and abs(value) != float("inf") else None


def _shape(said: Mapping[str, str]) -> tuple[int, ...] | None:
    """Of "(1568, 1, 1)" and "(128, 1, 1)"."""
    sizes = re.findall(r"\d+", said.get("Grid Size", "")) + re.findall(r"\d+", said.get("Block Size", ""))
    return tuple(map(int, sizes)) if len(sizes) == 6 else None


def parse(text: str) -> list[Launch]:
    """The launches of ``--csv --page raw``: a line of names, one of units, one a launch; ncu's own words between them.

    Raises:
        NcuError: There are lines of another form.
    """
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return []
    rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[first:] if line.startswith('"')))))
    names = rows[0]
    if "Kernel Name" not in names:
        raise NcuError(f"ncu answers in a form that is not known: its columns are {', '.join(names[:6])} ...")
    kernel = names.index("Kernel Name")
    units: dict[str, str] = {}
    found = []
    for row in rows[1:]:
        if len(row) == len(names) and not any(row[: kernel + 1]):
            units = dict(zip(names, row, strict=True))
        if len(row) != len(names) or not row[0].isdigit():
            continue  # the units, a second header, or a line that was cut short
        said = dict(zip(names, row, strict=True))
        values, stalls = {}, {}
        for counter, candidates in METRICS.items():
            for name in candidates:
                value = _number(said.get(name, ""))
                if value is not None:
                    values[counter] = value * _UNITS.get(units.get(name, ""), 1.0)
                    break
        for name, cell in said.items():
            stall = _STALL.fullmatch(name)
            cycles = _number(cell) if stall else None
            if stall and cycles is not None:
                stalls[stall[1]] = cycles
        found.append(Launch(row[kernel], values, stalls, _shape(said)))
    return found


def why(said: str, code: int) -> str:
    """The reason why ncu does not count, from output and exit code; empty without a fault."""
    if _NOT_PERMITTED in said:
        return (
            f"the driver permits hardware counters to administrators alone ({_NOT_PERMITTED}). Run as root; in a "
            "container, with --cap-add=SYS_ADMIN; or let everybody: `options nvidia "
            "NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d, and load the module anew"
        )
    errors = [line.partition("==ERROR==")[2].strip() for line in said.splitlines() if "==ERROR==" in line]
    if errors:
        return "ncu says: " + "; ".join(dict.fromkeys(errors))[:_MOST_SAID]
    if "No kernels were profiled" in said:
        return "ncu profiled no kernel: the program launched other kernels than in the recorded run, or none"
    return f"ncu ended with exit code {code}" if code else ""


def unknown_metrics(said: str) -> set[str]:
    """The metrics that ncu does not know on this GPU, by its errors."""
    errors = [line.partition("==ERROR==")[2] for line in said.splitlines() if "==ERROR==" in line]
    return {found[1].rstrip(".") for error in errors for found in _UNKNOWN_METRIC.finditer(error)}


def profile(
    ncu: Path, functions: Sequence[str], program: Sequence[str], *, launches: int, directory: Path
) -> tuple[list[Launch], str]:
    """Runs the program under ncu. The program's output goes to standard error: standard output is the report's.

    Args:
        ncu: The profiler.
        functions: Mangled names of the kernels to profile.
        program: The name and arguments.
        launches: How many of each launch shape.
        directory: For ncu's answer.

    Returns:
        The launches, and why there are none, or fewer than there should be; empty if nothing is wrong.

    Raises:
        NcuError: ncu cannot be run, or answers in a form that is not known.
    """
    log = directory / "ncu.csv"
    without: set[str] = set()
    for _ in range(_MOST_TRIES):
        log.unlink(missing_ok=True)
        command = arguments(ncu, log, functions, launches, program, without)
        sys.stdout.flush()
        try:
            done = subprocess.run(
                command, env=environment(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise NcuError(f"{ncu} cannot be run: {error.strerror}") from None
        own = done.stdout.decode(errors="replace")
        sys.stderr.write(own)
        try:
            text = log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        found = parse(text)
        problem = why(text + "\n" + own, done.returncode)
        unknown = unknown_metrics(text + "\n" + own) - without
        if found or not unknown:
            break
        without |= unknown  # this GPU has them under other names, or not
    if not found and not problem:
        problem = "ncu gave no counters and no reason"
    return found, problem
