"""benchmarks/graphs: its programs, requests that meet the building of slices, costs of slices, and predictors."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from cudasched import predictor
from cudasched.demo.harness import Backend
from test_cells import META, keep

from benchmarks import tables
from benchmarks.breadth.program import Builds
from benchmarks.colocation.cells import Cell, CellFile
from benchmarks.graphs import figures
from benchmarks.graphs.ablation import CONSTANT_NS, PREDICTED, PREDICTORS, AblationFleet, constant_model, rows_of
from benchmarks.graphs.building import met_ms
from benchmarks.graphs.loads import LOADS
from benchmarks.graphs.simulated_loads import SHAPES
from benchmarks.lab.fleet import Place
from benchmarks.lab.run import TIME_RAN_OUT, run
from benchmarks.lab.session import judged
from benchmarks.results.schema import ColocationRow, load


def test_programs_are_those_of_the_results_form_and_stand_for_themselves_in_a_rehearsal() -> None:
    pattern = ColocationRow.model_fields["best_effort_load"].metadata[0].pattern
    for name, program in LOADS.items():
        own = name.removesuffix("_updated")
        assert re.fullmatch(pattern, name) and own in SHAPES
        made_by = program.steps.func if isinstance(program.steps, partial) else program.steps
        assert made_by is LOADS[own].steps and made_by.__doc__ and made_by.__name__ in (own, f"{own}_training")
    assert sum(name.endswith("_updated") for name in LOADS) == 4


def test_a_request_meets_a_build_when_it_waits_within_it() -> None:
    served = [(0, 1.0), (2_500_000, 1.0), (4_000_000, 2.0), (9_000_000, 1.0)]
    assert met_ms(served, [(3_000_000, 5_000_000)]) == [1.0, 2.0]
    assert met_ms(served, [(3_000_000, 5_000_000)], scale=4.0) == [1.0, 1.0, 2.0]
    assert met_ms(served, []) == []


def test_builds_are_noted_while_a_program_begins_anew() -> None:
    told = {"graph_builds": 3, "graph_build_ns": 70}
    builds = Builds(lambda: dict(told))

    def begin() -> None:
        assert not builds.done
        told.update(graph_builds=4, graph_build_ns=1_000_070)

    builds.around(begin)
    (span,) = builds.spans
    assert builds.done and span[1] - span[0] == 1_000_000
    builds.around(lambda: None)
    assert builds.spans == []


def turn(slow: float, **always: float) -> dict:
    """A round of turns on a machine that is so many times slower at that moment."""
    bare = {"instantiate_ns": 1000.0 * slow, "clone_ns": 90.0 * slow, "per_s": 50.0 / slow}
    auto = {"instantiate_ns": 2200.0 * slow, "clone_ns": 95.0 * slow, "per_s": 49.9 / slow}
    off = {"instantiate_ns": 2000.0 * slow, "clone_ns": 95.0 * slow, "launch_ns": 500.0}
    cut = {"instantiate_ns": 2160.0 * slow, "clone_ns": 95.0 * slow, "launch_ns": 522.0, "build_ns": 85e6} | always
    return {"bare": bare, "auto": auto, "off": off, "always": cut}


STARTED = {mode: {"bytes": 100.0} for mode in figures.MODES} | {"always": {"bytes": 220.0, "graphs_sliced": 8}}
DONE = {
    "start/0": STARTED,
    "turn/0": turn(1.0),
    "turn/1": turn(3.0, launch_ns=520.0),
    "turn/2": turn(0.7, launch_ns=524.0),
    "turn/3": turn(1.0, instantiate_ns=9000.0),  # something else ran for a moment
    "turn/4": turn(1.1),
}


def test_figures_are_of_pairs_of_turns_whatever_the_machine_does_between_them() -> None:
    made = {row.figure: row for row in judged(figures.GOALS, figures.find(DONE), {"launch_ns_added": "a lock"})}
    assert list(made) == list(figures.GOALS)
    assert made["build_ms_2000_nodes"].value == pytest.approx(85) and made["build_ms_2000_nodes"].n == 5
    clone = made["clone_of_instantiate"]
    assert clone.met and (clone.low, clone.value, clone.high) == pytest.approx((0.08, 0.08, 0.08))
    assert made["driver_clone_of_instantiate"].value == pytest.approx(0.09)
    added = made["launch_ns_added"]
    assert (added.low, added.value, added.high) == pytest.approx((22, 22, 22)) and added.limited_by == "a lock"
    assert made["memory_ratio"].value == pytest.approx(1.2) and made["memory_ratio"].n == 1
    assert made["idle_speed"].value == pytest.approx(0.998) and made["idle_speed"].better == "more"
    assert clone.limited_by == made["idle_speed"].limited_by == ""
    wide = figures.find({f"turn/{i}": turn(1.0, launch_ns=500.0 + i) for i in range(101)})
    assert wide["launch_ns_added"][1:3] == (25.0, 75.0)


def test_figures_without_slices_are_not_told() -> None:
    without = {"start/0": STARTED | {"always": {"bytes": 220.0}}, "turn/0": turn(1.0, build_ns=0.0)}
    assert set(figures.find(without)) == set(figures.GOALS) - {"build_ms_2000_nodes", "memory_ratio"}
    assert figures.find({}) == {}


def test_figures_are_rehearsed_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "graph_slicing.json"
    command = ["--rehearse", "--out", str(out)]
    assert run("graph_slicing", [*command, "--repeats", "1", "--minutes", "0"]) == TIME_RAN_OUT
    assert run("graph_slicing", [*command, "--repeats", "1"]) == 0
    rows = load(out).figures
    assert (
        {"clone_of_instantiate", "launch_ns_added", "idle_speed"} <= {row.figure for row in rows} <= set(figures.GOALS)
    )
    kept = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert run("graph_slicing", [*command, "--repeats", "2"]) == 0
    done = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert set(done) == {"start/0", "turn/0", "start/1", "turn/1"} and done["turn/0"] == kept["turn/0"]


def test_the_constant_model_says_the_same_of_every_launch(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    (tmp_path / "constant.json").write_text(constant_model())
    model = predictor.load(tmp_path / "constant.json")
    rows = np.random.default_rng(0).normal(size=(8, len(model.feature_names))).astype(np.float32)
    assert model.predict(rows) == pytest.approx([CONSTANT_NS] * 8, rel=1e-5)


def test_predictors_differ_in_a_setting_and_an_oracle_keeps_its_state_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDASCHED_MODEL", raising=False)
    with AblationFleet(Backend()) as fleet:
        given = {name: fleet._environment(Place("program", "decode", f"one_process_{name}")) for name in PREDICTORS}
        other = fleet._environment(Place("program", "piecewise", "one_process_oracle"))
    assert "CUDASCHED_MODEL" not in given["trees"] and given["history"]["CUDASCHED_MODEL"] == "off"
    assert given["constant"]["CUDASCHED_MODEL"].endswith("constant.json")
    kept = [each["CUDASCHED_CACHE_DIR"] for each in given.values()]
    assert kept[:3] == ["off"] * 3 and kept[3] not in ("off", other["CUDASCHED_CACHE_DIR"])


def test_the_table_has_a_column_a_predictor_and_the_spread_of_repeats(tmp_path: Path) -> None:
    cells = CellFile(tmp_path / "ablation.cells", META)
    for repeat, ms in ((0, 1.2), (1, 1.4)):
        for arm, took, per_s in (
            ("latency_alone", 1.0, None),
            ("processes", 3.0, 10.0),
            ("cudasched_mps_trees", ms, 9.9),
            ("cudasched_mps_history", 1.5, 9.5),
        ):
            lead = "auto" if arm in PREDICTED else 0.0
            cell = Cell(arm, "bert_graph", "torch_varying", "poisson", "60", 17.0, lead, repeat, scene="first")
            keep(cells, cell, took, per_s, requests=1000)
    made = rows_of(cells)
    assert {row.predictor for row in made.colocations if row.arm in PREDICTED} == {"trees", "history"}
    table = tables.table_of(made)
    assert (
        "| first | torch_varying | mps | 1.30 (1.20 to 1.40) / 1.30 (1.20 to 1.40) / 99.0% (99.0% to 99.0%) | " in table
    )
    assert "| 1.50 (1.50 to 1.50) / " in table and "| trees | history |" in table


def test_a_rehearsal_measures_each_predictor_and_the_oracles_program_leaves_its_state(
    tmp_path: Path, simulated_driver: Path
) -> None:
    out = tmp_path / "ablation.json"
    arms = "latency_alone,processes,cudasched_one_process_constant,cudasched_one_process_oracle"
    given = ["--rehearse", "--out", str(out), "--only", "decode", "--scene", "first", "--arms", arms]
    assert 0 in (run("ablation", given) for _ in range(3))
    rows = {row.arm: row for row in load(out).colocations}
    assert [rows[arm].predictor for arm in arms.split(",")[1:]] == [None, "constant", "oracle"]
    assert all(row.p50 and row.requests and row.scene == "first" for row in rows.values())
