"""Launches of one program, as the simulator wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudasched import hook
from cudasched.errors import ConfigError
from cudasched.simulate._limits import checked

if TYPE_CHECKING:
    from cudasched._core import Trace as CoreTrace

__all__ = ["Trace", "engine", "host_trace", "request", "trace_of"]

MS = 1e6
REQUEST_GAP_MS = 1.0


def engine() -> Any:
    """``cudasched._core``."""
    return hook.load_core()


@dataclass(frozen=True)
class Trace:
    """Launches of one process on one GPU, as the simulator wants them.

    Attributes:
        name: Of the program.
        launches: How many.
        gpu_ms: GPU time of all launches, ms; overlapping time counts once.
        load: The benchmark load of the trace, where labels or the name tell; else empty.
        core: The launches themselves.
        ends: Where requests end.
        gpu: On which it was recorded; empty: not known.
        source: The part of a recording; empty where the trace was not read from one.
        slowed: What a recording does not tell of its own cost, for people; empty: nothing that counts.
    """

    name: str
    launches: int
    gpu_ms: float
    load: str
    core: CoreTrace
    ends: tuple[int, ...]
    gpu: str = ""
    source: str = ""
    slowed: str = ""


def trace_of(
    submitted_ns: Sequence[int],
    start_ns: Sequence[int | None],
    duration_ns: Sequence[int],
    *,
    name: str = "trace",
    load: str = "",
    requests: bool = False,
    request_gap_ms: float = REQUEST_GAP_MS,
    kernels: int = 1,
    recording_us: float = 0.0,
) -> Trace:
    """A trace of launches in the order of their submission.

    Args:
        submitted_ns: When each launch call began, ns.
        start_ns: When it began on the GPU, on the same clock; None: not known.
        duration_ns: The launch's time, ns.
        name: Of the program.
        load: The benchmark load.
        requests: Each launch is a request of its own.
        request_gap_ms: Else a request ends where the GPU had nothing for so long, ms.
        kernels: Each launch is a graph of so many kernels: between them, other programs may get the GPU.
        recording_us: The program's cost of recording a launch, us; subtracted from its own time between launches.

    Raises:
        ConfigError: The columns differ in length, or are empty; a launch has no kernel.
    """
    if not submitted_ns:
        raise ConfigError(f"{name} has no launches")
    checked("kernels", kernels)
    starts = [-1 if start is None else start for start in start_ns]
    recording_ns = round(checked("recording_us", recording_us) * 1e3)
    core = engine().Trace(list(submitted_ns), starts, list(duration_ns), kernels, recording_ns)
    gap_ns = round(checked("request_gap_ms", request_gap_ms) * MS)
    ends = range(1, len(core) + 1) if requests else core.request_ends(gap_ns)
    return Trace(name, len(core), core.gpu_ns / MS, load, core, tuple(ends))


def host_trace(
    gap_ns: Sequence[int],
    gpu_ns: Sequence[int],
    waits: Sequence[bool],
    *,
    ends: Sequence[int] = (),
    name: str = "trace",
    load: str = "",
) -> Trace:
    """A trace with known host time between two launches, and known waits for the GPU.

    Args:
        gap_ns: The host's own time since the launch before began, or since the program had waited, ns.
        gpu_ns: How long each launch runs on the GPU, ns.
        waits: Whether the program waits for the GPU before it.
        ends: Where requests end; empty: it is one.
        name: Of the program.
        load: The benchmark load.

    Raises:
        ConfigError: The columns differ in length, or are empty; a request ends where no launch is.
    """
    if not gap_ns:
        raise ConfigError(f"{name} has no launches")
    if list(ends) != sorted(set(ends)) or (ends and not 0 < ends[0] <= ends[-1] == len(gap_ns)):
        raise ConfigError(f"the requests of {name} must end one after another, the last with the last launch")
    core = engine().Trace.of_host(list(gap_ns), list(gpu_ns), list(waits))
    return Trace(name, len(core), core.gpu_ns / MS, load, core, tuple(ends) or (len(core),))


def request(gpu_ms: float, *, kernels: int = 1, name: str = "request") -> Trace:
    """A request that is one launch.

    Args:
        gpu_ms: GPU time, ms.
        kernels: It is a graph of so many kernels.
        name: Of the server.

    Raises:
        ConfigError: The time is not above 0, or there is no kernel.
    """
    checked("gpu_ms", gpu_ms)
    return trace_of([0], [None], [round(gpu_ms * MS)], name=name, requests=True, kernels=kernels)
