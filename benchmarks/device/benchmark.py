"""Work queues on the device and graphs of a program's own: six figures of kernels.json, in one run of a few minutes.

The figures go into `--out`, whose others stay, and those without a goal into device.json beside it; the cells have the
times behind both. Each part is a process of its own that ends with its time: one that fails or hangs costs its figures
and no other. Kernels are compiled here, by NVRTC or nvcc; what measures graphs is compiled by g++. A rehearsal does the
part of graphs that the simulated driver can do, in little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched import graphs
from cudasched.demo.harness import HarnessError
from cudasched.tune import compile as compilation

from benchmarks.c_program import compile_cpp
from benchmarks.device.gpu import ROOT, Gpu
from benchmarks.device.queues import IMBALANCES, OTHER_STATIC
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Figure, Found, Goals, Session, judged, once
from benchmarks.results.schema import merge
from benchmarks.tables import plot_beside

HERE = Path(__file__).parent
#: The status of a part that this machine has no GPUs or libraries for.
NOT_HERE = 4
#: Seconds of the queues, and of one group of graphs at most.
QUEUES_S, GROUP_S = 90.0, 60.0
#: Each is better when it is more: times the speed of the rival that docs/device.md names.
GOALS: Goals = {
    "queue_severe": (2.0, "more"),
    "queue_moderate": (1.2, "more"),
    "queue_balanced": (0.97, "more"),
    "graph_pipeline": (1.5, "more"),
    "device_launch": (2.0, "more"),
    "conditional_loop": (2.0, "more"),
}
#: What `device_launch` is the least of.
LAUNCHES = ("decided_by_the_one_before", "fire_and_forget_latency")
#: Figures without a goal, in device.json: the group that each is of, and what it is called there.
REPORTED = {
    "graph_update": ("pipeline", "update_of_instantiation"),
    "device_launches_in_a_row": ("device", "in_a_row"),
    "sibling_launch": ("device", "sibling_latency"),
    "child_kernels": ("device", "child_kernels"),
    "graph_pool": ("pool", "pool_of_allocation_nodes"),
    "captured_sums": ("peers", "captured_sums"),
}
#: And these, of the queues: the best of them against the best static distribution that is written as one loop.
FLAT = {f"{name}_of_flat": name for name in IMBALANCES}
NO_GOALS: Goals = {name: (0.0, "more") for name in (*FLAT, *REPORTED)}
#: Groups that figures come from; of the others, those that this machine has no GPUs or libraries for are left out.
FIGURED = ("pipeline", "loop", "device")
IMAGE = """cudasched-sim 1
kernel stage params=8,4 block_us=1
kernel turn params=8,8 block_us=1 effect=countdown
kernel turn_for_host params=8 block_us=1
"""


def run(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str, int]:
    """The JSON objects that a process prints, its errors and its status, 124 where its time was over."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired as late:
        return objects((late.stdout or b"").decode(errors="replace")), "its time was over", 124
    return objects(done.stdout), done.stderr.strip(), done.returncode


def objects(output: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # a line that was cut off
    return found


def measure_queues(session: Session) -> None:
    """The figures of the queues.

    Raises:
        HarnessError: Some are not there.
    """
    if session.rehearsal:
        session.say("queues: left out, the simulated driver runs no machine code")
        return
    seconds = min(QUEUES_S, session.left_s() - 25)
    command = [sys.executable, "-m", "benchmarks.device.queues", "--seconds", str(max(seconds, 10))]
    found, errors, status = run(command, seconds + 60, {"CUDASCHED_OFF": "1"})
    if found:
        session.store.keep("queues", found[-1])
    if status:
        raise HarnessError(errors)


def measure_graphs(session: Session) -> None:
    """The figures of graphs.

    Raises:
        HarnessError: Some are not there.
    """
    image = session.builds / "graphs.image"
    environment = library_paths()
    if runtime := graphs._device_runtime():
        environment["CUDA_HOME"] = str(Path(runtime).parents[1])
    if session.rehearsal:
        image.write_text(IMAGE)
        environment = session.unscaled
    else:
        image.write_bytes(relocatable(Gpu().target))
    sources = sorted((ROOT / "csrc" / "device_graph").glob("*.cpp"))
    program = compile_cpp(session.builds / "measure", HERE / "measure.cpp", *sources)
    wrong = []
    for group in ("pipeline", "loop", "pool") if session.rehearsal else ("pipeline", "loop", "device", "pool", "peers"):
        limit_s = min(GROUP_S, session.left_s())
        found, errors, status = run([str(program), str(image), group], max(limit_s, 1.0), environment)
        for made in found:
            session.store.keep(f"graphs/{group}", made)
        if status and (group in FIGURED or status != NOT_HERE):
            wrong.append(f"{group}: {errors[-600:]}")
        elif status:
            session.say(f"{errors}; left out")
    if wrong:
        raise HarnessError("\n".join(wrong))


def library_paths() -> dict[str, str]:
    """What the loader needs to find the NCCL that came with PyTorch."""
    found = [str(path) for one in sys.path for path in Path(one or ".").glob("nvidia/nccl/lib")]
    usual = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": os.pathsep.join([*([usual] if usual else []), *found])} if found else {}


def relocatable(target: str) -> bytes:
    """The kernels of graphs.cu for CUDA's device runtime."""
    compiler = compilation.choose()
    option = "--relocatable-device-code=true" if compiler == "nvrtc" else "-rdc=true"
    return compilation.compile_source(HERE / "graphs.cu", (), target, compiler, [option]).image


def of_way(way: Mapping[str, Any]) -> Figure:
    """A figure of what measured it."""
    return way["value"], min(way["low"], way["value"]), max(way["high"], way["value"]), way["n"]


def find(done: Done) -> Found:
    """The figures that have goals."""
    found = {name: of_way(way) for name, way in done.get("queues", {}).items()}
    for group, figure in (("pipeline", "graph_pipeline"), ("loop", "conditional_loop")):
        if way := done.get(f"graphs/{group}", {}).get(figure):
            found[figure] = of_way(way)
    ways = [done.get("graphs/device", {}).get(name) for name in LAUNCHES]
    if all(ways):
        values, lows, highs, numbers = zip(*map(of_way, ways), strict=True)
        found["device_launch"] = min(values), min(lows), max(highs), sum(numbers)
    return found


def find_reported(done: Done) -> Found:
    """The figures that have none."""
    found: Found = {}
    for name, (group, part) in REPORTED.items():
        if way := done.get(f"graphs/{group}", {}).get(part):
            found[name] = of_way(way)
    for name, figure in FLAT.items():
        if one := done.get("queues", {}).get(figure):
            found[name] = once(min(one["ms"][flat] for flat in OTHER_STATIC) / one["ms"][one["queue"]], one["n"])
    return found


def finish(session: Session) -> None:
    """Writes the figures without a goal, and the plots."""
    if made := judged(NO_GOALS, find_reported(session.store.done), {}):
        merge(session.out.with_name("device.json"), session.meta, made)
    plot_beside(session.out)


BENCHMARK = Benchmark(
    about="work queues against static distributions, and the time that graphs save",
    groups={"queues": measure_queues, "graphs": measure_graphs},
    goals=GOALS,
    find=find,
    finish=finish,
    results="kernels",
    torch=False,
)
