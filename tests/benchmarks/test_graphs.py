"""benchmarks/graphs: its programs, requests that meet the building of slices, and what slices cost."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from benchmarks.breadth.program import Builds
from benchmarks.graphs import figures
from benchmarks.graphs.building import met_ms
from benchmarks.graphs.loads import LOADS
from benchmarks.graphs.simulated_loads import SHAPES
from benchmarks.lab.run import TIME_RAN_OUT, run
from benchmarks.lab.session import judged
from benchmarks.results.schema import ColocationRow, load

PROMISED = {
    "build_ms_2000_nodes",
    "clone_of_instantiate",
    "driver_clone_of_instantiate",
    "launch_ns_added",
    "memory_ratio",
    "idle_speed",
}


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


# ---- figures


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
    assert set(made) == PROMISED == set(figures.GOALS)
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
    assert set(figures.find(without)) == PROMISED - {"build_ms_2000_nodes", "memory_ratio"}
    assert figures.find({}) == {}


def test_modes_that_are_compared_follow_one_another() -> None:
    for one, other in (("bare", "auto"), ("off", "always")):
        assert abs(figures.MODES.index(one) - figures.MODES.index(other)) == 1


def test_figures_are_rehearsed_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "graph_slicing.json"
    command = ["--rehearse", "--out", str(out)]
    assert run("graph_slicing", [*command, "--repeats", "1", "--minutes", "0"]) == TIME_RAN_OUT
    assert run("graph_slicing", [*command, "--repeats", "1"]) == 0
    rows = load(out).figures
    assert {"clone_of_instantiate", "launch_ns_added", "idle_speed"} <= {row.figure for row in rows} <= PROMISED
    kept = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert run("graph_slicing", [*command, "--repeats", "2"]) == 0
    done = json.loads(out.with_suffix(".cells").read_text())["done"]
    assert set(done) == {"start/0", "turn/0", "start/1", "turn/1"} and done["turn/0"] == kept["turn/0"]
