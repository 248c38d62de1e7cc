"""Latency-critical beside best-effort programs of the demo, in every arm.

Loads joined by + run at once. `scheduler` has the pairs of which figures are promised (benchmarks/figures.py), and
`colocation_predictor` the arms with history alone beside training on sequences of 32 to 512 tokens.
"""

from __future__ import annotations

from pathlib import Path

from cudasched.demo.harness import ARMS

from benchmarks.colocation.cells import CellFile
from benchmarks.colocation.rows import results
from benchmarks.lab.pairs import Calibration, Pair, Pairs, every, half_busy
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import report
from benchmarks.tables import colocation_table

ALONE = ("latency_alone", "best_effort_alone")
MANAGED = ("cudasched_two_processes", "cudasched_mps", "cudasched_one_process")
HINTED = tuple(f"{arm}_hint" for arm in MANAGED)
USUAL = (*ALONE, "processes", *MANAGED)
HISTORY = tuple(f"cudasched_{mode}{suffix}" for mode in ("two_processes", "one_process") for suffix in ("", "_history"))
LOADS = ("transformer", "resnet50", "gemm", "elementwise")
PAIRS = {
    load: Pair("bert_graph", load, every(arm.name for arm in ARMS.values() if not arm.is_optional)) for load in LOADS
}
SCHEDULER = {
    "resnet50": Pair(
        "bert_graph", "resnet50", every((*USUAL, "latency_alone_hint", *HINTED, "best_effort_alone_hooked"))
    ),
    "transformer": Pair("bert_graph", "transformer", every((*USUAL, "latency_alone_hint", *HINTED))),
    "four": Pair("bert_graph+mlp", "transformer+resnet50", every(USUAL), rates_hz="30+100", longer=1.5),
    "decode": Pair(
        "gpt_decode",
        "transformer",
        every((*ALONE, *(f"{arm}_slack" for arm in MANAGED))),
        rates_hz=Calibration(10.0, 3.0, half_busy),
        arrivals="periodic",
        longer=1.5,
    ),
    # A hint once, for the bound.
    **{load: Pair("bert_graph", load, every((*USUAL, *HINTED), **dict.fromkeys(HINTED, 1))) for load in LOADS[2:]},
    "periodic": Pair("bert_graph", "gemm", every((*ALONE, *MANAGED)), rates_hz="30", arrivals="periodic"),
    "offload": Pair("bert_graph", "bert_training", every(("best_effort_alone", "best_effort_alone_hooked"))),
}
PREDICTOR = {"bert_varying": Pair("bert_graph", "bert_varying", every((*ALONE, *HISTORY)))}


def written(cells: CellFile, out: Path) -> None:
    """Writes the results of cells, and prints them."""
    report(cells, out, results(cells), (colocation_table,))


def declared(about: str, pairs: dict[str, Pair], repeats: int, seconds: float) -> Benchmark:
    """A benchmark of such pairs."""
    settings = {"arms": "", "repeats": (repeats, 1), "seconds": (seconds, 2.0)}
    return Benchmark(about=about, groups=Pairs(ARMS).groups(pairs), written=written, settings=settings)


BENCHMARK = declared("latency-critical beside best-effort programs, in every arm", PAIRS, 3, 10.0)
SCHEDULED = declared("the pairs of which figures are promised", SCHEDULER, 5, 4.0)
UNSEEN = declared("training whose shapes keep changing, with trees and with history alone", PREDICTOR, 2, 5.0)
