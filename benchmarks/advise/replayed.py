"""Traces of recorded requests of servers, launch by launch, and of programs' kernels, for forecasts.

A recording (results/host_bound.requests.json.xz) has of each server some requests: the host's gaps in each, and the
kernels' times, which are the same in all; of each best-effort program its kernels' durations. Recording slows a host
down: gaps are scaled so that a request takes what it takes unrecorded.
"""

from __future__ import annotations

import json
import lzma
import random
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudasched import simulate

#: Launches of a best-effort program's trace, drawn from its kernels.
DRAWN = 800
#: Between two launches of a best-effort program's host, where the GPU is what it waits for.
HOST_GAP_NS = 12_000
#: A program that keeps the GPU busy for so much of the time, by the kernels that were recorded of a few steps, is taken
#: to wait for it: in a long run its clocks are lower, and kernels longer.
WAITS_FOR_GPU = 0.85
STEP_NS = 100
SEED = 1


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
