"""A server's host actions in its requests, from the profiler: launches and waits, for the simulator.

Run by path as client.py is; imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: The host's own time before the launch and the GPU's, in ns, and 1 where the program waited for the GPU before.
Launch = tuple[int, int, int]

#: Calls that return when the GPU is done. A copy that is not named asynchronous returns then, too.
_WAITS = ("Synchronize",)
_LAUNCHES = ("Launch", "Memcpy", "Memset")
_SYNCHRONOUS_COPIES = ("cudaMemcpy", "cuMemcpy", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol")


class HostCall(NamedTuple):
    """A call to CUDA, on the clock of the host."""

    start_ns: int
    end_ns: int
    name: str
    correlation: int


class DeviceWork(NamedTuple):
    """A kernel, copy or fill, on the clock of the device."""

    start_ns: int
    duration_ns: int
    correlation: int


def waits(name: str) -> bool:
    """Whether a call by this name returns only when the GPU has finished the submitted work."""
    base = name.split("_v")[0]
    return any(part in base for part in _WAITS) or (base.startswith(_SYNCHRONOUS_COPIES) and "Async" not in base)


def _told_by_order(calls: list[HostCall], works: list[DeviceWork]) -> list[HostCall]:
    """The calls, with the correlations of their work: the first call launched the work that ran first, and so on.

    That is so on one stream. Unchanged where the numbers of launches and of works differ.
    """
    told: list[HostCall] = []
    launching: list[int] = []
    ends_ns = 0
    for call in calls:
        outer = call.start_ns >= ends_ns  # else within the call before
        ends_ns = max(ends_ns, call.end_ns)
        if outer and any(part in call.name for part in _LAUNCHES):
            launching.append(len(told))
        told.append(call)
    if len(launching) != len(works):
        return told
    for place, work in zip(launching, works, strict=True):
        told[place] = told[place]._replace(correlation=work.correlation)
    return told


def requests_of(calls: Iterable[HostCall], works: Iterable[DeviceWork], count: int) -> list[list[Launch]]:
    """The launches of each of `count` requests that ran one after another, each waited for at its end.

    Args:
        calls: The host's calls, in any order.
        works: The GPU's works, in any order.
        count: Requests; the first is left out, because its begin is not known.

    Returns:
        For each request its launches; the host's own time is that since the launch before began, or since the program
        had waited.

    Raises:
        ValueError: No launch is known of any work, or the requests did not all launch the same.
    """
    calls, works = sorted(calls), sorted(works)
    took = {work.correlation: work.duration_ns for work in works}
    if not any(call.correlation in took for call in calls):
        calls = _told_by_order(calls, works)
    launches: list[Launch] = []
    before_ns: int | None = None
    waited = False
    told: set[int] = set()
    for call in calls:
        if waits(call.name):
            before_ns, waited = call.end_ns, True
        # The runtime's call and the driver's within it have one correlation: the outer one counts.
        if call.correlation in took and call.correlation not in told:
            told.add(call.correlation)
            gap_ns = 0 if before_ns is None else max(0, call.start_ns - before_ns)
            launches.append((gap_ns, took[call.correlation], int(waited)))
            before_ns, waited = (call.end_ns, True) if waits(call.name) else (call.start_ns, False)
    each, rest = divmod(len(launches), count)
    if not each:
        raise ValueError("the profiler told of no call that launched the kernels on the GPU")
    if rest:
        raise ValueError(f"{count} requests made {len(launches)} launches: they do not all launch the same")
    found = [launches[begin : begin + each] for begin in range(each, len(launches), each)]
    # That the request before was waited for is no wait of this one.
    return [[(gap_ns, gpu_ns, 0), *others] for (gap_ns, gpu_ns, _), *others in found]
