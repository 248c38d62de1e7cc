"""The counts of processes, with percentiles: of this process, and of every client on the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from cudasched import hook
from cudasched._text import printable
from cudasched.errors import Error
from cudasched.status import Client, Counted, Kernels, client_of, counts_of, kernels_of, launches_of

if TYPE_CHECKING:
    from cudasched import _core as stub
    from cudasched.observe._gpus import Gpu

__all__ = [
    "ERROR_BOUNDS",
    "Device",
    "Metrics",
    "Predictions",
    "Process",
    "RegionMetrics",
    "Times",
    "clients",
    "metrics",
]

_NS_PER_S = 1e9
_NS_PER_MS = 1e6
_FIRST_OCTAVE = 10

ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
"""Upper bounds of the buckets of prediction errors, as shares of the prediction; one more is open."""


def bucket_begin_ns(bucket: int) -> int:
    """Where a bucket of times begins, ns (``include/cudasched/counts.h``)."""
    if bucket <= 0:
        return 0
    octave, quarter = divmod(bucket - 1, 4)
    return (4 + quarter) << (_FIRST_OCTAVE - 2 + octave)


@dataclass(frozen=True)
class Times:
    """A histogram of times, four buckets an octave from 1 us to 17 s: quantiles are within 12% of the truth.

    Attributes:
        buckets: How many times are in each; `bucket_begin_ns` says where they begin.
        sum_s: All of them together, s.
    """

    buckets: tuple[int, ...] = ()
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.buckets)

    def quantile_ms(self, share: float) -> float | None:
        """The time that this share of all stay below, ms; None where there is none.

        Args:
            share: 0 to 1.
        """
        count = self.count
        if count == 0:
            return None
        rank = min(max(share, 0.0), 1.0) * count
        before = 0
        for bucket, here in enumerate(self.buckets):
            if here and before + here >= rank:
                begin = bucket_begin_ns(bucket)
                end = bucket_begin_ns(bucket + 1) if bucket + 1 < len(self.buckets) else begin
                return (begin + (end - begin) * (rank - before) / here) / _NS_PER_MS
            before += here
        raise AssertionError("unreachable")

    @property
    def p50_ms(self) -> float | None:
        """The median, ms."""
        return self.quantile_ms(0.5)

    @property
    def p95_ms(self) -> float | None:
        """The 95th percentile, ms."""
        return self.quantile_ms(0.95)

    @property
    def p99_ms(self) -> float | None:
        """The 99th percentile, ms."""
        return self.quantile_ms(0.99)


@dataclass(frozen=True)
class RegionMetrics:
    """Requests of the latency regions of one name.

    A request lasts from the region's entry until it is left and its work is complete, or until the next one begins.
    Launches of a program of class latency outside of regions count as requests without a name: each burst of launches
    until the program is idle. The steps of decorated coroutines and generators are no requests, and not counted.

    Attributes:
        name: Of the regions; "": those that have none; "(others)": those beyond a process's first 10 names.
        slo_ms: The target of the last one that had one, ms; None: none had.
        met: Requests with a target that kept it.
        missed: And that did not.
        times: How long all requests took, with a target or without.
    """

    name: str
    slo_ms: float | None
    met: int
    missed: int
    times: Times

    @property
    def requests(self) -> int:
        """How many there were."""
        return self.times.count

    @property
    def attainment(self) -> float | None:
        """The share of the requests with a target that kept it; None: none had one."""
        judged = self.met + self.missed
        return self.met / judged if judged else None


@dataclass(frozen=True)
class Predictions:
    """How good predictions were, of timed launches that ran with nothing else of the process beside them.

    Attributes:
        count: How many launches were timed.
        within_bound: Of these, those that took no longer than their upper bound.
        predicted_s: Their predicted time, s.
        measured_s: Their measured time, s.
        off_s: The differences, whatever their sign, s.
        errors: How many had an error of up to each of `ERROR_BOUNDS`, and over the last of them.
    """

    count: int = 0
    within_bound: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    off_s: float = 0.0
    errors: tuple[int, ...] = ()

    @property
    def coverage(self) -> float | None:
        """The share that kept to its upper bound, which is meant to be 0.9; None: none was timed."""
        return self.within_bound / self.count if self.count else None

    @property
    def error(self) -> float | None:
        """The mean error, weighted by time: all differences over all times measured; None: none was timed."""
        return self.off_s / self.measured_s if self.measured_s else None

    @property
    def bias(self) -> float | None:
        """Predicted over measured time, less 1: positive where predictions are too long."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


@dataclass(frozen=True, kw_only=True)
class Metrics(Counted):
    """The counts of one process since its first CUDA call.

    Attributes:
        launches: Kernel and graph launches that the driver accepted, by class.
        graph_launches: Of the best-effort launches, those of graphs.
        gate_wait: How long launches waited at the gate, those that did.
        queue_wait: From the program's call of an offloaded launch to the driver's, the wait at the gate included. One
            launch in 16 is timed.
        preemption: How much best-effort work was predicted to be in flight on the GPU when a request began beside a
            best-effort client: the work that the request waits for.
        in_flight_ms: Predicted GPU time still to run of the process's best-effort work, ms; of now.
        best_effort_gpu_s: Predicted GPU time of best-effort launches that are complete, s: its rate is best effort's
            goodput.
        latency_active_s: Time in which the process's latency work held the gate closed, s.
        launcher_cpu_s: CPU time of the launcher threads, s.
        launcher_driver_s: Of it, about how much was inside the driver's calls, s.
        predictions: Predicted against measured times.
        regions: Requests of latency regions, by name.
        kernels: How its best-effort kernels use the GPU, as predicted.
        numbers: All numbers of ``include/cudasched/counts.inc``, by name.
    """

    launches: dict[str, int]
    graph_launches: int
    gate_wait: Times
    queue_wait: Times
    preemption: Times
    in_flight_ms: float
    best_effort_gpu_s: float
    latency_active_s: float
    launcher_cpu_s: float
    launcher_driver_s: float
    predictions: Predictions
    regions: tuple[RegionMetrics, ...]
    kernels: Kernels = field(default_factory=Kernels)
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """One process on the GPUs of this machine, with its clients.

    Attributes:
        number: Drawn when it started; 0: not known yet.
        pid: As its own pid namespace numbers it.
        name: ``CUDASCHED_NAME``, else the program's name.
        version: The process's version of cudasched.
        metrics: The process's counts, as of some milliseconds ago; None: none yet.
        clients: The process's places in the tables: the GPU's UUID, and the client.
    """

    number: int
    pid: int
    name: str
    version: str
    metrics: Metrics | None
    clients: tuple[tuple[str, Client], ...]


@dataclass(frozen=True)
class Device:
    """One GPU's table.

    Attributes:
        uuid: Of the GPU, or of the MIG instance.
        name: As the driver names it.
        error: Why the table cannot be read; empty if it can.
        path: The table.
        gpu: NVML's answer for the GPU; None: NVML was not asked, or is not installed.
    """

    uuid: str
    name: str
    error: str = ""
    path: Path = Path()
    gpu: Gpu | None = None


def _times(read: tuple[list[int], int]) -> Times:
    return Times(buckets=tuple(read[0]), sum_s=read[1] / _NS_PER_S)


def _region(seen: stub.RegionCounts) -> RegionMetrics:
    return RegionMetrics(
        name=seen.name,
        slo_ms=seen.slo_ns / _NS_PER_MS if seen.slo_ns else None,
        met=seen.met,
        missed=seen.missed,
        times=_times(seen.times),
    )


def _metrics(seen: stub.Counts, in_flight_ms: float) -> Metrics:
    numbers = seen.numbers

    def seconds(name: str) -> float:
        return numbers[name] / _NS_PER_S

    return Metrics(
        launches={name: numbers[f"{name}_launches"] for name in ("normal", "latency", "best_effort")},
        **{each.name: numbers[each.name] for each in fields(Counted)},
        graph_launches=numbers["graph_launches"],
        gate_wait=_times(seen.gate_waits),
        queue_wait=_times(seen.queue_waits),
        preemption=_times(seen.preemptions),
        in_flight_ms=in_flight_ms,
        best_effort_gpu_s=seconds("best_effort_gpu_ns"),
        latency_active_s=seconds("latency_active_ns"),
        launcher_cpu_s=seconds("launcher_cpu_ns"),
        launcher_driver_s=seconds("launcher_driver_ns"),
        predictions=Predictions(
            count=numbers["predictions"],
            within_bound=numbers["within_bound"],
            predicted_s=seconds("predicted_ns"),
            measured_s=seconds("measured_ns"),
            off_s=seconds("prediction_off_ns"),
            errors=tuple(seen.prediction_errors),
        ),
        regions=tuple(map(_region, seen.regions)),
        kernels=kernels_of(seen),
        numbers=numbers,
    )


def metrics() -> Metrics:
    """The counts of this process since its first CUDA call, with percentiles; all zero without the hook.

    Raises:
        HookError: The package was not built, or two installations of cudasched are in this process.
    """
    core = hook.load_core()
    return _metrics(core.counts(), core.in_flight_ns() / _NS_PER_MS)


def clients(directory: str | os.PathLike[str] | None = None) -> tuple[list[Device], list[Process]]:
    """Every client on this machine that shares a run directory with this process, and its counts.

    Args:
        directory: The run directory; None: ``CUDASCHED_RUN_DIR`` or its default.

    Returns:
        The GPUs, by UUID, and the processes. A table that cannot be read has its reason in `Device.error`; a client
        that dies meanwhile is there or is not.

    Raises:
        HookError: The package was not built, or two installations of cudasched are in this process.
    """
    core = hook.load_core()
    place = Path(directory if directory is not None else core.run_directory())
    try:
        names = sorted(name for name in os.listdir(place) if name.endswith(".arbiter"))
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [Device(uuid="", name="", error=f"{place} cannot be read: {error.strerror}")], []
    devices: list[Device] = []
    seen: dict[object, list[tuple[str, Client]]] = {}
    counts: dict[object, stub.Counts] = {}
    for uuid in (name.removesuffix(".arbiter") for name in names):
        path = place / f"{uuid}.arbiter"
        try:
            name, rows = counts_of(core, path)
        except Error as error:
            devices.append(Device(uuid=printable(uuid), name="", error=str(error), path=Path(printable(str(path)))))
            continue
        devices.append(Device(uuid=uuid, name=name, path=path))
        for client, counted in rows:
            # A process that has not said its number yet is known by its slot.
            key: object = client.process or (uuid, client.slot)
            seen.setdefault(key, []).append((uuid, client_of(client)))
            if counted is not None and (key not in counts or launches_of(counted) >= launches_of(counts[key])):
                counts[key] = counted
    processes = []
    for number, found in seen.items():
        first = found[0][1]
        in_flight_ms = sum(client.in_flight_ms for _, client in found)
        processes.append(
            Process(
                number=first.process,
                pid=first.pid,
                name=first.name,
                version=first.version,
                metrics=_metrics(counts[number], in_flight_ms) if number in counts else None,
                clients=tuple(found),
            )
        )
    return devices, processes
