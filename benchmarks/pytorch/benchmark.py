"""The figures of benchmarks/results/pytorch.json; about 12 minutes.

    costs         entering and leaving a region, hot and after 16 ms idle; eager ResNet50 inference under `install`;
                  what counting memory adds to an allocation, and by how many bytes it differs from PyTorch's
    give_back     a latency client's allocation of memory that another process only caches, over that process's bare
                  `empty_cache()` and the same allocation of free memory (give_back.py); 40 GiB, of a GPU that has
                  70 GiB free at least
    two_threads   BERT requests and transformer training in two threads of one process (threads.py)
    four_threads  two servers and two trainings in four threads; with priority streams instead, and the two servers
                  without trainings, in the same run

A program that fails keeps no other from running.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cudasched.demo.harness import Child, HarnessError

from benchmarks.lab.processes import START_TIMEOUT_S, Processes, ask, in_processes, output_of, p99
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Goals, Session, median_of, parts_of, worst_of
from benchmarks.pytorch.give_back import REFUSED

HERE = Path(__file__).parent
RATE_HZ = 60.0

#: The figures in the order of the results: the goal, and whether less or more is better.
GOALS: Goals = {
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


def run(session: Session, key: str, script: str, *arguments: str, managed: bool, needs_s: float) -> None:
    """Runs a script once and keeps its JSON line under `key`; nothing where that is there already, or it fails.

    Args:
        session: Of the benchmark.
        key: GROUP/PART/REPEAT.
        script: In this directory.
        arguments: Its own.
        managed: With the hook; else as if cudasched were not there.
        needs_s: Seconds that it takes at most, about.

    Raises:
        OutOfTimeError: There are not so many left.
    """
    if key in session.store.done:
        return
    session.need(needs_s)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])}
    environment["CUDASCHED_OFF"] = "" if managed else "1"
    with tempfile.TemporaryDirectory() as run_directory:
        environment["CUDASCHED_RUN_DIR"] = run_directory
        command = [sys.executable, str(HERE / script), *arguments]
        try:
            said = json.loads(output_of(script, command, environment, 3 * needs_s + 60).splitlines()[-1])
        except (HarnessError, IndexError, ValueError) as error:
            session.fail(f"{key}: {script} {' '.join(arguments)} failed: {error}")
            return
    session.store.keep(key, said)
    session.say(key)


def costs(session: Session) -> None:
    """Programs of one process each."""
    samples = ["--samples", str(session.options.samples), *(["--inner", "5"] if session.rehearsal else [])]
    for part, needs_s in (("region", 15), ("idle", 40), ("observe", 60)):
        run(session, f"costs/{part}", "costs.py", part, *samples, managed=True, needs_s=needs_s)
    for repeat in range(session.options.repeats):
        for name, managed in (("bare", False), ("install", True)):
            arguments = ["inference", *samples, *["--install"] * managed]
            run(session, f"costs/inference {name}/{repeat}", "costs.py", *arguments, managed=managed, needs_s=25)


def give_back(lab: Processes) -> None:
    """Samples of three times each, ms, that lie side by side.

    `bare` is of the giver's `torch.cuda.empty_cache()`, `allocation` of the server's allocation where the memory is
    free, `give_back` of the same where the other's cache has it. With `busy` the giver computes meanwhile, some 20 ms
    ahead of the GPU, so that its frees wait for what is on it; `refused` are the allocations that failed then.

    Raises:
        HarnessError: An allocation was refused, or a process ended.
    """
    session = lab.session
    if "give_back/processes" in session.store.done:
        return
    session.need(60.0)
    gib, samples = ("--gib", str(session.options.gib)), session.options.samples
    giver, server = (
        lab.start(HERE / "give_back.py", role, *gib, imports_cudasched=True) for role in ("giver", "server")
    )
    for child in (giver, server):
        child.answer(START_TIMEOUT_S, "ready")
    found: dict[str, list[float]] = {"bare": [], "allocation": [], "give_back": [], "busy": [], "refused": []}

    def took(child: Child, command: str) -> float:
        return float(ask(child, command)["ms"])

    for sample in range(samples + 1):
        took(giver, "fill")
        times = {"bare": took(giver, "bare"), "allocation": took(server, "allocate")}
        took(giver, "fill")
        times["give_back"] = took(server, "allocate")
        took(giver, "bare")
        if REFUSED in times.values():
            raise HarnessError(f"an allocation was refused: {times}")
        if sample > 0:  # the first one warms up
            for name, ms in times.items():
                found[name].append(ms)
    took(giver, "busy")
    for _ in range(samples):
        took(giver, "fill")
        ms = took(server, "allocate")
        found["refused" if ms == REFUSED else "busy"].append(ms)
    session.store.keep("give_back/processes", found)


def threads(session: Session, group: str) -> None:
    """A process that has the loads of a group in threads."""
    options = session.options
    latency, training = LOADS[group]
    loads = ["--latency", *latency, "--training", *training, "--seconds", str(options.seconds)]
    loads += ["--simulate"] * session.rehearsal
    alone = [str(number) for number in range(len(latency) + len(training))]
    alone += ["servers"] if len(latency) > 1 else []
    for repeat in range(options.repeats):
        for how, phases in (("bare", [*alone, "all"]), ("regions", ["all"]), ("priority", ["all"])):
            needs_s = 25 + (options.seconds + 2) * len(phases)
            arguments = ["--how", how, *loads, "--seed", str(repeat), "--phases", *phases]
            key = f"{group}/{how}/{repeat}"
            run(session, key, "threads.py", *arguments, managed=how == "regions", needs_s=needs_s)


def find_costs(done: Mapping[str, Any]) -> Found:
    """The figures of a region's cost and of `install`."""
    found: Found = {}
    for part, name in (("region", "region_us"), ("idle", "region_idle_us")):
        if samples := done.get(f"costs/{part}", {}).get("samples"):
            found[name] = median_of(samples)
    if observed := done.get("costs/observe"):
        added, off = observed["samples"], observed["differences"]
        found["observe_ns"] = median_of(added)
        found["accounting_difference_bytes"] = worst_of(off)
    bare, installed = (
        [part["samples"] for part in parts_of(done, f"costs/inference {n}/")] for n in ("bare", "install")
    )
    if bare and installed:
        medians = zip(map(statistics.median, installed), map(statistics.median, bare), strict=False)
        found["install_overhead"] = median_of([ours / theirs - 1 for ours, theirs in medians])
    return found


def find_give_back(done: Mapping[str, Any]) -> Found:
    """What it takes until the other process has the memory, over emptying the cache and allocating memory that is free.

    The driver's allocation, of 2 ms a GiB, is in what the other process waits for, whichever process had the memory.
    """
    if not (said := done.get("give_back/processes")):
        return {}
    parts = zip(said["give_back"], said["bare"], said["allocation"], strict=True)
    over = [took - bare - allocation for took, bare, allocation in parts]
    return {"give_back_over_empty_cache_ms": median_of(over)}


def worst_p99(phase: Mapping[str, Any], phases: Mapping[str, Any], latency: Sequence[str]) -> float:
    """P99 in a phase over P99 alone, of the worst server."""
    alone = [phases[str(number)]["latency_ms"][name] for number, name in enumerate(latency)]
    return max(p99(phase["latency_ms"][name]) / p99(each) for name, each in zip(latency, alone, strict=True))


def find_threads(done: Mapping[str, Any], group: str, how: str = "regions") -> Found:
    """P99 over alone, worst of the servers, and trainings together over alone in the time that requests leave."""
    together, alone = parts_of(done, f"{group}/{how}/"), parts_of(done, f"{group}/bare/")
    if not together or not alone:
        return {}
    latency, training = LOADS[group]
    ratios, kept, requests = [], [], 0
    for ours, bare in zip(together, alone, strict=False):
        phases = {phase["phase"]: phase for phase in bare["phases"]}
        both = ours["phases"][-1]
        by_itself = [phases[str(number)]["latency_ms"][name] for number, name in enumerate(latency)]
        duty = RATE_HZ * sum(map(statistics.fmean, by_itself)) / 1e3
        requests += sum(len(both["latency_ms"][name]) for name in latency)
        steps_alone = [phases[str(number)]["per_s"][name] for number, name in enumerate(training, len(latency))]
        shares = [both["per_s"][name] / each for name, each in zip(training, steps_alone, strict=True)]
        ratios.append(worst_p99(both, phases, latency))
        kept.append(sum(shares) / max(1 - duty, 1e-9))
    first = "two_threads_p99_ratio" if group == "two_threads" else "four_threads_p99_ratio_worst"
    return {
        first: median_of(ratios, requests),
        f"{group}_best_effort": median_of(kept),
    }


def servers_together(done: Mapping[str, Any], group: str) -> list[float]:
    """Of each repeat the worst server's P99 beside other servers alone, over its own alone: what no policy mends."""
    latency, _ = LOADS[group]
    runs = [{phase["phase"]: phase for phase in bare["phases"]} for bare in parts_of(done, f"{group}/bare/")]
    return [worst_p99(phases["servers"], phases, latency) for phases in runs if "servers" in phases]


def find_reserved(done: Mapping[str, Any]) -> Found:
    """Memory that PyTorch holds in the two threads with regions over without."""
    ours, bare = parts_of(done, "two_threads/regions/"), parts_of(done, "two_threads/bare/")
    ratios = [mine["reserved"] / theirs["reserved"] for mine, theirs in zip(ours, bare, strict=False)]
    return {"reserved_ratio": median_of(ratios)} if ratios else {}


def find(done: Done) -> Found:
    """All figures of what was measured."""
    threads = {name: value for group in LOADS for name, value in find_threads(done, group).items()}
    return {**find_costs(done), **find_give_back(done), **find_reserved(done), **threads}


def _said(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def explain(session: Session) -> None:
    """Prints what the figures are to be compared with."""
    done = session.store.done
    for part, when in (("region", "in a loop"), ("idle", "after 16 ms of idleness")):
        if times := done.get(f"costs/{part}", {}).get("stream"):
            print(f"PyTorch's own `with torch.cuda.stream(...)`, {when}: {_said(times)} us")
    for group in LOADS:
        for name, (value, low, high, _) in find_threads(done, group, "priority").items():
            print(f"with priority streams, no cudasched: {name} {value:.3g} ({low:.3g} to {high:.3g})")
        if beside := servers_together(done, group):
            print(f"{group}: servers beside one another, no training, no cudasched: worst P99 {_said(beside)} x alone")
    if said := done.get("give_back/processes"):
        apart = ", ".join(f"{name} {statistics.median(times):.1f}" for name, times in said.items() if times)
        print(f"memory given back, ms, of which the figure is made: {apart}")
        if refused := said.get("refused"):
            print(f"{len(refused)} allocations beside a program that computes were refused")


BENCHMARK = Benchmark(
    about="costs of regions in PyTorch, threads of one process that differ by them, memory given back",
    groups={
        "costs": costs,
        "give_back": in_processes(give_back),
        **{group: partial(threads, group=group) for group in LOADS},
    },
    goals=GOALS,
    find=find,
    finish=explain,
    settings={"seconds": (8.0, 1.0), "repeats": (3, 1), "samples": 7, "gib": (40, 4)},
)
