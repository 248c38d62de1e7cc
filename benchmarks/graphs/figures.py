"""What slices cost: the figures of graph_slicing.json, turn by turn while there is time.

    python -m benchmarks.graphs figures --out benchmarks/results/graph_slicing.json --limit-s 590
    python -m benchmarks.graphs figures --rehearse --out /tmp/graph_slicing.json

Each mode is one process (probe.py): bare, as it is by default with no latency client there (`auto`), with graphs whole
(`off`), the same without node priorities (`unprioritised`), and with graphs always cut (`always`). The processes live
side by side and take short turns, in the order of MODES and then in the opposite one; all but one are idle. Figures
are medians over pairs of turns, of which each is of two processes one behind the other, so that what drifts or is slow
for a moment is the same for both; low and high are the quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cudasched.demo.harness import CUDASCHED, Backend, Child, HarnessError

from benchmarks import meta
from benchmarks.results.schema import FigureRow, Results
from benchmarks.store import Store

PROBE = Path(__file__).with_name("probe.py")
#: What is compared is neighbours: bare and auto, off and always.
MODES = ("bare", "auto", "unprioritised", "off", "always")
#: What a turn measures beside instantiations and clones: replays one after another, launches, builds.
REPLAYED = ("bare", "auto")
LAUNCHED = ("off", "always")
BUILT = ("always",)
INSTANTIATIONS = 6
ANSWER_S = 240.0
#: What starting the processes and the first round of turns may take.
START_S, ROUND_S = 60.0, 10.0
TIME_RAN_OUT = 3

Better = Literal["less", "more"]
#: The goal of each figure, and whether less or more is better.
GOALS: dict[str, tuple[float, Better]] = {
    "build_ms_2000_nodes": (100.0, "less"),
    "clone_of_instantiate": (0.10, "less"),
    "driver_clone_of_instantiate": (0.10, "less"),
    "launch_ns_added": (20.0, "less"),
    "memory_ratio": (1.5, "less"),
    "idle_speed": (0.995, "more"),
}

Part = Mapping[str, Any]
"""What a process found in one turn, or when it started."""


def rounds_of(done: Mapping[str, Any], kind: str) -> list[Mapping[str, Part]]:
    """What is kept of `kind`, start or turn: a part a mode of each round."""
    return [done[f"{kind}/{number}"] for number in range(sum(key.startswith(f"{kind}/") for key in done))]


def values(done: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of each figure that can be told: a value a pair of turns, or a start."""
    found: dict[str, list[float]] = {name: [] for name in GOALS}
    for whole, cut in _pairs(done, "start", "off", "always"):
        if whole["bytes"] > 0 and cut.get("graphs_sliced"):
            found["memory_ratio"].append((cut["bytes"] - whole["bytes"]) / whole["bytes"])
    for whole, cut in _pairs(done, "turn", "off", "always"):
        found["clone_of_instantiate"].append(cut["instantiate_ns"] / whole["instantiate_ns"] - 1)
        found["launch_ns_added"].append(cut["launch_ns"] - whole["launch_ns"])
        if cut.get("build_ns"):
            found["build_ms_2000_nodes"].append(cut["build_ns"] / 1e6)
    for bare, idle in _pairs(done, "turn", "bare", "auto"):
        found["driver_clone_of_instantiate"].append(bare["clone_ns"] / bare["instantiate_ns"])
        found["idle_speed"].append(idle["per_s"] / bare["per_s"])
    return {name: each for name, each in found.items() if each}


def _pairs(done: Mapping[str, Any], kind: str, one: str, other: str) -> Iterator[tuple[Part, Part]]:
    for parts in rounds_of(done, kind):
        yield parts[one], parts[other]


def quartiles(each: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    if len(each) == 1:
        return each[0], each[0]
    lower, _, upper = statistics.quantiles(each, n=4, method="inclusive")
    return lower, upper


def rows(done: Mapping[str, Any], limited_by: Mapping[str, str]) -> list[FigureRow]:
    """The results."""
    made = []
    for name, each in values(done).items():
        goal, better = GOALS[name]
        low, high = quartiles(each)
        row = FigureRow.judged(
            figure=name,
            value=statistics.median(each),
            goal=goal,
            better=better,
            low=low,
            high=high,
            n=len(each),
            limited_by=limited_by.get(name, ""),
        )
        made.append(row)
    return made


def explained(done: Mapping[str, Any]) -> str:
    """What an instantiation takes in each mode, and how much longer than bare: what the figures do not say."""
    said = []
    for mode in MODES:
        pairs = list(_pairs(done, "turn", "bare", mode))
        if pairs:
            ms = statistics.median(part["instantiate_ns"] for _, part in pairs) / 1e6
            ratio = statistics.median(part["instantiate_ns"] / bare["instantiate_ns"] for bare, part in pairs)
            said.append(f"{mode} {ms:.3f} ms (x{ratio:.2f})")
    return f"instantiation: {', '.join(said)}" if said else ""


class Probes:
    """The processes of all modes.

    Args:
        scratch: Each mode has a table of its own there: none sees another as a client.

    Raises:
        HarnessError: From all methods: a process failed.
    """

    def __init__(self, backend: Backend, scratch: Path) -> None:
        self._children = {mode: self._start(backend, mode, scratch / mode) for mode in MODES}

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.stop(grace_s=0.0)

    @staticmethod
    def _start(backend: Backend, mode: str, table: Path) -> Child:
        command = [sys.executable, str(PROBE), *["--simulate"] * (backend.name == "simulated")]
        environment = backend.environment(hooked=mode != "bare")
        if mode != "bare":
            table.mkdir(mode=0o700)
            command = [*CUDASCHED, "run", "--class", "best-effort", "--", *command]
            slices = "off" if mode == "unprioritised" else mode
            environment |= {"CUDASCHED_GRAPH_SLICES": slices, "CUDASCHED_RUN_DIR": str(table)}
        if mode == "unprioritised":
            environment["CUDASCHED_NODE_PRIORITY"] = "off"
        return Child(f"probe {mode}", command, environment)

    def prepare(self, mode: str, options: argparse.Namespace) -> dict[str, Any]:
        """Has its graphs made."""
        return self._ask(mode, "prepare", nodes=options.nodes, builds=mode in BUILT)

    def turn(self, mode: str, options: argparse.Namespace) -> dict[str, Any]:
        """Has it measure."""
        return self._ask(
            mode,
            "turn",
            instantiations=INSTANTIATIONS,
            launches=options.launches if mode in LAUNCHED else 0,
            seconds=options.seconds if mode in REPLAYED else 0.0,
            builds=mode in BUILT,
        )

    def _ask(self, mode: str, command: str, **arguments: Any) -> dict[str, Any]:
        self._children[mode].tell(command, **arguments)
        answer = self._children[mode].answer(ANSWER_S)
        return {name: value for name, value in answer.items() if name != "event"}


def measure(backend: Backend, store: Store, options: argparse.Namespace) -> int:
    """Does the turns that are missing while there is time; returns the exit status.

    Raises:
        HarnessError: A process failed.
    """
    began = time.monotonic()

    def fits(seconds: float) -> bool:
        return time.monotonic() - began + seconds <= options.limit_s

    missing = range(len(rounds_of(store.done, "turn")), options.repeats)
    if not missing:
        return 0
    if not fits(START_S + ROUND_S):
        return TIME_RAN_OUT
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="cudasched-graphs-", dir=shared) as scratch,
        Probes(backend, Path(scratch)) as probes,
    ):
        ready = {mode: probes.prepare(mode, options) for mode in MODES}  # in turn: memory is what the device has less
        store.keep(f"start/{len(rounds_of(store.done, 'start'))}", ready)
        print(f"[{time.monotonic() - began:6.1f} s] ready", flush=True)
        longest_s = ROUND_S
        for number in missing:
            if not fits(longest_s):
                return TIME_RAN_OUT
            round_began = time.monotonic()
            found = {mode: probes.turn(mode, options) for mode in MODES[:: 1 if number % 2 == 0 else -1]}
            store.keep(f"turn/{number}", found)
            took_s = time.monotonic() - round_began
            longest_s = took_s if number == missing.start else max(longest_s, took_s)
            print(f"[{time.monotonic() - began:6.1f} s] round {number + 1} of {options.repeats}", flush=True)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.graphs figures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--repeats", type=int, default=None, help="rounds of turns (40; 6 in a rehearsal)")
    parser.add_argument("--nodes", type=int, default=2000, help="of the graph that is cut")
    parser.add_argument("--launches", type=int, default=None, help="that are timed in a turn (2000; 200)")
    parser.add_argument("--seconds", type=float, default=None, help="of replays in a turn (0.5; 0.2)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop before so much time has passed")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--limited-by", action="append", default=[], metavar="FIGURE=TEXT", help="why a goal is missed")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (6 if options.simulate else 40)
    options.launches = options.launches or (200 if options.simulate else 2_000)
    options.seconds = options.seconds or (0.2 if options.simulate else 0.5)
    reasons = [text.partition("=") for text in options.limited_by]
    unknown = [name for name, _, _ in reasons if name not in GOALS]
    if unknown:
        parser.error(f"--limited-by: {', '.join(unknown)}; there are {', '.join(GOALS)}")
    options.limited_by = {name: text for name, _, text in reasons}
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures what is missing, and writes what can be told."""
    options = parse(arguments)
    backend: Backend | None = None
    try:
        backend = Backend.simulated(options.simulated_driver) if options.simulate else Backend()
        store = Store(options.out.with_suffix(".parts"), meta.describe(options.simulate, options.commit))
        status = measure(backend, store, options)
    except (HarnessError, ValueError) as error:
        print(f"graphs: {error}", file=sys.stderr)
        return 1
    finally:
        if backend:
            backend.close()
    made = rows(store.done, options.limited_by)
    for row in made:
        print(f"{row.figure}: {row.value:.4g} ({row.low:.4g} to {row.high:.4g}), goal {row.goal:g}, n {row.n}")
    if made:
        print(explained(store.done))
        Results(meta=store.meta, rows=made).write(options.out)
    if status == TIME_RAN_OUT:
        print("time ran out: run again to go on")
    return status
