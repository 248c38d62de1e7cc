"""What slices cost, by processes (probe.py) that take turns: graph_slicing.json; see benchmarks/README.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import Child

from benchmarks.lab.processes import Processes, ask, in_processes
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import Done, Found, Goals, Session

PROBE = Path(__file__).with_name("probe.py")
#: What is compared is neighbours: bare and auto, off and always.
MODES = ("bare", "auto", "off", "always")
#: What a turn measures beside instantiations and clones: replays one after another, launches, builds.
REPLAYED = ("bare", "auto")
LAUNCHED = ("off", "always")
BUILT = ("always",)
INSTANTIATIONS = 6
ANSWER_S = 240.0
#: What starting the processes and the first round of turns may take.
START_S, ROUND_S = 60.0, 10.0

GOALS: Goals = {
    "build_ms_2000_nodes": (100.0, "less"),
    "clone_of_instantiate": (0.10, "less"),
    "driver_clone_of_instantiate": (0.10, "less"),
    "launch_ns_added": (20.0, "less"),
    "memory_ratio": (1.5, "less"),
    "idle_speed": (0.995, "more"),
}

Part = Mapping[str, Any]
"""What a process found in one turn, or when it started."""


def rounds_of(done: Done, kind: str) -> list[Mapping[str, Part]]:
    """What is kept of `kind`, start or turn: a part a mode of each round."""
    return [done[f"{kind}/{number}"] for number in range(sum(key.startswith(f"{kind}/") for key in done))]


def values(done: Done) -> dict[str, list[float]]:
    """Of each figure that can be told: a value a pair of turns, or a start."""
    found: dict[str, list[float]] = {name: [] for name in GOALS}
    for start in rounds_of(done, "start"):
        whole, cut = start["off"], start["always"]
        if whole["bytes"] > 0 and cut.get("graphs_sliced"):
            found["memory_ratio"].append((cut["bytes"] - whole["bytes"]) / whole["bytes"])
    for parts in rounds_of(done, "turn"):
        bare, idle, whole, cut = (parts[mode] for mode in MODES)
        found["clone_of_instantiate"].append(cut["instantiate_ns"] / whole["instantiate_ns"] - 1)
        found["launch_ns_added"].append(cut["launch_ns"] - whole["launch_ns"])
        if cut.get("build_ns"):
            found["build_ms_2000_nodes"].append(cut["build_ns"] / 1e6)
        found["driver_clone_of_instantiate"].append(bare["clone_ns"] / bare["instantiate_ns"])
        found["idle_speed"].append(idle["per_s"] / bare["per_s"])
    return {name: each for name, each in found.items() if each}


def quartiles(each: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    if len(each) == 1:
        return each[0], each[0]
    lower, _, upper = statistics.quantiles(each, n=4, method="inclusive")
    return lower, upper


def find(done: Done) -> Found:
    """Medians over pairs of turns, and quartiles."""
    return {name: (statistics.median(each), *quartiles(each), len(each)) for name, each in values(done).items()}


def started(lab: Processes, mode: str) -> Child:
    """The process of a mode; each has a table of its own: none sees another as a client."""
    environment = {} if mode == "bare" else {"CUDASCHED_GRAPH_SLICES": mode}
    simulate = ["--simulate"] * lab.session.rehearsal
    client_class = None if mode == "bare" else "best-effort"
    return lab.start(PROBE, *simulate, client_class=client_class, table=mode, environment=environment)


def turn(child: Child, mode: str, session: Session) -> dict[str, Any]:
    """Has a process measure."""
    return ask(
        child,
        "turn",
        ANSWER_S,
        instantiations=INSTANTIATIONS,
        launches=session.options.launches if mode in LAUNCHED else 0,
        seconds=session.options.seconds if mode in REPLAYED else 0.0,
        builds=mode in BUILT,
    )


def measure(lab: Processes) -> None:
    """Does the turns that are missing, of all modes in one order and in the opposite one."""
    session, store = lab.session, lab.session.store
    missing = range(len(rounds_of(store.done, "turn")), session.options.repeats)
    if not missing:
        return
    session.need(START_S + ROUND_S)
    children = {mode: started(lab, mode) for mode in MODES}
    nodes = session.options.nodes
    ready = {  # in turn: memory is what the device has less
        mode: ask(child, "prepare", ANSWER_S, nodes=nodes, builds=mode in BUILT) for mode, child in children.items()
    }
    store.keep(f"start/{len(rounds_of(store.done, 'start'))}", ready)
    session.say("ready")
    longest_s = ROUND_S
    for number in missing:
        session.need(longest_s)
        began = time.monotonic()
        modes = MODES[:: 1 if number % 2 == 0 else -1]
        store.keep(f"turn/{number}", {mode: turn(children[mode], mode, session) for mode in modes})
        took_s = time.monotonic() - began
        longest_s = took_s if number == missing.start else max(longest_s, took_s)
        session.say(f"round {number + 1} of {session.options.repeats}")


BENCHMARK = Benchmark(
    about="costs of cutting graphs",
    groups={"turns": in_processes(measure)},
    goals=GOALS,
    find=find,
    settings={"repeats": (40, 6), "nodes": (2000, 300), "launches": (2000, 60), "seconds": (0.5, 0.1)},
)
