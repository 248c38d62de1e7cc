"""The simulator on what was recorded of the servers: P50 and what best effort keeps, beside what was measured.

    python -m benchmarks.host_bound --out RESULTS/host_bound.json --predict RESULTS/host_bound_simulated.json

The recording (NAME.requests.json.xz beside the results) has of each server some requests, launch by launch: the host's
gaps in each, and the kernels' times, which are the same in all; of each best-effort program its kernels' durations.
Recording slows a host down: gaps are scaled so that a request takes what it takes unrecorded.
"""

from __future__ import annotations

import json
import lzma
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched import simulate

from benchmarks.colocation.cells import BUSY, KERNELS, CellFile
from benchmarks.results.schema import ColocationRow, FigureRow, Results

#: How far the simulation may be from what was measured.
GOAL = 0.10
#: Launches of a best-effort program's trace, drawn from its kernels.
DRAWN = 800
#: Between two launches of a best-effort program's host, where the GPU is what it waits for.
HOST_GAP_NS = 12_000
#: A program that keeps the GPU busy for so much of the time, by the kernels that were recorded of a few steps, is taken
#: to wait for it: in a long run its clocks are lower, and kernels longer.
WAITS_FOR_GPU = 0.85
STEP_NS = 100
SEED = 1


def recording_path(out: Path) -> Path:
    """Where the recording beside a results file is."""
    return out.with_suffix(".requests.json.xz")


def packed(cells: CellFile) -> dict[str, Any]:
    """What the cells have recorded of servers and of the programs beside them."""
    found: dict[str, Any] = {"servers": {}, "beside": {}}
    for cell, outcome in cells.outcomes.items():
        result = outcome.result or {}
        requests = result.get("launches") if cell.arm == BUSY else None
        if requests and len(requests[0]) > 1:  # a CUDA graph is one launch, and has no host to replay
            found["servers"][cell.latency] = {
                "gpu_ns": [
                    round(statistics.median(column))
                    for column in zip(*([n for _, n, _ in r] for r in requests), strict=True)
                ],
                "waits": [place for place, launch in enumerate(requests[0]) if launch[2]],
                "gaps": [[round(gap_ns / STEP_NS) for gap_ns, _, _ in request] for request in requests],
                "request_ms": round(statistics.median(result["request_ms"]), 4),
            }
        elif cell.arm == KERNELS and result:
            found["beside"][cell.best_effort] = {"kernel_us": result["kernel_us"], "per_item_us": result["per_item_us"]}
    return found


def save(recorded: Mapping[str, Any], path: Path) -> None:
    """Writes a recording, compactly; the same recording gives the same bytes."""
    text = json.dumps(recorded, separators=(",", ":"), sort_keys=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def read(path: Path) -> dict[str, Any]:
    """Reads a recording.

    Raises:
        ValueError: It is none.
    """
    try:
        found = json.loads(lzma.decompress(path.read_bytes()))
        return {"servers": dict(found["servers"]), "beside": dict(found["beside"])}
    except (lzma.LZMAError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no recording of requests: {error}") from error


def host_ns(server: Mapping[str, Any]) -> float:
    """What a recorded request takes its host, the GPU's part at its end left out: the median."""
    return float(statistics.median(sum(gaps) for gaps in server["gaps"])) * STEP_NS


def server_trace(server: Mapping[str, Any], name: str) -> simulate.Trace:
    """The recorded requests one after another, as long as unrecorded ones."""
    own_ns = host_ns(server)
    # What the program waits for its last kernel, and for those before its waits, is the GPU's.
    scale = min(1.0, max(0.2, (server["request_ms"] * 1e6 - waited_ns(server)) / own_ns)) if own_ns else 1.0
    waits = set(server["waits"])
    gaps_ns: list[int] = []
    gpu_ns: list[int] = []
    waited: list[bool] = []
    ends = []
    for gaps in server["gaps"]:
        gaps_ns += [round(gap * STEP_NS * scale) for gap in gaps]
        gpu_ns += server["gpu_ns"]
        waited += [place in waits for place in range(len(gaps))]
        ends.append(len(gaps_ns))
    return simulate.host_trace(gaps_ns, gpu_ns, waited, ends=ends, name=name, load=name)


def waited_ns(server: Mapping[str, Any]) -> int:
    """GPU time that the host cannot overlap: the kernels before its waits, and the last one."""
    last = [*(place - 1 for place in server["waits"] if place), len(server["gpu_ns"]) - 1]
    return int(sum(server["gpu_ns"][place] for place in last))


def beside_trace(beside: Mapping[str, Any], name: str, per_s: float | None) -> simulate.Trace:
    """A best-effort program's kernels, drawn as often as they come; alone it is as fast as it was measured."""
    durations_us = [us for us, _ in beside["kernel_us"]]
    counts = [count for _, count in beside["kernel_us"]]
    mean_us = sum(us * count for us, count in beside["kernel_us"]) / sum(counts)
    launches_an_item = max(1.0, beside["per_item_us"] / mean_us)
    gap_ns = float(HOST_GAP_NS)
    longer = 1.0
    if per_s and per_s * beside["per_item_us"] / 1e6 < WAITS_FOR_GPU:  # its host is slower than the GPU
        gap_ns = max(gap_ns, 1e9 / per_s / launches_an_item)
    elif per_s:
        longer = max(1.0, 1e6 / per_s / beside["per_item_us"])
    drawn = random.Random(SEED).choices(durations_us, counts, k=DRAWN if len(durations_us) > 1 else 1)
    gpu_ns = [max(1, round(1e3 * us * longer)) for us in drawn]
    return simulate.host_trace([round(gap_ns)] * len(gpu_ns), gpu_ns, [False] * len(gpu_ns), name=name, load=name)


def alone_request_ms(row: ColocationRow, server: Mapping[str, Any]) -> float | None:
    """What a request took alone when the row was measured: the recording may have met the host at another pace."""
    if server["waits"]:  # its latencies are of something else, the time between tokens
        return 1e3 * row.duty / row.rate_hz if row.duty else None
    return row.alone_ms.p50 if row.alone_ms else None


def simulated(
    recorded: Mapping[str, Any], row: ColocationRow, seconds: float, seed: int = SEED
) -> tuple[float, float] | None:
    """P50 over alone, and best effort of the GPU time left, of one measured row; None: it was not recorded."""
    server = recorded["servers"].get(row.latency_load)
    beside = recorded["beside"].get(row.best_effort_load)
    if server is None or beside is None or row.policy is None:
        return None
    alone_per_s = row.best_effort_alone_per_s
    server = {**server, "request_ms": alone_request_ms(row, server) or server["request_ms"]}
    clients = [
        simulate.latency(server_trace(server, row.latency_load), rate_hz=row.rate_hz, seconds=seconds, seed=seed),
        simulate.best_effort(beside_trace(beside, row.best_effort_load, alone_per_s)),
    ]
    lead_us = row.lead_us if row.lead_us is not None else 20.0
    arm = simulate.Arm(row.policy, lead_us=lead_us, sharing=row.mode)
    alone, _, shared = simulate.compare(clients, [arm], seconds=seconds, seed=seed)
    if alone.latency_ms is None or shared.latency_ms is None or shared.best_effort_ratio is None:
        return None
    return shared.latency_ms.p50 / alone.latency_ms.p50, shared.best_effort_ratio


def figures(results: Results, recorded: Mapping[str, Any], seconds: float = 30.0) -> list[FigureRow]:
    """By how much the simulation is off of each managed row: `p50` and `ratio`, server, program and arm in the name."""
    found = []
    for row in managed(results.rows):
        said = simulated(recorded, row, seconds)
        if said is None or row.latency_ms is None:
            continue
        where = f"{row.latency_load} {row.best_effort_load} {row.arm}"
        for what, simulation, measured in zip(
            ("p50", "ratio"), said, (row.p50_ratio, row.best_effort_gpu_ratio), strict=True
        ):
            if not measured:
                continue
            off = abs(simulation / measured - 1)
            why = "" if off <= GOAL else f"simulated {simulation:.3f}, measured {measured:.3f}"
            found.append(
                FigureRow(
                    figure=f"{what} {where}",
                    value=off,
                    goal=GOAL,
                    better="less",
                    low=min(simulation, measured),
                    high=max(simulation, measured),
                    n=row.latency_ms.n,
                    limited_by=why,
                )
            )
    return found


def managed(rows: Iterable[Any]) -> Sequence[ColocationRow]:
    """Rows of both classes under cudasched."""
    return [
        row
        for row in rows
        if isinstance(row, ColocationRow) and row.arm.startswith("cudasched_") and row.best_effort_load
    ]
