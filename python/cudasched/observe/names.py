"""The metrics that are exported: name, unit, labels and meaning of each, for Prometheus, OpenTelemetry and the docs.

Names follow Prometheus: base units (seconds, bytes, ratios from 0 to 1), ``_total`` on counters. Label sets are
bounded: a GPU has at most 64 clients, a process at most 12 regions, and names are cut to 64 characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cudasched import hook
from cudasched.errors import HookError
from cudasched.observe._gpus import Gpu, GpuShare, sm_ratios
from cudasched.observe._metrics import ERROR_BOUNDS, Device, Metrics, Process, Times, bucket_begin_ns
from cudasched.status import SHARE_UNIT

__all__ = ["BUCKET_BOUNDS_S", "BUCKET_LABELS", "Exported", "Series", "cumulative", "exports", "label_text", "unique"]

_LONGEST_LABEL = 64
_OCTAVES = (10, 12, 14, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 28, 30, 32, 34)

BUCKET_BOUNDS_S = tuple(2**octave / 1e9 for octave in _OCTAVES)
"""Upper bounds of the exported buckets of times, s: some of those that processes count in, so that none is guessed."""

BUCKET_LABELS = (*(f"{bound:.10g}" for bound in BUCKET_BOUNDS_S), "+Inf")
"""The same as values of the label ``le``, and that of the last one."""

_BOUNDARIES = {bucket_begin_ns(bucket): bucket for bucket in range(98)}
_ENDS = tuple(_BOUNDARIES[2**octave] for octave in _OCTAVES)


def label_text(text: str) -> str:
    """A name as the value of a label: unprintable characters written out, and at most 64 characters in all."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return shown if len(shown) <= _LONGEST_LABEL else shown[: _LONGEST_LABEL - 3] + "..."


def cumulative(times: Times) -> tuple[int, ...]:
    """How many are below each of `BUCKET_BOUNDS_S`, and in all."""
    sums = []
    total = 0
    done = 0
    for end in _ENDS:
        total += sum(times.buckets[done:end])
        done = end
        sums.append(total)
    return (*sums, total + sum(times.buckets[done:]))


@dataclass(frozen=True)
class Series:
    """One value of a metric.

    Attributes:
        labels: In the order of `Exported.labels`.
        value: A number; for histograms the times.
    """

    labels: tuple[str, ...]
    value: float | Times


@dataclass(frozen=True)
class Exported:
    """One metric.

    Attributes:
        name: Without ``_total``.
        kind: ``counter``, ``gauge`` or ``histogram``.
        unit: ``seconds``, ``bytes``, ``hertz``, ``watts``, ``ratio`` or "" for a number of things.
        help: The metric's description.
        labels: Their names.
        read: The metric's values on a machine.
    """

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[list[Device], list[Process]], Iterator[Series]]


def unique(series: Iterable[Series]) -> Iterator[Series]:
    """Each label set once: processes of two pid namespaces may have the same pid and name, and are then added up."""
    sums: dict[tuple[str, ...], float | Times] = {}
    for each in series:
        known = sums.get(each.labels)
        if known is None:
            sums[each.labels] = each.value
        elif isinstance(known, Times) and isinstance(each.value, Times):
            buckets = tuple(a + b for a, b in zip(known.buckets, each.value.buckets, strict=True))
            sums[each.labels] = Times(buckets, known.sum_s + each.value.sum_s)
        elif isinstance(known, (int, float)) and isinstance(each.value, (int, float)):
            sums[each.labels] = known + each.value
    for labels, value in sums.items():
        yield Series(labels, value)


_PROCESS = ("pid", "client")


def _process_labels(process: Process) -> tuple[str, str]:
    return str(process.pid), label_text(process.name)


def _of_process(name: str, unit: str, text: str, value: Callable[[Metrics], float | Times], kind: str) -> Exported:
    def read(_: list[Device], processes: list[Process]) -> Iterator[Series]:
        for process in processes:
            if process.metrics is not None:
                yield Series(_process_labels(process), value(process.metrics))

    return Exported(name, kind, unit, text, _PROCESS, read)


def _launches(_: list[Device], processes: list[Process]) -> Iterator[Series]:
    for process in processes:
        if process.metrics is not None:
            for name, count in process.metrics.launches.items():
                yield Series((*_process_labels(process), name), count)


def _prediction_errors(_: list[Device], processes: list[Process]) -> Iterator[Series]:
    for process in processes:
        if process.metrics is None or not process.metrics.predictions.errors:
            continue
        total = 0
        bounds = [f"{bound:g}" for bound in ERROR_BOUNDS] + ["+Inf"]
        for bound, count in zip(bounds, process.metrics.predictions.errors, strict=True):
            total += count
            yield Series((*_process_labels(process), bound), total)


def _kernel_levels(_: list[Device], processes: list[Process]) -> Iterator[Series]:
    for process in processes:
        if process.metrics is not None:
            for level, count in process.metrics.kernels.levels.items():
                yield Series((*_process_labels(process), level), count)


_TIMES: dict[str, Callable[[Metrics], Times]] = {
    "gate_waits": lambda m: m.gate_wait,
    "queue_waits": lambda m: m.queue_wait,
    "preemptions": lambda m: m.preemption,
}


_LISTS = {"prediction_errors": ("up_to", _prediction_errors), "kernels": ("level", _kernel_levels)}


def _counted(name: str, metric: str, text: str) -> Exported:
    """A line of ``include/cudasched/counts.inc``."""
    metric = f"cudasched_{metric}"
    if (by_label := _LISTS.get(name)) is not None:
        return Exported(metric, "counter", "", text, (*_PROCESS, by_label[0]), by_label[1])
    if (times := _TIMES.get(name)) is not None:
        return _of_process(metric, "seconds", text, times, "histogram")
    is_time = name.endswith("_ns")
    scale = 1e9 if is_time else SHARE_UNIT if name.startswith("kernel_") else None

    def value(metrics: Metrics) -> float:
        return metrics.numbers[name] / scale if scale else metrics.numbers[name]

    return _of_process(metric, "seconds" if is_time else "", text, value, "counter")


def _of_region(name: str, kind: str, unit: str, text: str, value: Callable[..., float | Times | None]) -> Exported:
    def read(_: list[Device], processes: list[Process]) -> Iterator[Series]:
        for process in processes:
            for region in process.metrics.regions if process.metrics is not None else ():
                if (found := value(region)) is not None:
                    yield Series((*_process_labels(process), label_text(region.name)), found)

    return Exported(name, kind, unit, text, (*_PROCESS, "region"), read)


_CLIENT = ("gpu", "pid", "client", "class")


def _of_client(name: str, unit: str, text: str, value: Callable[..., float | None], kind: str = "gauge") -> Exported:
    def read(_: list[Device], processes: list[Process]) -> Iterator[Series]:
        for process in processes:
            for uuid, client in process.clients:
                if (found := value(client)) is not None:
                    labels = (label_text(uuid), *_process_labels(process), client.client_class)
                    yield Series(labels, found)

    return Exported(name, kind, unit, text, _CLIENT, read)


def _gpus(devices: list[Device], _: list[Process]) -> Iterator[Series]:
    for device in devices:
        yield Series((label_text(device.uuid), label_text(device.name)), 0.0 if device.error else 1.0)


def _of_gpu(name: str, unit: str, text: str, value: Callable[[Gpu], float | None]) -> Exported:
    def read(devices: list[Device], _: list[Process]) -> Iterator[Series]:
        for device in devices:
            if device.gpu is not None and (found := value(device.gpu)) is not None:
                yield Series((label_text(device.uuid),), found)

    return Exported(name, "gauge", unit, text, ("gpu",), read)


def _sm_ratios(devices: list[Device], processes: list[Process]) -> Iterator[Series]:
    sampled = sm_ratios(devices)
    for process in processes:
        for uuid in dict.fromkeys(uuid for uuid, _ in process.clients):
            if (found := sampled.get(uuid, {}).get(process.pid)) is not None:
                yield Series((label_text(uuid), *_process_labels(process)), found)


def _of_class(name: str, unit: str, text: str, value: Callable[[GpuShare], float | None]) -> Exported:
    def read(devices: list[Device], _: list[Process]) -> Iterator[Series]:
        for device in devices:
            for share in device.gpu.shares if device.gpu is not None else ():
                if (found := value(share)) is not None:
                    yield Series((label_text(device.uuid), share.client_class), found)

    return Exported(name, "gauge", unit, text, ("gpu", "class"), read)


_OF_MACHINE: tuple[Exported, ...] = (
    Exported(
        "cudasched_gpu_table_readable",
        "gauge",
        "",
        "Whether the GPU's client table can be read: 1, or 0 where it is damaged, foreign, or of another version.",
        ("gpu", "gpu_name"),
        _gpus,
    ),
    _of_gpu(
        "cudasched_gpu_sm_ratio", "ratio", "Share of the last moments in which any kernel ran.", lambda g: g.sm_ratio
    ),
    _of_gpu(
        "cudasched_gpu_memory_used_bytes",
        "bytes",
        "Memory in use, by all processes, without the driver's own.",
        lambda g: g.memory_used_bytes,
    ),
    _of_gpu("cudasched_gpu_memory_total_bytes", "bytes", "Memory of the GPU.", lambda g: g.memory_total_bytes),
    _of_gpu("cudasched_gpu_sm_clock_hertz", "hertz", "Clock of the SMs.", lambda g: g.sm_clock_hz),
    _of_gpu("cudasched_gpu_power_watts", "watts", "Power that the GPU draws.", lambda g: g.power_w),
    _of_gpu(
        "cudasched_gpu_foreign_processes",
        "",
        "Processes on the GPU that are no clients of the run directory.",
        lambda g: float(len(g.foreign)),
    ),
    _of_gpu(
        "cudasched_gpu_unaccounted_memory_bytes",
        "bytes",
        "Memory of processes that cannot be told from here, because they are in other pid namespaces.",
        lambda g: float(g.unaccounted_bytes),
    ),
    Exported(
        "cudasched_client_sm_ratio",
        "gauge",
        "ratio",
        "Share of the last moments in which kernels of the process ran, of any class, as the driver samples it.",
        ("gpu", *_PROCESS),
        _sm_ratios,
    ),
    _of_class(
        "cudasched_class_memory_bytes",
        "bytes",
        "Memory of processes by class; `mixed`: with clients of several, `foreign`: no clients.",
        lambda s: s.memory_bytes,
    ),
    _of_class(
        "cudasched_class_sm_ratio",
        "ratio",
        "Share of the last moments in which kernels of the class ran.",
        lambda s: s.sm_ratio,
    ),
    _of_client("cudasched_client_up", "", "1 for each client of a GPU that lives.", lambda c: 1.0 if c.alive else 0.0),
    _of_client(
        "cudasched_client_active", "", "1 while a latency client holds the gate closed.", lambda c: float(c.active)
    ),
    _of_client(
        "cudasched_client_waiting", "", "1 while a best-effort client waits at the gate.", lambda c: float(c.waiting)
    ),
    _of_client("cudasched_client_priority", "", "Within the class, higher first.", lambda c: float(c.priority)),
    _of_client(
        "cudasched_client_slo_seconds",
        "seconds",
        "The client's own latency target, where it has one.",
        lambda c: None if c.slo_ms is None else c.slo_ms / 1e3,
    ),
    _of_client(
        "cudasched_client_in_flight_seconds",
        "seconds",
        "Predicted GPU time still to run of the client's submitted launches.",
        lambda c: c.in_flight_ms / 1e3,
    ),
    _of_client(
        "cudasched_client_overdue_seconds",
        "seconds",
        "Since the client's oldest launch in flight should have been done; 0: none is late.",
        lambda c: c.overdue_s,
    ),
    _of_client(
        "cudasched_client_time_slice_seconds",
        "seconds",
        "How long the GPU runs the client before an interruption for others; none without time slices.",
        lambda c: None if c.time_slice_us is None else c.time_slice_us / 1e6,
    ),
    _of_client(
        "cudasched_client_memory_bytes",
        "bytes",
        "Memory that the client has asked the driver for and not freed, caches included.",
        lambda c: float(c.memory_bytes),
    ),
    _of_client(
        "cudasched_client_memory_limit_bytes",
        "bytes",
        "Its process's memory limit, where it has one.",
        lambda c: None if c.memory_limit_bytes is None else float(c.memory_limit_bytes),
    ),
    _of_client(
        "cudasched_client_memory_given_bytes",
        "bytes",
        "Memory that the client has given back to latency clients that asked for memory.",
        lambda c: float(c.memory_given_bytes),
        "counter",
    ),
    Exported(
        "cudasched_launches",
        "counter",
        "",
        "Kernel and graph launches that the driver accepted, by class.",
        (*_PROCESS, "class"),
        _launches,
    ),
)
_OF_REGIONS = (
    _of_region(
        "cudasched_request_seconds",
        "histogram",
        "seconds",
        "How long requests took, by the name of their latency region.",
        lambda r: r.times,
    ),
    _of_region("cudasched_slo_met", "counter", "", "Requests with a target that kept it.", lambda r: r.met),
    _of_region(
        "cudasched_slo_missed", "counter", "", "Requests with a target that did not keep it.", lambda r: r.missed
    ),
    _of_region(
        "cudasched_slo_seconds",
        "gauge",
        "seconds",
        "The target of the last request that had one.",
        lambda r: None if r.slo_ms is None else r.slo_ms / 1e3,
    ),
)


def exports() -> tuple[Exported, ...]:
    """All of them, in the order of ``docs/metrics.md``; without an engine some of them."""
    try:
        lines = hook.load_core().counted().items()
    except HookError:
        return _OF_MACHINE
    counted = (_counted(name, metric, text) for name, (metric, text) in lines if metric)
    return (*_OF_MACHINE, *counted, *_OF_REGIONS)
