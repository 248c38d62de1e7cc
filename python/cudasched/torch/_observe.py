"""Memory of PyTorch's allocator by class, stream and region."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from cudasched.errors import ConfigError, StateError
from cudasched.torch import _adapter, _extension, _regions

__all__ = ["Memory", "Timeline", "memory", "memory_timeline", "observe"]

_CLASSES = ("normal", "latency", "best_effort")  # in the order of include/cudasched/engine.h

_lock = threading.Lock()
_library: _extension.Library | None = None
_attached = False  # to the allocator, which it stays
_regions_by_name = defaultdict[str, int](itertools.count(1).__next__, {"": 0})  # a new name's number is made whole
_forked = False  # counted in the process that this one is a child of


@dataclass(frozen=True)
class Memory:
    """The memory that PyTorch's allocator holds on a device, in bytes.

    Attributes:
        requested_bytes: Bytes that tensors asked for, until their free is complete; as ``requested_bytes.all.current``.
        requested_peak: The most since `observe`.
        allocated_bytes: The same rounded as the allocator does, as ``allocated_bytes.all.current``.
        reserved_bytes: The allocator's memory from the driver, as ``reserved_bytes.all.current``.
        reserved_peak: The most since `observe`.
        by_class: `requested_bytes` by class: that of the stream on which a tensor was allocated, else of the region.
        peak_by_class: The most of each.
        by_stream: `requested_bytes` by CUstream; 0 is the default stream.
        by_region: `requested_bytes` by the name of the region; "" is outside, and of regions without a name. A
            backward pass counts for its forward pass's.
        over_limit: How often regions crossed their ``memory_limit``, by name.
        fragmentation: 1 - the largest free block / all free reserved memory; 0 where nothing is free.
        lost: Records that the ring had no room for: where it is not 0, the bytes above are about right.
    """

    requested_bytes: int
    requested_peak: int
    allocated_bytes: int
    reserved_bytes: int
    reserved_peak: int
    by_class: dict[str, int]
    peak_by_class: dict[str, int]
    by_stream: dict[int, int]
    by_region: dict[str, int]
    over_limit: dict[str, int]
    fragmentation: float
    lost: int


@dataclass(frozen=True)
class Timeline:
    """Memory of PyTorch's allocator over time; each value is the most from its point to the next.

    Attributes:
        seconds: When each point begins, as ``time.monotonic()``.
        by_class: `Memory.by_class` at each point.
        by_region: `Memory.by_region` at each point; regions beyond the first 15 stand together in the last name.
        reserved_bytes: `Memory.reserved_bytes` at each point.
    """

    seconds: list[float]
    by_class: dict[str, list[int]]
    by_region: dict[str, list[int]]
    reserved_bytes: list[int]


def observe() -> None:
    """Begins to count PyTorch's memory by class, on all devices; `memory` tells. Does nothing the second time.

    Compiles the PyTorch extension at its first use on a machine, some ten seconds. PyTorch's allocator stays in place
    and reports its actions.

    Raises:
        ExtensionError: The extension is not available (the message says why), or PyTorch's allocator is not its own
            (``cudaMallocAsync``, or a pluggable one), which tells nothing.
    """
    global _attached, _library
    with _lock:
        if _library is not None:
            return
        torch: Any = importlib.import_module("torch")
        _extension.check_version(torch)
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise _extension.ExtensionError(
                f"PyTorch allocates by {backend}, which reports no allocations; torch.cuda.mem_get_info has the "
                "driver's bytes"
            )
        torch.cuda.init()
        library = _extension.load()
        if not _attached:
            library.attach()
            _attached = True
        segments = torch.cuda.memory_snapshot()  # if it fails, nothing else is begun
        _adapter.on_new_stream(lambda device, stream, name: library.name_stream(device, stream, _CLASSES.index(name)))
        for segment in segments:
            device = int(segment["device"])
            library.begin_with_reserved(device, segment["total_size"])
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    asked = block.get("requested_size", block["size"])
                    library.begin_with(device, block["address"], asked, segment["stream"])
        _regions.on_change(lambda kind, name: library.scope(_CLASSES.index(kind), _regions_by_name[name]))
        library.begin()
        _regions.on_limits(_Limits(library))
        _library = library


def _forget() -> None:
    """In the child of a fork: the counts are the parent's, and another thread of the parent may have held the lock."""
    global _forked, _library, _lock
    _forked = _forked or _library is not None
    _library = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


class _Limits:
    def __init__(self, library: _extension.Library) -> None:
        self._library = library

    def limit(self, name: str, size: int) -> None:
        _limited.add(name)
        self._library.limit(_regions_by_name[name], size)

    def over(self, name: str) -> int:
        return int(self._library.over_limit(-1, _regions_by_name[name]))


_limited: set[str] = set()


def _observed(device: int | None) -> tuple[_extension.Library, int]:
    library = _library
    if library is None:
        if _forked:
            raise StateError(
                "nothing is counted in the child of a fork, where PyTorch does not use CUDA: start the process by "
                "spawn, and call cudasched.torch.observe() there"
            )
        raise StateError("nothing is counted: call cudasched.torch.observe() first, where the program begins")
    if device is None:
        torch: Any = importlib.import_module("torch")
        device = int(torch.cuda.current_device())
    if not 0 <= device < _extension.DEVICES:
        raise ConfigError(f"device = {device}: must be from 0 to {_extension.DEVICES - 1}")
    return library, device


def memory_timeline(device: int | None = None) -> Timeline:
    """PyTorch's memory since `observe`, in at most 2,048 points: a millisecond each at first, longer in long programs.

    Args:
        device: The number; None: the current one.

    Raises:
        StateError: `observe` was not called, or was before a fork that this process is a child of.
        ConfigError: There can be no such device.
    """
    library, device = _observed(device)
    points = library.timeline(device)
    names: list[list[str]] = [[] for _ in range(_extension.REGIONS)]
    for name, number in sorted(_regions_by_name.items(), key=lambda item: item[1]):
        names[min(number, _extension.REGIONS - 1)].append(name)
    return Timeline(
        seconds=[point.begin_ns / 1e9 for point in points],
        by_class={name: [int(point.by_class[i]) for point in points] for i, name in enumerate(_CLASSES)},
        by_region={
            ", ".join(together): [int(point.by_region[i]) for point in points]
            for i, together in enumerate(names)
            if together
        },
        reserved_bytes=[int(point.reserved) for point in points],
    )


def memory(device: int | None = None) -> Memory:
    """The memory that PyTorch holds now.

    Args:
        device: The number; None: the current one.

    Raises:
        StateError: `observe` was not called, or was before a fork that this process is a child of.
        ConfigError: There can be no such device.
    """
    library, device = _observed(device)
    torch: Any = importlib.import_module("torch")
    totals = library.read(device)
    regions = library.parts(device, by_region=True)
    names = {number: name for name, number in _regions_by_name.copy().items()}  # other threads enter regions
    free = [
        int(block["size"])
        for segment in torch.cuda.memory_snapshot()
        if int(segment["device"]) == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return Memory(
        requested_bytes=int(totals.requested),
        requested_peak=int(totals.requested_peak),
        allocated_bytes=int(torch.cuda.memory_allocated(device)),
        reserved_bytes=int(totals.reserved),
        reserved_peak=int(totals.reserved_peak),
        by_class=dict(zip(_CLASSES, map(int, totals.class_bytes), strict=True)),
        peak_by_class=dict(zip(_CLASSES, map(int, totals.class_peaks), strict=True)),
        by_stream=library.parts(device, by_region=False),
        by_region={names[number]: size for number, size in regions.items()},
        over_limit={name: int(library.over_limit(device, _regions_by_name[name])) for name in sorted(_limited)},
        fragmentation=1 - max(free) / sum(free) if free else 0.0,
        lost=int(totals.lost),
    )
