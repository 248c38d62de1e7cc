"""NVML's facts about the GPUs, and their processes that are not clients of a run directory.

NVML numbers processes as the host does and knows nothing of pid namespaces. Where a process is seen in ``/proc``, its
mapped client table shows whether it is a client, in any pid namespace. Where it is not seen (this process is in a
container itself), only its memory is known, and counts as unaccounted for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from cudasched._text import printable
from cudasched.observe._metrics import Device, Process
from cudasched.status import Client
from cudasched.status import Device as StatusDevice

__all__ = ["Foreign", "Gpu", "GpuShare", "gpus", "of_status", "sm_ratios", "with_gpus"]

_PROC = Path("/proc")
_MPS_SERVER = "nvidia-cuda-mps"
_T = TypeVar("_T")
_MOST_CLIENTS = 4096
_clients: set[tuple[int, int, int]] = set()
"""Processes that are known to be clients: pid, time of start, and the table's inode."""
_begun_by: int | None = None
"""The process that has begun NVML; a child begins it anew."""


@dataclass(frozen=True)
class Foreign:
    """A process on a GPU that is no client of the run directory.

    Attributes:
        pid: As this process's pid namespace numbers it.
        name: Of the program.
        memory_bytes: Its memory on the GPU; None: unknown to NVML.
        elsewhere: It runs under cudasched, with another run directory, and so is not coordinated with the clients here.
    """

    pid: int
    name: str
    memory_bytes: int | None
    elsewhere: bool


@dataclass(frozen=True)
class GpuShare:
    """One class's use of a GPU.

    Attributes:
        client_class: ``latency``, ``normal``, ``best_effort``; ``mixed``: of processes with clients of several;
            ``foreign``: of processes that are no clients.
        memory_bytes: On the GPU.
        sm_ratio: Share of the last moments in which its kernels ran, 0 to 1; None: NVML does not say.
    """

    client_class: str
    memory_bytes: int
    sm_ratio: float | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML sees it; None stands for a value that this GPU or driver does not give.

    Attributes:
        uuid: Of the GPU.
        sm_ratio: Share of the last moments in which any kernel ran, 0 to 1.
        memory_used_bytes: In use, by whomever.
        memory_total_bytes: Of the GPU.
        sm_clock_hz: Now.
        power_w: Now, watts.
        foreign: Processes that are no clients of the run directory.
        unaccounted_bytes: Memory of processes that cannot be told from here, because they are in pid namespaces that
            this process does not see.
        shares: By class.
        sm_ratios: Of each client, by the pid in its own pid namespace: the share of the last moments in which its
            kernels ran, 0 to 1, of any class. Clients without a value of NVML are missing.
    """

    uuid: str
    sm_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_hz: float | None = None
    power_w: float | None = None
    foreign: tuple[Foreign, ...] = ()
    unaccounted_bytes: int = 0
    shares: tuple[GpuShare, ...] = ()
    sm_ratios: Mapping[int, float] = field(default_factory=dict)


def _said(call: Callable[[], _T]) -> _T | None:
    """NVML's answer; None where there is none, for any reason: this is for show."""
    try:
        return call()
    except Exception:
        return None


def _innermost_pid(pid: int) -> int | None:
    """The pid by which a process knows itself; None: no such process is seen from here."""
    try:
        for line in (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        return None
    return pid


def _name_of(pid: int) -> str:
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        words = [os.path.basename(os.fsdecode(word)) for word in arguments if word]
        if words and words[0].startswith("python") and len(words) > 1:
            words = [word for word in words[1:] if not word.startswith("-")] or words
        if words:
            return printable(words[0][:64])
        return printable((_PROC / str(pid) / "comm").read_text(errors="replace").strip())
    except OSError:
        return "?"


def _is_client(pid: int, table: Path) -> bool | None:
    """Whether the process is a client of this table; None: it uses another table of the same GPU.

    A process that has mapped the table is not examined again. That takes milliseconds for one with thousands of
    mappings, and a scrape examines all processes of all GPUs.
    """
    try:
        inode = table.stat().st_ino
        # The name may have blanks and brackets; the time of the start is the 20th field after it.
        started = int((_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[19])
        if (pid, started, inode) in _clients:
            return True
        maps = (_PROC / str(pid) / "maps").read_bytes().splitlines()
    except (OSError, ValueError, IndexError):
        return False
    tables = [line.split() for line in maps if line.endswith(os.fsencode(table.name))]
    if any(fields[4] == str(inode).encode() for fields in tables):
        if len(_clients) >= _MOST_CLIENTS:
            _clients.clear()
        _clients.add((pid, started, inode))
        return True
    if tables:
        return None
    # Before its first launch, a program under cudasched uses no table.
    return any(line.endswith(b"libcudasched.so") for line in maps)


def _gpu(nvml: Any, device: Device, clients: dict[int, set[str]]) -> Gpu | None:
    uuid = device.uuid
    handle = _said(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
    if handle is None:
        return None
    memory = _said(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)) or _said(
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle)  # before driver 510: with the driver's own memory
    )
    used = None if memory is None else int(memory.used)
    rates = _said(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    clock = _said(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    power = _said(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    running = _said(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    busy: dict[int, float] = {
        int(sample.pid): sample.smUtil / 100
        for sample in _said(lambda: nvml.nvmlDeviceGetProcessUtilization(handle, 0)) or ()
    }
    foreign: list[Foreign] = []
    memory_of: dict[str, int] = {}
    sm_of: dict[str, float] = {}
    sm_ratios: dict[int, float] = {}
    unseen = 0
    for entry in running or ():
        pid = int(entry.pid)
        has = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
        own_pid = _innermost_pid(pid)
        if own_pid is None:
            unseen += has or 0
            continue
        name = _name_of(pid)
        member = _is_client(pid, device.path)
        if member:
            classes = clients.get(own_pid, {"normal"})
            whose = next(iter(classes)) if len(classes) == 1 else "mixed"
        else:
            whose = "foreign"
            if not name.startswith(_MPS_SERVER):  # a server's memory is that of its clients' common context
                foreign.append(Foreign(pid, name, has, elsewhere=member is None))
        memory_of[whose] = memory_of.get(whose, 0) + (has or 0)
        if pid in busy:
            sm_of[whose] = sm_of.get(whose, 0.0) + busy[pid]
            if member:
                sm_ratios[own_pid] = sm_ratios.get(own_pid, 0.0) + busy[pid]
    if running is not None and not running and used is not None and clients:
        unseen = used  # in a container, older drivers list no process
    return Gpu(
        uuid=uuid,
        sm_ratio=None if rates is None else rates.gpu / 100,
        memory_used_bytes=used,
        memory_total_bytes=None if memory is None else int(memory.total),
        sm_clock_hz=None if clock is None else clock * 1e6,
        power_w=None if power is None else power / 1e3,
        foreign=tuple(sorted(foreign, key=lambda each: each.pid)),
        unaccounted_bytes=unseen,
        shares=tuple(GpuShare(whose, memory_of[whose], sm_of.get(whose)) for whose in sorted(memory_of)),
        sm_ratios=sm_ratios,
    )


def gpus(devices: Iterable[Device], processes: Iterable[Process]) -> dict[str, Gpu]:
    """NVML's facts about GPUs, by UUID; empty where nvidia-ml-py or the NVIDIA driver is not installed.

    Args:
        devices: The GPUs, from `clients`.
        processes: The clients of these.
    """
    devices, processes = list(devices), list(processes)
    nvml = _nvml() if devices else None
    if nvml is None:
        return {}
    found = {}
    for device in devices:
        clients: dict[int, set[str]] = {}
        for process in processes:
            for place, client in process.clients:
                if place == device.uuid:
                    clients.setdefault(process.pid, set()).add(client.client_class)
        if (gpu := _gpu(nvml, device, clients)) is not None:
            found[device.uuid] = gpu
    if not found:
        _end(nvml)
    return found


def _nvml() -> Any:
    """NVML, initialised for good, as the start takes tens of milliseconds. None where nvidia-ml-py is missing."""
    global _begun_by
    try:
        import pynvml as nvml
    except ImportError:
        return None
    if _begun_by != os.getpid():
        if _said(lambda: nvml.nvmlInit() or True) is None:
            return None
        _begun_by = os.getpid()
    return nvml


def _end(nvml: Any) -> None:
    """So that NVML begins anew: it finds none of the GPUs, for example after the driver was loaded anew."""
    global _begun_by
    _said(lambda: nvml.nvmlShutdown() or True)
    _begun_by = None


def sm_ratios(devices: Iterable[Device]) -> dict[str, Mapping[int, float]]:
    """`Gpu.sm_ratios` of each GPU that NVML knows, by UUID."""
    return {device.uuid: device.gpu.sm_ratios for device in devices if device.gpu is not None}


def with_gpus(devices: list[Device], processes: list[Process]) -> list[Device]:
    """The devices with NVML's facts."""
    known = gpus([device for device in devices if device.uuid], processes)
    return [replace(device, gpu=known.get(device.uuid)) for device in devices]


def of_status(devices: Iterable[StatusDevice]) -> tuple[list[Device], list[Process]]:
    """The data of `cudasched.status` in the form of `clients`, without the processes' counters."""
    found: dict[object, list[tuple[str, Client]]] = {}
    listed = []
    for device in devices:
        listed.append(Device(device.uuid, device.name, device.error, device.path))
        for client in device.clients:
            key: object = client.process or (device.uuid, client.slot)
            found.setdefault(key, []).append((device.uuid, client))
    processes = [
        Process(first.process, first.pid, first.name, first.version, None, tuple(clients))
        for clients in found.values()
        for _, first in clients[:1]
    ]
    return listed, processes
