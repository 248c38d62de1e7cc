"""The changes between two looks at all clients: the rows of `cudasched top`. Pure: no clock, no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cudasched.observe._gpus import sm_ratios
from cudasched.observe._metrics import Device, Metrics, Process, Times

__all__ = ["Look", "Row", "rows"]


@dataclass(frozen=True)
class Look:
    """The data of one moment.

    Attributes:
        at_s: On a clock that does not go back.
        devices: The GPUs.
        processes: The clients of these.
    """

    at_s: float
    devices: tuple[Device, ...]
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Row:
    """One process; rates and percentiles are of the time between the two looks, None where nothing happened.

    Attributes:
        number: The process's own (`Process.number`), or of its first slot where none is set.
        pid: In the process's own pid namespace.
        name: Of the program.
        classes: Of the clients.
        priority: The highest of the clients.
        state: ``active``, ``waiting``, ``overdue 12 s``, ``idle``.
        sm_ratio: The share of the last moments in which kernels of any class ran, sampled by the driver and summed over
            the GPUs; None: unknown to the driver.
        best_effort_ratio: Predicted GPU seconds of its best effort that completed, a second.
        closed_ratio: The share of the time in which its latency work held the gate closed.
        launches_per_s: Of all classes.
        gate_wait_ms: The 95th percentile of waits at the gate.
        request_ms: The 99th percentile of requests, over all regions.
        attainment: The share of requests with a target that kept it; of all ever where there was none between the two.
        slo_ms: The tightest target.
        in_flight_ms: Predicted GPU time still to run.
        past_gate: Launches that went as normal on streams of best effort, ever.
        process_class: Of launches that no region and no stream decides.
        weight: Multiplies the share among best-effort clients.
        policy: The policy for best-effort launches.
        memory_bytes: Memory on all GPUs, by its requests to the driver.
    """

    number: int
    pid: int
    name: str
    classes: tuple[str, ...]
    priority: int
    state: str
    sm_ratio: float | None
    best_effort_ratio: float | None
    closed_ratio: float | None
    launches_per_s: float | None
    gate_wait_ms: float | None
    request_ms: float | None
    attainment: float | None
    slo_ms: float | None
    in_flight_ms: float
    past_gate: int
    process_class: str = "normal"
    weight: float = 1.0
    policy: str = ""
    memory_bytes: int = 0


def _since(now: Times, before: Times) -> Times:
    if len(now.buckets) != len(before.buckets):
        return now
    return Times(
        tuple(max(0, a - b) for a, b in zip(now.buckets, before.buckets, strict=True)), now.sum_s - before.sum_s
    )


def _merged(all_times: Iterable[Times]) -> Times:
    merged = Times()
    for times in all_times:
        if not merged.buckets:
            merged = times
        else:
            buckets = tuple(a + b for a, b in zip(merged.buckets, times.buckets, strict=True))
            merged = Times(buckets, merged.sum_s + times.sum_s)
    return merged


def _state(process: Process) -> str:
    clients = [client for _, client in process.clients]
    overdue = max(client.overdue_s for client in clients)
    if any(client.policy_s > 0 for client in clients):
        return "policy hangs"
    if overdue > 1:
        return f"overdue {overdue:.0f} s"
    for word, flag in (("active", "active"), ("waiting", "waiting")):
        if any(getattr(client, flag) for client in clients):
            return word
    return "idle"


def _attainment(metrics: Metrics, before: Metrics | None) -> float | None:
    met = sum(region.met for region in metrics.regions)
    missed = sum(region.missed for region in metrics.regions)
    if before is not None:
        new_met = met - sum(region.met for region in before.regions)
        new_missed = missed - sum(region.missed for region in before.regions)
        if new_met + new_missed > 0:
            met, missed = new_met, new_missed
    return met / (met + missed) if met + missed > 0 else None


def _row(process: Process, before: Metrics | None, elapsed_s: float, sampled: dict[str, Mapping[int, float]]) -> Row:
    clients = [client for _, client in process.clients]
    metrics = process.metrics
    best_effort = closed = launches = wait = request = attainment = None
    targets = [client.slo_ms for client in clients if client.slo_ms is not None]
    past_gate = 0
    if metrics is not None:
        attainment = _attainment(metrics, before)
        targets += [region.slo_ms for region in metrics.regions if region.slo_ms is not None]
        past_gate = metrics.normal_beside_best_effort
    if metrics is not None and before is not None and elapsed_s > 0:
        best_effort = max(0.0, metrics.best_effort_gpu_s - before.best_effort_gpu_s) / elapsed_s
        closed = max(0.0, metrics.latency_active_s - before.latency_active_s) / elapsed_s
        launches = max(0, sum(metrics.launches.values()) - sum(before.launches.values())) / elapsed_s
        wait = _since(metrics.gate_wait, before.gate_wait).p95_ms
        earlier = {region.name: region.times for region in before.regions}
        request = _merged(_since(r.times, earlier.get(r.name, Times())) for r in metrics.regions).p99_ms
    gpus = {uuid for uuid, _ in process.clients}
    ratios = [sampled[uuid][process.pid] for uuid in gpus if process.pid in sampled.get(uuid, {})]
    return Row(
        number=process.number or clients[0].slot,
        pid=process.pid,
        name=process.name,
        classes=tuple(sorted({client.client_class for client in clients})),
        priority=max(client.priority for client in clients),
        state=_state(process),
        sm_ratio=sum(ratios) if ratios else None,
        best_effort_ratio=best_effort,
        closed_ratio=closed,
        launches_per_s=launches,
        gate_wait_ms=wait,
        request_ms=request,
        attainment=attainment,
        slo_ms=min(targets) if targets else None,
        in_flight_ms=sum(client.in_flight_ms for client in clients),
        past_gate=past_gate,
        process_class=clients[0].process_class,
        weight=clients[0].weight,
        policy=clients[0].policy,
        memory_bytes=sum(client.memory_bytes for client in clients),
    )


def rows(now: Look, before: Look | None) -> list[Row]:
    """A row for each process.

    Args:
        now: The later look.
        before: An earlier one; None: there was none, and no rates are known.
    """
    known = {process.number: process.metrics for process in before.processes} if before is not None else {}
    elapsed_s = now.at_s - before.at_s if before is not None else 0.0
    sampled = sm_ratios(now.devices)
    return [_row(process, known.get(process.number), elapsed_s, sampled) for process in now.processes]
