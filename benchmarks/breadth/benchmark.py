"""Other people's models as best-effort programs beside servers, in every arm.

Each program runs as its user would run it, and is started first; then the server comes and is measured. A program has
three processes: one bare, one under `cudasched run`, one under `cudasched run --mps`. The scene `servers` has four of
the programs beside each of the other servers.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.breadth.programs import PROGRAMS as ALL_PROGRAMS
from benchmarks.breadth.summary import breadth_figures, breadth_table
from benchmarks.colocation.cells import CellFile
from benchmarks.lab.fleet import Fleet
from benchmarks.lab.programs import Runner, Scene, results, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import report

#: Requests a second of each server. An eager BERT takes several ms of its own host's time.
SERVERS = {"bert_graph": 60.0, "vit_graph": 60.0, "bert_eager": 30.0, "recommender": 60.0}
PROGRAMS = {name: program for name, program in ALL_PROGRAMS.items() if not program.only_in_core}
FEW = ("torchvision_resnet50", "transformers_llama", "torch_recommender", "jax_transformer")
ARMS = ("latency_alone", "best_effort_alone", "processes", "cudasched_two_processes", "cudasched_mps")
MODES = {
    **dict.fromkeys(ARMS[:3], "plain"),
    "cudasched_two_processes": "two_processes",
    "cudasched_mps": "mps",
}


class BreadthFleet(Fleet):
    """The processes."""

    programs = tuple(PROGRAMS)


class BreadthRunner(Runner):
    """Does the missing cells: servers come to programs that train."""

    known = PROGRAMS
    scenes = {  # noqa: RUF012
        "main": Scene(tuple(itertools.product(PROGRAMS, ["bert_graph"])), ARMS, MODES),
        "servers": Scene(tuple(itertools.product(FEW, [*SERVERS][1:])), ARMS, MODES),
    }
    fleet_type = BreadthFleet
    kernels = True
    fresh = True
    settle_s = 1.0
    read_every = 50

    def rate_hz(self, server: str) -> float:
        """Requests a second of a server."""
        return SERVERS[server]


def written(cells: CellFile, out: Path) -> None:
    """Writes the results of cells, and prints them."""
    report(cells, out, results(cells), (breadth_table, breadth_figures))


BENCHMARK = Benchmark(
    about="programs of torchvision, transformers, CuPy and JAX beside servers",
    groups=dict.fromkeys(PROGRAMS, BreadthRunner.measure),
    whole=BreadthRunner.measure,
    written=written,
    settings=settings("main,servers", (8.0, 2.0)),
)
