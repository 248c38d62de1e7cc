"""Whether the GPU is the benchmark's alone and keeps its clock: NVML's answers, by nvidia-smi."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cudasched.demo.harness import HarnessError

from benchmarks import meta

PROC = Path("/proc")
#: A GPU without work says 0%; so much may be left of a process that has just ended.
IDLE_PERCENT, LOOKS, LOOK_S = 5, 4, 1.0
MPS = "nvidia-cuda-mps"
SLOWDOWNS = ("clocks_event_reasons.hw_slowdown", "clocks_event_reasons.sw_thermal_slowdown")


class BusyGpuError(HarnessError):
    """Another process is on the GPU."""


class ClockError(HarnessError):
    """The GPU lowered its clock, for heat or power brakes."""


def refuse_busy() -> None:
    """Before the benchmark has processes of its own: any process is another's.

    Raises:
        BusyGpuError: Names the processes, or the utilisation where NVML lists none.
    """
    if found := meta.gpu_processes():
        raise BusyGpuError(f"the GPU is busy with {_named(found)}: end them, or choose another by CUDA_VISIBLE_DEVICES")
    for look in range(LOOKS):
        used = meta.nvidia_smi("utilization.gpu", "--format=csv,noheader,nounits") or ""
        if not used.isdigit() or int(used) <= IDLE_PERCENT:
            return
        time.sleep(LOOK_S if look + 1 < LOOKS else 0.0)
    raise BusyGpuError(f"the GPU is {used}% busy with processes that are not seen from here (another container?)")


def refuse_strangers() -> None:
    """While the benchmark runs: a process that is neither a descendant of this one nor MPS's.

    A number that is no process here is of another pid namespace and may be the benchmark's own.

    Raises:
        BusyGpuError: Names them.
    """
    strangers = {pid: name for pid, name in meta.gpu_processes().items() if _is_stranger(pid, name)}
    if strangers:
        raise BusyGpuError(f"the GPU is busy with {_named(strangers)}, which the benchmark did not start")


def refuse_slow() -> None:
    """After a cell.

    Raises:
        ClockError: The GPU's clock is lowered for heat or a power brake; the cell has to be measured again.
    """
    reasons = meta.nvidia_smi(",".join(SLOWDOWNS)) or ""
    if "Active" in reasons.split(", "):
        raise ClockError(f"the GPU lowered its clock to {meta.sm_clock_mhz()} MHz, for heat or a power brake")


def _named(found: dict[int, str]) -> str:
    return ", ".join(f"process {pid} ({name})" for pid, name in sorted(found.items()))


def _is_stranger(pid: int, name: str) -> bool:
    program = Path(name).name
    try:
        first = (PROC / str(pid) / "cmdline").read_bytes().partition(b"\0")[0]
        if program.startswith(MPS) or program not in (
            Path(os.fsdecode(first)).name,
            (PROC / str(pid) / "exe").resolve().name,
        ):
            return False
        while pid > 1:
            if pid == os.getpid():
                return False
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return True
