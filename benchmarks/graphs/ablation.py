"""The predictor's part: the same programs beside a server with trees, history alone, a constant, and an oracle.

Scenes: in `first`, each cell has a program that has just started; in `steady`, one that has run for a while. Programs
are graphs, graphs between kernels, and training whose shapes never repeat.

    trees     the model that ships, and history
    history   no model: a launch that was not seen is guessed by occupancy and waves
    constant  a model that says 20 us of every launch, and history
    oracle    the state of an earlier run of the same program: every launch is known from the first one on
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cudasched.demo.harness import ARMS as ALL_ARMS
from cudasched.demo.harness import Arm, HarnessError

from benchmarks.colocation.cells import Cell, CellFile
from benchmarks.colocation.rows import results
from benchmarks.graphs.loads import ABLATED
from benchmarks.graphs.summary import PREDICTORS, ablation_table
from benchmarks.lab.fleet import Fleet, Mode, Place
from benchmarks.lab.programs import Runner, Scene, settings
from benchmarks.lab.run import Benchmark
from benchmarks.lab.session import report
from benchmarks.predictor.benchmark import SHIPPED
from benchmarks.preempt.benchmark import ALONE, PreemptFleet
from benchmarks.results.schema import Results

#: Without time slices: they need no predictions.
CUT = {"CUDASCHED_GRAPH_SLICES": "auto", "CUDASCHED_TIME_SLICE_US": "off"}
SERVER, RATE_HZ = "bert_graph", 120.0
#: What the constant model says of each launch.
CONSTANT_NS = 20_000.0
#: The earlier run of the oracle's program; a program has so long to end, and writes its state.
RECORDED_S, END_S = 10.0, 20.0
#: Seconds before a cell of the scene `steady`.
STEADY_S = 6.0
MODES = ("mps", "one_process")
#: By arm: where it runs, and what predicts.
PREDICTED = {f"cudasched_{mode}_{name}": (mode, name) for mode in MODES for name in PREDICTORS}
SCENE = Scene(
    tuple(itertools.product(ABLATED, [SERVER])),
    (*ALONE, *PREDICTED),
    {**dict.fromkeys(ALONE, "plain"), **{arm: f"{mode}_{name}" for arm, (mode, name) in PREDICTED.items()}},
    together=(len(ALONE) + len(PREDICTORS), len(PREDICTORS)),
)


def state_of(fleet: Fleet, place: Place) -> Path:
    """Where the state of an oracle's program is kept."""
    return fleet.scratch / f"{place.name}_{place.mode}"


class AblationFleet(PreemptFleet):
    """The processes: each predictor has its own."""

    modes: Mapping[str, Mode] = {
        "plain": Mode(managed=False),
        **{f"mps_{name}": Mode(mps=True, environment=CUT) for name in PREDICTORS},
        **{f"one_process_{name}": Mode(inside=SERVER, environment=CUT) for name in PREDICTORS},
    }
    options = ("--warm-up", "1")
    programs = tuple(ABLATED)

    def _environment(self, place: Place) -> dict[str, str]:
        environment = super()._environment(place)
        predictor = place.mode.rpartition("_")[2]
        if predictor == "history":
            environment["CUDASCHED_MODEL"] = "off"
        elif predictor == "constant":
            path = self.scratch / "constant.json"
            path.write_text(constant_model())
            environment["CUDASCHED_MODEL"] = str(path)
        elif predictor == "oracle":
            environment["CUDASCHED_CACHE_DIR"] = str(state_of(self, place))
        return environment


class AblationRunner(Runner):
    """Does the missing cells; a program of the scene `first` is a new one in each."""

    known = ABLATED
    scenes = {"first": SCENE, "steady": SCENE}  # noqa: RUF012
    arms = ALL_ARMS | {arm: Arm(arm, mode, managed=True) for arm, (mode, _) in PREDICTED.items()}
    fleet_type = AblationFleet

    def rate_hz(self, server: str) -> float:
        """Requests a second."""
        return RATE_HZ

    def build_s(self, program: str) -> float:
        """None of these compiles; the oracle's are built twice, and run meanwhile."""
        return 2 * super().build_s(program) + RECORDED_S

    def _build(self, processes: Sequence[Place], first_ahead: bool) -> dict[Place, HarnessError]:
        """The oracle's programs run before all are built at once, so that all are as old in their cells."""
        for process in processes:
            if process.role == "program" and process.mode.endswith("_oracle"):
                self._record(process, RECORDED_S if not self.session.rehearsal else 1.0)
        return super()._build(processes, first_ahead)

    def _cell(self, cell: Cell, processes: Sequence[Place]) -> dict[str, Any]:
        """One cell of programs that are built and paused."""
        self.settle_s = STEADY_S if self.name == "steady" and not self.session.rehearsal else 0.0
        try:
            return super()._cell(cell, processes)
        finally:
            if cell.arm in PREDICTED:
                self.fleet.retire(processes[0])

    def _record(self, process: Place, seconds: float) -> None:
        """Runs a program, and lets it write its predictor's state."""
        if any(state_of(self.fleet, process).glob("*.state")):
            return
        self.fleet.build(process)()
        self.fleet.ask(process, "start")
        time.sleep(seconds)
        self.fleet.ask(process, "pause")
        self.fleet[process].tell("leave")
        until = time.monotonic() + END_S
        while self.fleet[process].alive:
            if time.monotonic() > until:
                raise HarnessError(f"{process.name} has not ended within {END_S:.0f} s, and has no state")
            time.sleep(0.05)
        if not any(state_of(self.fleet, process).glob("*.state")):
            raise HarnessError(f"{process.name} has left no predictor's state")
        self.fleet.retire(process, grace_s=0.0)


def constant_model() -> str:
    """A model of one leaf, as XGBoost would save it."""
    from cudasched import predictor

    names = list(predictor.load(SHIPPED).feature_names)
    count = str(len(names))
    one: dict[str, Any] = {name: [] for name in ("categories", "categories_nodes", "categories_segments")}
    one |= {"categories_sizes": [], "id": 0, "parents": [2147483647], "left_children": [-1], "right_children": [-1]}
    one |= {name: [0] for name in ("default_left", "split_indices", "split_type")}
    one |= {name: [0.0] for name in ("base_weights", "loss_changes", "split_conditions", "sum_hessian")}
    one["tree_param"] = {"num_deleted": "0", "num_feature": count, "num_nodes": "1", "size_leaf_vector": "1"}
    trees = {
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": "1"},
        "iteration_indptr": [0, 1],
        "tree_info": [0],
        "trees": [one],
    }
    model = {
        "attributes": {},
        "feature_names": names,
        "feature_types": [],
        "gradient_booster": {"model": trees, "name": "gbtree"},
        "learner_model_param": {
            "base_score": f"[{math.log(CONSTANT_NS):.6E}]",
            "boost_from_average": "0",
            "num_class": "0",
            "num_feature": count,
            "num_target": "1",
        },
        "objective": {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}},
    }
    return json.dumps({"learner": model, "version": [3, 2, 0]})


def rows_of(cells: CellFile) -> Results:
    """Rows that name their predictor."""
    made = results(cells, AblationRunner.arms)
    named = {arm: name for arm, (_, name) in PREDICTED.items()}
    rows = [row.model_copy(update={"predictor": named.get(row.arm)}) for row in made.colocations]
    return made.model_copy(update={"rows": rows})


def written(cells: CellFile, out: Path) -> None:
    """Writes the results of cells, and prints them."""
    report(cells, out, rows_of(cells), (ablation_table,))


BENCHMARK = Benchmark(
    about="trees, history alone, a constant and an oracle, beside graphs and shapes that never repeat",
    groups=dict.fromkeys(ABLATED, AblationRunner.measure),
    whole=AblationRunner.measure,
    written=written,
    settings=settings("first,steady", (1060 / RATE_HZ, 2.0)),
)
