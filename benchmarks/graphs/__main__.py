"""Programs of CUDA graphs as best-effort work beside a server, cut into slices and whole; a rerun does what is missing.

    python -m benchmarks.graphs --out benchmarks/results/graphs.json --limit-s 590
    python -m benchmarks.graphs --out benchmarks/results/graphs.json --only whole_step,jax --arms processes
    python -m benchmarks.graphs --rehearse --out /tmp/graphs.json
    python -m benchmarks.graphs merge --out benchmarks/results/graphs.json first.cells second.cells
    python -m benchmarks.graphs explain benchmarks/results/graphs.cells

As the breadth benchmark does it (benchmarks/breadth): each program is started first, then the server comes and is
measured; the outcome of each cell is saved at once, beside the results with the suffix .cells. With a limit of time,
the arms that the figures are promised of come first, for all loads, those that compile nothing ahead of the others;
what a program needs to start is then paid twice, so without a limit each program is started once. The exit status is 0
when all cells have a result, 3 when time ran out first, 1 when a cell failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import ARMS as ALL_ARMS
from cudasched.demo.harness import HEAD_START_S, Backend, HarnessError, percentile

from benchmarks.breadth import __main__ as breadth
from benchmarks.breadth.__main__ import ANSWER_S, Fleet, Mode, Place, Runner, finish, merge, results, split_choices
from benchmarks.colocation.cells import KERNELS, Cell, CellFile
from benchmarks.colocation.frame import run_cells
from benchmarks.graphs.loads import LOADS
from benchmarks.graphs.summary import explain_table, graphs_figures, graphs_table
from benchmarks.lab.pairs import configured_lead_us
from benchmarks.lab.run import TIME_RAN_OUT

HERE = Path(__file__).parent
#: Without time slices, or two processes would need no cuts.
CUT = {"CUDASCHED_GRAPH_SLICES": "auto", "CUDASCHED_TIME_SLICE_US": "off"}
SERVER = "bert_graph"
ARMS = (
    "latency_alone",
    "best_effort_alone",
    "best_effort_alone_mps",
    "cudasched_two_processes",
    "cudasched_mps",
    "cudasched_one_process",
    "cudasched_two_processes_whole",
    "processes",
)
#: Those that are measured first where time is limited: what is alone, and the two ways to run two processes.
FIRST_ARMS = ARMS[:5]
#: Which of a program's processes an arm runs.
MODES = {
    "best_effort_alone": "plain",
    "best_effort_alone_mps": "mps",
    "processes": "plain",
    "cudasched_two_processes": "two_processes",
    "cudasched_two_processes_whole": "whole",
    "cudasched_mps": "mps",
    "cudasched_one_process": "one_process",
}
#: What is printed of results.
TABLES = (graphs_table, graphs_figures)
#: Requests of a server's first seconds, in which graphs may still be cut, have a P99 of their own.
EARLY_S = 3.0
#: What each process of a program that compiles takes to be built, and one of its cells, at most.
COMPILES_S = 24.0
#: How often a program begins anew beside the server, so that requests arrive while its slices are built; what compiles
#: does so once. Requests come in runs of so many seconds until it has.
BEGINNINGS = 3
BEGINNING_S = 2.0


class GraphFleet(Fleet):
    """The processes, with two modes more: graphs are not cut, and program and server are one process."""

    modes: Mapping[str, Mode] = {
        **{name: dataclasses.replace(mode, environment=CUT) for name, mode in Fleet.modes.items()},
        "whole": Mode(environment={**CUT, "CUDASCHED_GRAPH_SLICES": "off"}),
        "one_process": Mode(environment=CUT),
    }
    script = HERE / "program.py"

    def _command(self, place: Place) -> list[str]:
        command = super()._command(place)
        if place.mode == "one_process":
            command += ["--beside", SERVER, "--time-scale", f"{self.backend.scale:g}"]
        return command

    def _stand_in(self, program: str) -> str:
        return program


class GraphRunner(Runner):
    """Does the missing cells."""

    known = LOADS
    modes = MODES

    def run(self) -> int:
        """With a limit of time in two rounds, the arms that matter most first."""
        arms = self.options.arms
        rounds = [arms] if self.options.limit_s is None else [[arm for arm in arms if arm in FIRST_ARMS], arms]
        status = 0
        for chosen in filter(None, rounds):
            self.options.arms = chosen
            status = super().run()
            if status == TIME_RAN_OUT:
                break
        self.options.arms = arms
        return status

    def _unit(self, server: str, program: str, following: tuple[str, str] | None) -> bool:
        # Its processes are built one after another; what is begun too late would be lost.
        needed_s = COMPILES_S * len(self._places(server, program)) + self.options.seconds
        if self.known[program].compiles and self._left_s() < needed_s and not self._simulated:
            return False
        return super()._unit(server, program, following)

    def _left_s(self) -> float:
        return super()._left_s() - EARLY_S - HEAD_START_S

    def _beside(self, cell: Cell, seconds: float) -> Cell:
        """A cell of requests beside what is measured; in a rehearsal it is no longer than the others."""
        return dataclasses.replace(cell, seconds=min(seconds, cell.seconds) if self._simulated else seconds)

    def _cell(self, cell: Cell, processes: Sequence[Place]) -> dict[str, Any]:
        (process,) = processes
        if cell.arm == KERNELS or process.mode == "plain":
            return super()._cell(cell, processes)
        if not ALL_ARMS[cell.arm].latency:
            return self._alone_cell(cell, process)
        own = process.mode == "one_process"
        served = process if own else Place("server", cell.latency, process.mode)
        self.fleet.ask(process, "start")
        try:
            server = served if own else self._server(served)
            early = self._window(self._beside(cell, EARLY_S), [], [server])
            before, began = self.fleet.ask(process, "state"), time.monotonic()
            result = self._window(cell, [process], [server])
            result["counted_s"] = time.monotonic() - began
            result["counted"] = breadth.counted(before, self.fleet.ask(process, "state"))
            result["early_p99_ms"] = percentile(early["latency"][cell.latency]["latency_ms"], 0.99)
            if process.mode != "whole":
                self.fleet.ask(process, "pause")
                result["building"] = self._while_building(cell, process, server)
            return result
        finally:
            if process in self.fleet:
                self.fleet.ask(process, "pause")
            if not own and not self.options.keep_servers:
                self.fleet.retire(served)

    def _while_building(self, cell: Cell, process: Place, server: Place) -> dict[str, Any]:
        """A program that is paused begins anew beside its server: the requests that met the building of its slices."""
        short = self._beside(cell, BEGINNING_S)
        met: list[float] = []
        builds = 0
        for _ in range(1 if self.known[process.name].compiles or self._simulated else BEGINNINGS):
            if self._left_s() < BEGINNING_S:
                break
            self.fleet.ask(process, "again", after_s=HEAD_START_S)  # when requests count
            told: dict[str, Any] = {"done": False}
            until = time.monotonic() + ANSWER_S
            served: list[tuple[int, float]] = []
            while not told["done"]:
                if time.monotonic() > until:
                    raise HarnessError(f"{process.name} has not begun anew within {ANSWER_S:.0f} s")
                requests = self._window(short, [], [server], keep_due=True)["latency"][cell.latency]
                served += zip(requests["due_ns"], requests["latency_ms"], strict=True)
                told = self.fleet.ask(process, "builds")
            builds += len(told["builds"])
            met += met_ms(served, told["builds"], self.fleet.backend.scale)
        return {"latency_ms": met, "builds": builds}

    def _alone_cell(self, cell: Cell, process: Place) -> dict[str, Any]:
        """A program under cudasched with no server, not even an idle one of the cells before."""
        served = Place("server", cell.latency, process.mode)
        if served in self.fleet:
            self.fleet.retire(served)
            self.fleet.settle()
        self.fleet.ask(process, "start")
        try:
            time.sleep(self.settle_s)
            return self._window(cell, [process], [])
        finally:
            if process in self.fleet:
                self.fleet.ask(process, "pause")


def met_ms(served: Iterable[tuple[int, float]], spans: Sequence[tuple[int, int]], scale: float = 1.0) -> list[float]:
    """The latencies of the requests that were due or waited within one of the spans.

    Args:
        served: When each was due, ns, and its latency, ms of the device.
        spans: From when until when, ns.
        scale: Wall-clock seconds a second of the device.
    """
    return [
        ms
        for due_ns, ms in served
        if any(due_ns < until_ns and due_ns + ms * scale * 1e6 > from_ns for from_ns, until_ns in spans)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's text."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["merge"]:
        return merge(arguments[1:], "graphs", TABLES)
    if arguments[:1] == ["explain"]:
        cells = CellFile(Path(arguments[1]))
        print(explain_table(results(cells), cells))
        return 0
    options = parse(arguments)

    def measure(backend: Backend, cells: CellFile) -> int:
        with GraphFleet(backend) as fleet:
            runner = GraphRunner(fleet, cells, options, configured_lead_us(backend))
            runner.say(runner.estimate())
            return runner.run()

    return run_cells("graphs", options, measure, lambda cells: finish(cells, options.out, TABLES))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, with lists split and checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the results, NAME.json")
    parser.add_argument("--only", default=",".join(LOADS), help=f"loads by commas, of {', '.join(LOADS)}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"by commas, of {', '.join(ARMS)}")
    parser.add_argument("--seconds", type=float, default=None, help="of each cell, at least (10; 2 in a rehearsal)")
    parser.add_argument("--limit-s", type=float, default=None, help="stop before so much time has passed")
    parser.add_argument("--keep-servers", action="store_true", help="start servers once, not for each cell")
    parser.add_argument("--rehearse", "--simulate", dest="simulate", action="store_true", help="no GPU, no results")
    parser.add_argument("--simulated-driver", type=Path, help="its libcuda.so.1, if not the installed one")
    parser.add_argument("--commit", help="commit that is measured, where there is no clone to ask")
    parser.add_argument("--dry", action="store_true", help="say how long it would take, and do nothing")
    options = parser.parse_args(arguments)
    split_choices(parser, options, only=LOADS, arms=ARMS)
    if options.limit_s is not None:
        options.only.sort(key=lambda name: LOADS[name].compiles)
    options.programs, options.servers = options.only, [SERVER]
    if options.seconds is None:
        options.seconds = 2.0 if options.simulate else 10.0
    if options.seconds <= 0:
        parser.error("--seconds: above 0")
    if options.simulate:  # whose driver has no MPS
        options.arms = [arm for arm in options.arms if ALL_ARMS[arm].mode != "mps"]
    return options


if __name__ == "__main__":
    sys.exit(main())
