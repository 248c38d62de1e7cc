"""Measures the figures of benchmarks/results/pytorch.json; a rerun does what is missing. About 12 minutes.

    python -m benchmarks.pytorch --out benchmarks/results/pytorch.json --limit-s 590    # twice; the first has all rows
    python -m benchmarks.pytorch --out benchmarks/results/pytorch.json --only costs
    python -m benchmarks.pytorch --rehearse --out /tmp/pytorch.json

What is measured is kept after each run of a program in NAME.cells beside the results. Groups:

    costs         entering and leaving a region, hot and after 16 ms idle; eager ResNet50 inference under `install`;
                  what counting memory adds to an allocation, and by how many bytes it differs from PyTorch's
    two_threads   BERT requests and transformer training in two threads of one process (threads.py)
    give_back     a latency client's allocation of memory that another process only caches, over that process's bare
                  `empty_cache()` and the same allocation of free memory (give_back.py); 40 GiB, of a GPU that has
                  70 GiB free at least
    four_threads  two servers and two trainings in four threads; with priority streams instead, and the two servers
                  without trainings, in the same run

A program that fails keeps no other from running. Figures that are not measured have no row. One that misses its goal
says what limits it: `--limited-by FIGURE=TEXT`. The exit status is 0 when all groups have their figures, 3 when time
ran out first, 1 when a measurement failed.
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

from cudasched.demo.harness import HarnessError, percentile

from benchmarks import meta
from benchmarks.colocation.__main__ import TIME_RAN_OUT
from benchmarks.results.schema import FigureRow, Results, replace

HERE = Path(__file__).parent
RATE_HZ = 60.0
GROUPS = ("costs", "give_back", "two_threads", "four_threads")

#: The figures in the order of the results: the goal, and whether less or more is better.
GOALS: dict[str, tuple[float, Literal["less", "more"]]] = {
    "region_us": (6.0, "less"),
    "region_idle_us": (70.0, "less"),
    "install_overhead": (0.01, "less"),
    "two_threads_p99_ratio": (1.25, "less"),
    "two_threads_best_effort": (0.97, "more"),
    "four_threads_p99_ratio_worst": (1.25, "less"),
    "four_threads_best_effort": (0.93, "more"),
    "accounting_difference_bytes": (0.0, "less"),
    "observe_ns": (150.0, "less"),
    "give_back_over_empty_cache_ms": (10.0, "less"),
    "reserved_ratio": (1.15, "less"),
}
#: Latency loads and trainings of each group of threads.
LOADS: dict[str, tuple[list[str], list[str]]] = {
    "two_threads": (["bert_graph"], ["transformer"]),
    "four_threads": (["bert_graph", "mlp"], ["transformer", "resnet50"]),
}

Found = dict[str, tuple[float, float, float, int]]
"""Figures: the value, the least and the most of its parts, and of how many requests or samples it is made."""


class OutOfTimeError(Exception):
    """The limit would be passed."""


class Lab:
    """Runs programs to their end and keeps what they said."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path = options, options.out.with_suffix(".cells")
        self.began = time.monotonic()
        self.failed = False
        self.done: dict[str, Any] = {}
        if self.path.exists():
            self.done = dict(json.loads(self.path.read_text()))

    def run(self, key: str, script: str, *arguments: str, managed: bool, needs_s: float) -> None:
        """Runs a script once and keeps its JSON line under `key`; nothing where that is there already, or it fails.

        Args:
            key: GROUP/PART/REPEAT.
            script: In this directory.
            arguments: Its own.
            managed: With the hook; else as if cudasched were not there.
            needs_s: Seconds that it takes at most, about.

        Raises:
            OutOfTimeError: There are not so many left.
        """
        if key in self.done:
            return
        left = self.options.limit_s - (time.monotonic() - self.began) if self.options.limit_s else None
        if left is not None and left < needs_s:
            raise OutOfTimeError
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])}
        environment["CUDASCHED_OFF"] = "" if managed else "1"
        with tempfile.TemporaryDirectory() as run_directory:
            environment["CUDASCHED_RUN_DIR"] = run_directory
            command = [sys.executable, str(HERE / script), *arguments]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=3 * needs_s + 60
                )
                said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
            except subprocess.TimeoutExpired:
                said, done = None, subprocess.CompletedProcess(command, 1, "", "it does not end")
            except (IndexError, ValueError):
                said = None
        if said is None:
            self.failed = True
            print(f"{key}: {script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}", flush=True)
            return
        self.done[key] = said
        replace(self.path, json.dumps(self.done) + "\n")
        print(f"[{time.monotonic() - self.began:6.1f} s] {key}", flush=True)


def measure(lab: Lab, group: str) -> None:
    """The programs of a group."""
    options = lab.options
    if group == "costs":
        samples = ["--samples", str(options.samples)]
        inner = ["--inner", "5"] if options.simulate else []
        lab.run("costs/region", "costs.py", "region", *samples, *inner, managed=True, needs_s=15)
        lab.run("costs/idle", "costs.py", "idle", *samples, *inner, managed=True, needs_s=40)
        lab.run("costs/observe", "costs.py", "observe", *samples, *inner, managed=True, needs_s=60)
        for repeat in range(options.repeats):
            for name, managed in (("bare", False), ("install", True)):
                extra = ["--install"] if managed else []
                key = f"costs/inference {name}/{repeat}"
                arguments = ["inference", *samples, *inner, *extra]
                lab.run(key, "costs.py", *arguments, managed=managed, needs_s=25)
        return
    if group == "give_back":
        arguments = ["--samples", str(options.samples), "--gib", str(options.gib)]
        lab.run("give_back/processes", "give_back.py", *arguments, managed=True, needs_s=60)
        return
    latency, training = LOADS[group]
    loads = ["--latency", *latency, "--training", *training, "--seconds", str(options.seconds)]
    loads += ["--simulate"] if options.simulate else []
    alone = [str(number) for number in range(len(latency) + len(training))]
    alone += ["servers"] if len(latency) > 1 else []
    for repeat in range(options.repeats):
        for how, phases in (("bare", [*alone, "all"]), ("regions", ["all"]), ("priority", ["all"])):
            needs_s = 25 + (options.seconds + 2) * len(phases)
            arguments = ["--how", how, *loads, "--seed", str(repeat), "--phases", *phases]
            lab.run(f"{group}/{how}/{repeat}", "threads.py", *arguments, managed=how == "regions", needs_s=needs_s)


def find_costs(done: Mapping[str, Any]) -> Found:
    """The figures of a region's cost and of `install`."""
    found: Found = {}
    for part, name in (("region", "region_us"), ("idle", "region_idle_us")):
        if samples := done.get(f"costs/{part}", {}).get("samples"):
            found[name] = (statistics.median(samples), min(samples), max(samples), len(samples))
    if observed := done.get("costs/observe"):
        added, off = observed["samples"], observed["differences"]
        found["observe_ns"] = (statistics.median(added), min(added), max(added), len(added))
        found["accounting_difference_bytes"] = (max(off), min(off), max(off), len(off))
    bare, installed = ([part["samples"] for part in _parts(done, f"costs/inference {n}/")] for n in ("bare", "install"))
    if bare and installed:
        slower = [
            statistics.median(ours) / statistics.median(theirs) - 1
            for ours, theirs in zip(installed, bare, strict=False)
        ]
        found["install_overhead"] = (statistics.median(slower), min(slower), max(slower), len(slower))
    return found


def find_give_back(done: Mapping[str, Any]) -> Found:
    """What it takes until the other process has the memory, over emptying the cache and allocating memory that is free.

    The driver's allocation, of 2 ms a GiB, is in what the other process waits for, whichever process had the memory.
    """
    if not (said := done.get("give_back/processes")):
        return {}
    parts = zip(said["give_back"], said["bare"], said["allocation"], strict=True)
    over = [took - bare - allocation for took, bare, allocation in parts]
    return {"give_back_over_empty_cache_ms": (statistics.median(over), min(over), max(over), len(over))}


def find_threads(done: Mapping[str, Any], group: str, how: str = "regions") -> Found:
    """P99 over alone, worst of the servers, and trainings together over alone in the time that requests leave."""
    together, alone = _parts(done, f"{group}/{how}/"), _parts(done, f"{group}/bare/")
    if not together or not alone:
        return {}
    latency, training = LOADS[group]
    ratios, kept, requests = [], [], 0
    for ours, bare in zip(together, alone, strict=False):
        phases = {phase["phase"]: phase for phase in bare["phases"]}
        both = ours["phases"][-1]
        worst, duty = 0.0, 0.0
        for number, name in enumerate(latency):
            by_itself = phases[str(number)]["latency_ms"][name]
            worst = max(worst, percentile(both["latency_ms"][name], 0.99) / percentile(by_itself, 0.99))
            duty += RATE_HZ * statistics.fmean(by_itself) / 1e3
            requests += len(both["latency_ms"][name])
        shares = [
            both["per_s"][name] / phases[str(len(latency) + number)]["per_s"][name]
            for number, name in enumerate(training)
        ]
        ratios.append(worst)
        kept.append(sum(shares) / max(1 - duty, 1e-9))
    first = "two_threads_p99_ratio" if group == "two_threads" else "four_threads_p99_ratio_worst"
    return {
        first: (statistics.median(ratios), min(ratios), max(ratios), requests),
        f"{group}_best_effort": (statistics.median(kept), min(kept), max(kept), len(kept)),
    }


def servers_together(done: Mapping[str, Any], group: str) -> list[float]:
    """Of each repeat the worst server's P99 beside other servers alone, over its own alone: what no policy mends."""
    latency, _ = LOADS[group]
    found = []
    for bare in _parts(done, f"{group}/bare/"):
        phases = {phase["phase"]: phase["latency_ms"] for phase in bare["phases"]}
        if "servers" in phases:
            p99 = [
                percentile(phases["servers"][name], 0.99) / percentile(phases[str(number)][name], 0.99)
                for number, name in enumerate(latency)
            ]
            found.append(max(p99))
    return found


def find_reserved(done: Mapping[str, Any]) -> Found:
    """Memory that PyTorch holds in the two threads with regions over without."""
    ours, bare = _parts(done, "two_threads/regions/"), _parts(done, "two_threads/bare/")
    ratios = [mine["reserved"] / theirs["reserved"] for mine, theirs in zip(ours, bare, strict=False)]
    return {"reserved_ratio": (statistics.median(ratios), min(ratios), max(ratios), len(ratios))} if ratios else {}


def _parts(done: Mapping[str, Any], prefix: str) -> list[Any]:
    return [part for key, part in sorted(done.items()) if key.startswith(prefix)]


def figures(done: Mapping[str, Any], limited_by: Mapping[str, str]) -> list[FigureRow]:
    """What was measured, as rows."""
    found = {**find_costs(done), **find_give_back(done), **find_reserved(done)}
    for group in LOADS:
        found.update(find_threads(done, group))
    rows = []
    for name, (goal, better) in GOALS.items():
        if name not in found:
            continue
        value, low, high, n = found[name]
        why = limited_by.get(name, "")
        row = FigureRow.judged(
            figure=name, value=value, goal=goal, better=better, low=low, high=high, n=n, limited_by=why
        )
        rows.append(row)
    return rows


def _said(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytorch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups, by commas, of {', '.join(GROUPS)}")
    parser.add_argument("--limit-s", type=float, help="stop before so much time has passed")
    parser.add_argument("--seconds", type=float, help="of each phase (8; 1 in a rehearsal)")
    parser.add_argument("--repeats", type=int, help="of each comparison (3; 1 in a rehearsal)")
    parser.add_argument("--samples", type=int, default=7, help="of each cost")
    parser.add_argument("--gib", type=int, default=40, help="memory that is given back")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT", help="what limits a figure")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    options = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    groups = [name for name in options.only.split(",") if name]
    if not groups or any(name not in GROUPS for name in groups):
        parser.error(f"--only: there are {', '.join(GROUPS)}")
    limits = [text.partition("=") for text in options.limited_by]
    if any(name not in GOALS or not text for name, _, text in limits):
        parser.error(f"--limited-by: FIGURE=TEXT, of {', '.join(GOALS)}")
    options.seconds = options.seconds or (1.0 if options.simulate else 8.0)
    options.repeats = options.repeats or (1 if options.simulate else 3)
    status = 0
    try:
        described = meta.describe(options.simulate, options.commit)
        lab = Lab(options)
        for group in groups:
            try:
                measure(lab, group)
            except OutOfTimeError:
                print(f"{group}: time ran out; run again to go on")
                status = status or TIME_RAN_OUT
        if lab.failed:
            status = 1
    except HarnessError as error:
        print(f"pytorch: {error}", file=sys.stderr)
        return 1
    rows = figures(lab.done, {name: text for name, _, text in limits})
    for part, when in (("region", "in a loop"), ("idle", "after 16 ms of idleness")):
        if times := lab.done.get(f"costs/{part}", {}).get("stream"):
            print(f"PyTorch's own `with torch.cuda.stream(...)`, {when}: {_said(times)} us")
    for group in LOADS:
        for name, (value, low, high, _) in find_threads(lab.done, group, "priority").items():
            print(f"with priority streams, no cudasched: {name} {value:.3g} ({low:.3g} to {high:.3g})")
        if beside := servers_together(lab.done, group):
            print(f"{group}: servers beside one another, no training, no cudasched: worst P99 {_said(beside)} x alone")
    if said := lab.done.get("give_back/processes"):
        apart = ", ".join(f"{name} {statistics.median(times):.1f}" for name, times in said.items() if times)
        print(f"memory given back, ms, of which the figure is made: {apart}")
        if refused := said.get("refused"):
            print(f"{len(refused)} allocations beside a program that computes were refused")
    if rows:
        made = Results(meta=described, rows=rows)
        made.write(options.out)
        from benchmarks.tables import core_table

        print(core_table(made))
    print(f"results: {options.out}, measured: {lab.path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
