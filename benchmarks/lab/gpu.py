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

    NVML may number processes of another pid namespace; only where one of the benchmark's own is among them, the others
    are judged.

    Raises:
        BusyGpuError: Names them.
    """
    here = {pid: name for pid, name in meta.gpu_processes().items() if _runs(pid, name)}
    strangers = {pid: name for pid, name in here.items() if not _is_own(pid)}
    if strangers and len(strangers) < len(here):
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


def _runs(pid: int, name: str) -> bool:
    """Whether this process runs such a program, other than MPS, here."""
    place = PROC / str(pid)
    program = Path(name).name
    try:
        first = os.fsdecode((place / "cmdline").read_bytes().partition(b"\0")[0])
        return not program.startswith(MPS) and program in (Path(first).name, (place / "exe").resolve().name)
    except OSError:
        return False


def _is_own(pid: int) -> bool:
    """Whether it is this process or a descendant, or has ended."""
    try:
        while pid > 1 and pid != os.getpid():
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return True
    return pid > 1
