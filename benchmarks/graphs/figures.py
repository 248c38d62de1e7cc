"""What slices cost: the figures of graph_slicing.json, part by part while there is time.

    python -m benchmarks.graphs figures --out benchmarks/results/graph_slicing.json --limit-s 590
    python -m benchmarks.graphs figures --rehearse --out /tmp/graph_slicing.json

A part is one process (probe.py) in one mode: bare, under cudasched with graphs whole (`off`), cut always (`always`), or
as it is by default with no latency client there (`auto`). The modes take turns, so many times as there are repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cudasched.demo.harness import CUDASCHED, Backend, HarnessError

from benchmarks import meta
from benchmarks.results.schema import FigureRow, Results
from benchmarks.store import Store

PROBE = Path(__file__).with_name("probe.py")
MODES = ("bare", "off", "always", "auto")
PART_TIMEOUT_S = 240.0
PART_S = 25.0
TIME_RAN_OUT = 3
NOT_EXPLAINED = "not explained yet"

Better = Literal["less", "more"]
#: The goal of each figure, and whether less or more is better.
GOALS: dict[str, tuple[float, Better]] = {
    "build_ms_2000_nodes": (100.0, "less"),
    "clone_of_instantiate": (0.10, "less"),
    "launch_ns_added": (20.0, "less"),
    "memory_ratio": (1.5, "less"),
    "idle_speed": (0.995, "more"),
}

Parts = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each mode's processes found, in the order of the repeats."""


def found(parts: Parts) -> dict[str, tuple[list[float], int]]:
    """Of each figure that can be told: a value a repeat, and of how many builds, calls or runs it is made."""
    values: dict[str, list[float]] = {name: [] for name in GOALS}
    counts = dict.fromkeys(GOALS, 0)

    def add(name: str, value: float, count: int) -> None:
        values[name].append(value)
        counts[name] += count

    for cut in parts.get("always", ()):
        if cut.get("graph_builds"):
            add("build_ms_2000_nodes", cut["graph_build_ns"] / 1e6 / cut["graph_builds"], cut["graph_builds"])
    for whole, cut in zip(parts.get("off", ()), parts.get("always", ()), strict=False):
        add("clone_of_instantiate", cut["instantiate_ns"] / whole["instantiate_ns"] - 1, 1)
        add("launch_ns_added", cut["launch_ns"] - whole["launch_ns"], 1)
        if whole["bytes"] > 0 and cut.get("graphs_sliced"):
            add("memory_ratio", (cut["bytes"] - whole["bytes"]) / whole["bytes"], cut["graphs_sliced"])
    for bare, idle in zip(parts.get("bare", ()), parts.get("auto", ()), strict=False):
        add("idle_speed", idle["per_s"] / bare["per_s"], 1)
    return {name: (values[name], counts[name]) for name in GOALS if values[name]}


def rows(parts: Parts, limited_by: Mapping[str, str]) -> list[FigureRow]:
    """The results."""
    made = []
    for name, (values, count) in found(parts).items():
        goal, better = GOALS[name]
        value = statistics.median(values)
        row = FigureRow(
            figure=name,
            value=value,
            goal=goal,
            better=better,
            low=min(values),
            high=max(values),
            n=count,
            limited_by="",
        )
        if not row.met:
            row = row.model_copy(update={"limited_by": limited_by.get(name, NOT_EXPLAINED)})
        made.append(row)
    return made


def parts_of(done: Mapping[str, Any]) -> Parts:
    """What is kept, by mode, as far as the repeats go without a gap."""
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for mode, parts in found.items():
        while (part := done.get(f"{mode}/{len(parts)}")) is not None:
            parts.append(part)
    return found


def run_part(backend: Backend, mode: str, options: argparse.Namespace, table: Path) -> dict[str, Any]:
    """One process.

    Raises:
        HarnessError: It failed.
    """
    command = [sys.executable, str(PROBE), "--nodes", str(options.nodes), "--seconds", f"{options.seconds:g}"]
    command += ["--launches", str(options.launches)]
    command += ["--simulate"] * (backend.name == "simulated") + ["--await-slices"] * (mode == "always")
    environment = backend.environment(hooked=mode != "bare")
    if mode != "bare":
        command = [*CUDASCHED, "run", "--class", "best-effort", "--", *command]
        environment |= {"CUDASCHED_GRAPH_SLICES": mode, "CUDASCHED_RUN_DIR": str(table)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PART_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HarnessError(f"the probe in the mode {mode} did not end in {PART_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0 or not done.stdout.strip():
        raise HarnessError(f"the probe in the mode {mode} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    part: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return part


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.graphs figures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2000, help="of the graph that is cut")
    parser.add_argument("--launches", type=int, default=None, help="that are timed (20000; 400 in a rehearsal)")
    parser.add_argument("--seconds", type=float, default=None, help="of replays one after another (3; 1)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop before so much time has passed")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT", help="why a goal is missed")
    options = parser.parse_args(arguments)
    options.launches = options.launches or (400 if options.simulate else 20_000)
    options.seconds = options.seconds or (1.0 if options.simulate else 3.0)
    reasons = [text.partition("=") for text in options.limited_by]
    unknown = [name for name, _, _ in reasons if name not in GOALS]
    if unknown:
        parser.error(f"--limited-by: {', '.join(unknown)}; there are {', '.join(GOALS)}")
    options.limited_by = {name: text for name, _, text in reasons}
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures what is missing, and writes what can be told."""
    options = parse(arguments)
    began = time.monotonic()
    backend: Backend | None = None
    status = 0
    try:
        backend = Backend.simulated(options.simulated_driver) if options.simulate else Backend()
        store = Store(options.out.with_suffix(".parts"), meta.describe(options.simulate, options.commit))
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="cudasched-graphs-", dir=shared) as name:
            for repeat in range(options.repeats):
                for mode in MODES:
                    if f"{mode}/{repeat}" in store.done:
                        continue
                    if time.monotonic() - began + PART_S > options.limit_s:
                        status = TIME_RAN_OUT
                        break
                    table = Path(name) / f"{mode}-{repeat}"
                    table.mkdir(mode=0o700)
                    store.keep(f"{mode}/{repeat}", run_part(backend, mode, options, table))
                    print(f"[{time.monotonic() - began:6.1f} s] {mode} {repeat}", flush=True)
    except (HarnessError, ValueError) as error:
        print(f"graphs: {error}", file=sys.stderr)
        return 1
    finally:
        if backend:
            backend.close()
    made = rows(parts_of(store.done), options.limited_by)
    for row in made:
        print(f"{row.figure}: {row.value:.4g} ({row.low:.4g} to {row.high:.4g}), goal {row.goal:g}, n {row.n}")
    if made:
        Results(meta=store.meta, rows=made).write(options.out)
    if status == TIME_RAN_OUT:
        print("time ran out: run again to go on")
    return status
