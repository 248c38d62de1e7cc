"""Programs of CUDA graphs as best-effort work beside a server, cut into slices and whole; as breadth does it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import HEAD_START_S, HarnessError

from benchmarks.colocation.cells import KERNELS, Cell, CellFile
from benchmarks.graphs.loads import LOADS
from benchmarks.graphs.summary import graphs_figures, graphs_table
from benchmarks.lab.fleet import Fleet, Mode, Place
from benchmarks.lab.processes import ANSWER_S
from benchmarks.lab.programs import Runner, Scene, results, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import report

HERE = Path(__file__).parent
#: Without time slices, or two processes would need no cuts.
CUT = {"CUDASCHED_GRAPH_SLICES": "auto", "CUDASCHED_TIME_SLICE_US": "off"}
SERVER, RATE_HZ = "bert_graph", 60.0
#: Arms, and which of a program's processes each runs.
MODES = {
    "latency_alone": "plain",
    "best_effort_alone": "plain",
    "best_effort_alone_mps": "mps",
    "cudasched_two_processes": "two_processes",
    "cudasched_mps": "mps",
    "cudasched_one_process": "one_process",
    "cudasched_two_processes_whole": "whole",
    "processes": "plain",
}
ARMS = tuple(MODES)
#: Requests of a server's first seconds, in which graphs may still be cut, have a P99 of their own.
EARLY_S = 3.0
#: What each process of a program that compiles takes to be built, at most.
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
    programs = tuple(LOADS)

    def _command(self, place: Place) -> list[str]:
        command = super()._command(place)
        if place.mode.startswith("one_process"):
            command += ["--beside", SERVER, "--time-scale", f"{self.backend.scale:g}"]
        return command

    def _stand_in(self, program: str) -> str:
        return program


class GraphRunner(Runner):
    """Does the missing cells."""

    known = LOADS
    scenes = {  # noqa: RUF012
        "main": Scene(tuple(itertools.product(LOADS, [SERVER])), ARMS, MODES, together=(len(ARMS), 1))
    }
    fleet_type = GraphFleet
    kernels = True
    fresh = True
    settle_s = 1.0
    read_every = 50

    def rate_hz(self, server: str) -> float:
        """Requests a second of a server."""
        del server
        return RATE_HZ

    def build_s(self, program: str) -> float:
        """Those that compile are built one after another; what is begun too late would be lost."""
        rehearsed = self.session.rehearsal or not self.known[program].compiles
        return super().build_s(program) if rehearsed else COMPILES_S * len({*MODES.values()})

    def early_s(self, cell: Cell) -> float:
        """Graphs may still be cut beside a server that has just come; in a rehearsal no longer than other cells."""
        managed = self.arms[cell.arm].managed and self.arms[cell.arm].latency
        return min(EARLY_S, cell.seconds) if managed and self.session.rehearsal else EARLY_S * managed

    def _servers(self, cell: Cell) -> list[Place]:
        own = cell.arm != KERNELS and self._mode(cell.arm).startswith("one_process")
        return self._processes(cell) if own else super()._servers(cell)

    def _counted(self, cell: Cell, processes: Sequence[Place], servers: Sequence[Place]) -> dict[str, Any]:
        result = super()._counted(cell, processes, servers)
        if self.early_s(cell) and processes[0].mode != "whole":
            self.fleet.ask(processes[0], "pause")
            result["building"] = self._while_building(cell, processes[0], servers[0])
        return result

    def _beside(self, cell: Cell, seconds: float) -> Cell:
        """A cell of requests beside what is measured; in a rehearsal it is no longer than the others."""
        return dataclasses.replace(cell, seconds=min(seconds, cell.seconds) if self.session.rehearsal else seconds)

    def _while_building(self, cell: Cell, process: Place, server: Place) -> dict[str, Any]:
        """A program that is paused begins anew beside its server: the requests that met the building of its slices."""
        short = self._beside(cell, BEGINNING_S)
        met: list[float] = []
        builds = 0
        for _ in range(1 if self.known[process.name].compiles or self.session.rehearsal else BEGINNINGS):
            if self.session.left_s() < BEGINNING_S:
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


def written(cells: CellFile, out: Path) -> None:
    """Writes the results of cells, and prints them."""
    report(cells, out, results(cells), (graphs_table, graphs_figures))


BENCHMARK = Benchmark(
    about="programs of CUDA graphs beside a server, cut into slices and whole",
    groups=dict.fromkeys(LOADS, GraphRunner.measure),
    whole=GraphRunner.measure,
    written=written,
    settings=settings("main", (10.0, 2.0)),
)
