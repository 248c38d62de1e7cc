"""benchmarks/graphs: its programs and arms, a rehearsal, and what follows from its cells and parts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from cudasched.demo.harness import ARMS as ALL_ARMS
from cudasched.demo.harness import Backend
from test_cells import META, keep, served

from benchmarks import tables
from benchmarks.breadth.program import Builds
from benchmarks.colocation.cells import Cell, CellFile, Outcome
from benchmarks.graphs import figures
from benchmarks.graphs.benchmark import ARMS, MODES, SERVER, GraphFleet, GraphRunner, met_ms
from benchmarks.graphs.loads import LOADS
from benchmarks.graphs.simulated_loads import SHAPES
from benchmarks.graphs.summary import allowed_p99_ms, graphs_figures, graphs_table, is_graphs
from benchmarks.lab.fleet import Place
from benchmarks.lab.programs import results
from benchmarks.lab.run import TIME_RAN_OUT, load_benchmark, main, parse, run
from benchmarks.lab.session import OutOfTimeError, Session, judged
from benchmarks.results.schema import ColocationRow, load

DATE = "2026-11-23T00:00:00+00:00"
PROMISED = {
    "build_ms_2000_nodes",
    "clone_of_instantiate",
    "driver_clone_of_instantiate",
    "launch_ns_added",
    "memory_ratio",
    "idle_speed",
}


def cell(arm: str, program: str) -> Cell:
    server, rate_hz = ("", "") if "effort_alone" in arm else (SERVER, "60")
    return Cell(arm, server, program, "poisson", rate_hz, 10.0, 20.0 if "cuda" in arm else 0.0, 0)


def filled(
    path: Path, longest_us: float = 100.0, mps_alone_per_s: Mapping[str, float] = MappingProxyType({})
) -> CellFile:
    """Cells of two loads: what is alone, sliced and whole."""
    cells = CellFile(path, META)

    programs = ("whole_step", "jax_updated")
    for program in programs:
        keep(cells, cell("latency_alone", program), ms=1.0)
        keep(cells, cell("best_effort_alone", program), per_s=100.0)
        keep(cells, cell("processes", program), ms=5.0, per_s=93.0)
        keep(cells, cell("cudasched_two_processes_whole", program), ms=4.9, per_s=93.0)
        told = {"counted": {"sliced_launches": 10, "slice_launches": 0}, "counted_s": 10.0, "early_p99_ms": 1.9}
        keep(cells, cell("cudasched_two_processes", program), ms=1.3, per_s=93.0, **told)
        keep(cells, cell("cudasched_mps", program), ms=1.2, per_s=80.0)
        if program in mps_alone_per_s:
            keep(cells, cell("best_effort_alone_mps", program), per_s=mps_alone_per_s[program])
        kernels = {"kernel_us": [[longest_us, 10]], "per_item_us": 9000.0}
        cells.add(Outcome(Cell.kernels(program), kernels, None, DATE))
    return cells


def test_programs_are_those_of_the_results_form_and_stand_for_themselves_in_a_rehearsal() -> None:
    pattern = ColocationRow.model_fields["best_effort_load"].metadata[0].pattern
    for name, program in LOADS.items():
        assert re.fullmatch(pattern, name) and program.steps.__name__ == name and program.steps.__doc__
        assert name.removesuffix("_updated") in SHAPES
    assert sum(name.endswith("_updated") for name in LOADS) == 4


def test_every_arm_is_known_to_the_rows_and_the_whole_one_is_asked_for_by_name() -> None:
    assert set(ARMS) <= set(ALL_ARMS) and set(MODES) == set(ARMS)
    assert ALL_ARMS["cudasched_two_processes_whole"].is_optional and ALL_ARMS["best_effort_alone_mps"].is_optional


def test_modes_differ_in_their_settings_and_commands(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    with GraphFleet(Backend("simulated", tmp_path / "libcuda.so.1")) as fleet:
        whole, cut = (Place("program", "whole_step", mode) for mode in ("whole", "two_processes"))
        assert fleet._environment(whole)["CUDASCHED_GRAPH_SLICES"] == "off"
        assert fleet._environment(cut)["CUDASCHED_GRAPH_SLICES"] == "auto"
        assert fleet._environment(whole)["CUDASCHED_RUN_DIR"] != fleet._environment(cut)["CUDASCHED_RUN_DIR"]
        assert fleet._command(whole) == fleet._command(cut)
        alone = fleet._command(Place("program", "decode", MODES["best_effort_alone_mps"]))
        assert "--mps" in alone and alone[alone.index("--class") + 1] == "best-effort"
        together = fleet._command(Place("program", "decode", "one_process"))
        assert together[together.index("--beside") + 1] == SERVER and "best-effort" in together
        assert "run" not in fleet._command(Place("program", "decode", "plain"))


def test_a_rehearsal_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graphs.json"
    command = ["--rehearse", "--out", str(out), "--only", "decode_updated", "--seconds", "1", "--arms"]
    assert run("graphs", [*command, "best_effort_alone,cudasched_two_processes_whole"]) == 0
    first = CellFile(out.with_suffix(".cells")).outcomes
    assert run("graphs", [*command, "best_effort_alone,latency_alone,cudasched_one_process"]) == 0
    done = CellFile(out.with_suffix(".cells")).outcomes
    kept = [of for of in first if of.arm == "best_effort_alone"]
    assert kept and all(done[of].date == first[of].date for of in kept)
    rows = {row.arm: row for row in load(out).colocations}
    assert set(rows) == {
        "latency_alone",
        "best_effort_alone",
        "cudasched_two_processes_whole",
        "cudasched_one_process",
    }
    for arm in ("cudasched_two_processes_whole", "cudasched_one_process"):
        assert rows[arm].latency_ms and rows[arm].best_effort_per_s, arm
    assert all(row.best_effort_load == "decode_updated" for row in rows.values())
    told = next(known for of, known in done.items() if of.arm == "cudasched_one_process").result
    assert told and told["counted"]["best_effort_launches"] > 0 and told["early_p99_ms"] > 0
    assert "one process" in capsys.readouterr().out


def runner_of(tmp_path: Path, *given: str) -> GraphRunner:
    options = parse("graphs", load_benchmark("graphs"), ["--out", str(tmp_path / "graphs.json"), *given])
    return GraphRunner(Session("graphs", options, META), GraphFleet(Backend()))


def test_what_compiles_is_not_begun_where_there_is_no_time_for_it(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        runner_of(tmp_path, "--only", "jax", "--minutes", "2").run()


def test_the_updated_loads_of_the_rehearsal_change_their_graphs(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    only = "whole_step_updated,jax_updated,piecewise_updated"
    arms = "best_effort_alone,cudasched_two_processes"
    assert run("graphs", ["--rehearse", "--out", str(out), "--only", only, "--arms", arms, "--seconds", "0.5"]) == 0
    rows = [row for row in load(out).colocations if row.arm == "cudasched_two_processes"]
    assert len(rows) == 3 and all(row.best_effort_per_s for row in rows)
    managed = [of for of in CellFile(out.with_suffix(".cells")).outcomes.values() if of.cell.arm in arms.split(",")[1]]
    assert [of.result["building"]["builds"] > 0 for of in managed if of.result] == [True, True, False], "short graphs"


def test_tables_show_slices_beside_whole_graphs_and_what_was_promised(tmp_path: Path) -> None:
    cells = filled(tmp_path / "graphs.cells")
    made = results(cells)
    assert is_graphs(made)
    table = graphs_table(made)
    lines = [line.split(" | ")[0].strip("| ") for line in table.splitlines()[4:] if line.startswith("|")]
    assert lines == ["whole_step", "jax_updated"]
    assert "4.90/4.90x" in table and "1.30/1.30x · 99% (100%)" in table
    assert "P99 is of " in table.splitlines()[-1], "few requests are said"
    judged = graphs_figures(made)
    assert "1.30 (<= 1.40)" in judged and "met" in judged
    assert "**missed**" in judged, "under MPS too little best effort is left"
    page = tables.table_of(made)
    assert page.startswith(table) and META.gpu in page
    assert judged in tables.table_of(made, "figures")


def test_requests_that_meet_the_building_of_slices_have_a_p99_of_their_own(tmp_path: Path) -> None:
    cells = filled(tmp_path / "graphs.cells")
    told = cells.outcomes[cell("cudasched_two_processes", "whole_step")].result
    assert told is not None
    told["building"] = {"latency_ms": [1.5, 2.5], "builds": 1}
    table = {line.split(" | ")[0].strip("| "): line for line in graphs_table(results(cells)).splitlines()}
    assert "| two processes 2.49x (2) |" in table["whole_step"] and "| not measured |" in table["jax_updated"]


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


def test_a_load_beside_which_nothing_was_measured_has_no_line(tmp_path: Path) -> None:
    cells = filled(tmp_path / "graphs.cells")
    cells.add(Outcome(cell("latency_alone", "decode"), {"latency": {SERVER: served(1.0)}}, None, DATE))
    made = results(cells)
    assert any(row.best_effort_load == "decode" for row in made.colocations)
    assert "decode" not in graphs_table(made)


def test_best_effort_under_mps_is_compared_with_both_ways_to_be_alone(tmp_path: Path) -> None:
    made = results(filled(tmp_path / "graphs.cells", mps_alone_per_s={"whole_step": 86.0}))
    rows = {row.arm: row for row in made.colocations if row.best_effort_load == "whole_step"}
    mps = rows["cudasched_mps"]
    assert mps.best_effort_alone_per_s == 100.0 and mps.best_effort_alone_mps_per_s == 86.0
    assert mps.duty is not None
    assert mps.best_effort_ratio == pytest.approx(0.80 / (1 - mps.duty))
    assert mps.best_effort_mps_ratio == pytest.approx(80 / 86 / (1 - mps.duty))
    alone = rows["best_effort_alone_mps"]
    assert (alone.best_effort_ratio, alone.best_effort_mps_ratio) == pytest.approx((0.86, 1.0))
    assert rows["cudasched_two_processes"].best_effort_mps_ratio is None
    lines = {line.split(" | ")[0].strip("| "): line for line in graphs_table(made).splitlines()}
    assert "| 100.0/s, MPS 86.0/s |" in lines["whole_step"]
    assert "1.20x · 85% (86%) (99% of MPS alone)" in lines["whole_step"]
    assert "MPS" not in lines["jax_updated"]
    judged = next(line for line in graphs_figures(made).splitlines() if "whole_step" in line)
    assert "(>= 96%) **missed** (99.0% of MPS alone)" in judged and "85.1%, 86.0% of time slices" in judged


def test_best_effort_that_is_slower_than_in_time_slices_misses_its_goal(tmp_path: Path) -> None:
    made = results(filled(tmp_path / "graphs.cells"))
    judged = next(line for line in graphs_figures(made).splitlines() if "whole_step" in line)
    assert "1.30 (<= 1.40), 98.9%, 100.0% of time slices (>= 96%) met |" in judged
    rows = [
        row.model_copy(update={"best_effort_per_s": 112.0})
        if isinstance(row, ColocationRow) and row.arm == "processes"
        else row
        for row in made.rows
    ]
    slower = graphs_figures(made.model_copy(update={"rows": rows}))
    judged = next(line for line in slower.splitlines() if "whole_step" in line)
    assert "1.30 (<= 1.40), 98.9%, " in judged and "% of time slices (>= 96%) **missed** |" in judged


def test_alone_under_cudasched_is_measured_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, done = runner_of(tmp_path, "--only", "decode"), list[tuple[str, str]]()
    monkeypatch.setattr("benchmarks.lab.programs.time.sleep", lambda seconds: None)
    monkeypatch.setattr(runner.fleet, "retire_servers", lambda mode: done.append(("retire", mode)))
    monkeypatch.setattr(runner.fleet, "ask", lambda place, command: done.append((command, place.mode)))
    monkeypatch.setattr(runner, "_counted", lambda cell, programs, servers: {"of": [*programs, *servers]})
    alone = runner.cell("best_effort_alone_mps", "", "decode")
    program = Place("program", "decode", "mps")
    assert (alone.lead_us, alone.latency) == (runner.lead_us, "")
    assert runner._cell(alone, [program]) == {"of": [program]}
    assert done == [("retire", "mps"), ("start", "mps")]


def test_long_kernels_raise_what_is_allowed_to_their_bound(tmp_path: Path) -> None:
    made = results(filled(tmp_path / "graphs.cells", longest_us=3000.0))
    row = next(row for row in made.colocations if row.arm == "cudasched_two_processes")
    assert row.bound_p99_ms and row.bound_p99_ms > 1.4
    assert allowed_p99_ms(row, 1.4) == pytest.approx(1.05 * row.bound_p99_ms)


def test_cells_of_several_runs_are_put_together(tmp_path: Path) -> None:
    first, second = filled(tmp_path / "a.cells"), filled(tmp_path / "b.cells")
    second.outcomes = {
        dataclasses.replace(of, best_effort="decode") if of.arm != "latency_alone" else of: known
        for of, known in second.outcomes.items()
    }
    for of, known in second.outcomes.items():
        known.cell = of
        if known.result and known.result.get("best_effort_per_s"):
            known.result["best_effort_per_s"] = {"decode": 50.0}
    first.save()
    second.save()
    out = tmp_path / "graphs.json"
    assert main(["merge", "graphs", "--out", str(out), str(first.path), str(second.path)]) == 0
    loads = {row.best_effort_load for row in load(out).colocations}
    assert {"whole_step", "decode"} <= loads


# ---- figures


def turn(slow: float, **always: float) -> dict:
    """A round of turns on a machine that is so many times slower at that moment."""
    bare = {"instantiate_ns": 1000.0 * slow, "clone_ns": 90.0 * slow, "per_s": 50.0 / slow}
    auto = {"instantiate_ns": 2200.0 * slow, "clone_ns": 95.0 * slow, "per_s": 49.9 / slow}
    off = {"instantiate_ns": 2000.0 * slow, "clone_ns": 95.0 * slow, "launch_ns": 500.0}
    cut = {"instantiate_ns": 2160.0 * slow, "clone_ns": 95.0 * slow, "launch_ns": 522.0, "build_ns": 85e6} | always
    return {"bare": bare, "auto": auto, "unprioritised": off, "off": off, "always": cut}


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


def test_what_an_instantiation_takes_is_told_for_each_mode() -> None:
    said = figures.explained(DONE)
    assert "bare 0.001 ms (x1.00)" in said and "off 0.002 ms (x2.00)" in said and "always 0.002 ms (x2.16)" in said
    assert figures.explained({}) == ""


def test_figures_without_slices_are_not_told() -> None:
    without = {"start/0": STARTED | {"always": {"bytes": 220.0}}, "turn/0": turn(1.0, build_ns=0.0)}
    assert set(figures.find(without)) == PROMISED - {"build_ms_2000_nodes", "memory_ratio"}
    assert figures.find({}) == {}


def test_modes_that_are_compared_follow_one_another() -> None:
    for one, other in (("bare", "auto"), ("off", "always")):
        assert abs(figures.MODES.index(one) - figures.MODES.index(other)) == 1


def test_figures_are_rehearsed_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "unprioritised" in capsys.readouterr().out


def test_results_pages_have_a_place_for_what_is_not_measured_yet(tmp_path: Path) -> None:
    page = "<!-- table:graphs if measured -->\n<!-- end -->\n"
    assert tables.NOT_MEASURED in tables.rendered(page, tmp_path)
    results(filled(tmp_path / "graphs.cells")).write(tmp_path / "graphs.json")
    assert "whole_step" in tables.rendered(page, tmp_path)
