"""benchmarks/preempt: a rehearsal, its parts, and figures that can be met and missed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from cudasched.demo.arrivals import schedule
from cudasched.demo.harness import Backend, HarnessError
from test_cells import META, keep

from benchmarks import plots, tables
from benchmarks.colocation.cells import Cell, CellFile, Outcome, cells_path
from benchmarks.lab.fleet import Place
from benchmarks.lab.run import TIME_RAN_OUT, load_benchmark, main, parse, run
from benchmarks.lab.session import Session
from benchmarks.preempt.benchmark import ABLATION, MPS, SCENES, SERVERS, PreemptFleet, PreemptRunner, outside
from benchmarks.preempt.programs import LONG_KERNELS, PROGRAMS, RUNNABLE
from benchmarks.preempt.summary import PROMISED, SHOWN, arms_of, figures, preempt_table, results
from benchmarks.results.schema import RESULTS, ColocationRow, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATE = "2026-11-27T00:00:00+00:00"
TRIES = 5
#: Requests begin so long before those that count (cudasched/demo/client.py).
LEAD_IN_S = 0.5
ON_THE_CPU = [name for name in PROGRAMS if name.startswith(("torch", "whole")) and name != "torch_conditional_graph"]


def runner_of(tmp_path: Path, *given: str, name: str = "preempt") -> PreemptRunner:
    options = parse(name, load_benchmark(name), ["--out", str(tmp_path / f"{name}.json"), *given])
    return PreemptRunner(Session(name, options, META), PreemptFleet(Backend()))


def add(cells: CellFile, scene: str, arm: str, pair: tuple[str, str], ms: float, per_s: float, repeat: int = 0) -> None:
    program, server = pair
    names = [] if arm == "best_effort_alone" else server.split("+")
    rates = "+".join("150" for _ in names)
    lead = "auto" if arms_of([arm])[arm].managed else 0.0
    cell = Cell(arm, "+".join(names), program, "poisson", rates, 7.0, lead, repeat, scene=scene)
    keep(cells, cell, ms if names else None, None if arm == "latency_alone" else per_s, requests=1000)


def filled(path: Path, slices_ms: float, kept: float) -> CellFile:
    """Cells of each scene: under cudasched a P99 of `slices_ms` for 2.0 alone, best effort `kept` of time slices'."""
    cells = CellFile(path, META)
    scenes = {
        "main": [("torch_attention", "bert_graph"), ("torch_lstm", "vit_graph")],
        "eager": [("torch_resnet50", "bert_eager")],
        "outside": [("torch_resnet50", "bert_graph")],
        "several": [("torch_resnet50+torch_long_kernels", "bert_graph"), ("torch_resnet50", "bert_graph+vit_graph")],
    }
    for scene, pairs in scenes.items():
        for pair in pairs:
            for program in pair[0].split("+"):
                add(cells, scene, "best_effort_alone", (program, pair[1]), 0.0, 10.0)
            add(cells, scene, "latency_alone", pair, 2.0, 0.0)
            add(cells, scene, "processes", pair, 6.0, 9.0)
            add(cells, scene, "before", pair, 4.0, 9.0)
            add(cells, scene, "slices_inside", pair, 2.2, 9.0)
            for arm in PROMISED:
                add(cells, scene, arm, pair, slices_ms, 9.0 * kept)
    return cells


def test_programs_and_arms_are_those_of_the_results_form() -> None:
    pattern = ColocationRow.model_fields["best_effort_load"].metadata[0].pattern
    assert len(PROGRAMS) == 12 and set(LONG_KERNELS) < set(PROGRAMS)
    for name, program in PROGRAMS.items():
        assert re.fullmatch(pattern, name) and program.steps.__name__ == name and program.steps.__doc__
    for scene in SCENES.values():
        assert {program for pair in scene.pairs for program in pair[0].split("+")} <= set(RUNNABLE)
        used = {scene.modes.get(arm, arm) for arm in scene.arms} | {scene.server_modes.get(arm) for arm in scene.arms}
        assert used - {None} <= set(PreemptFleet.modes)
    assert len(SCENES["main"].pairs) == 36
    assert set(SHOWN) - {"cudasched_two_processes"} <= {arm for scene in SCENES.values() for arm in scene.arms}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_a_program_of_small_shapes_runs_without_a_gpu(name: str) -> None:
    pytest.importorskip("torch")
    steps = PROGRAMS[name].steps(True)
    assert next(steps) is None
    assert float(next(steps)) == pytest.approx(float(next(steps)), abs=10.0)


def test_every_cell_of_the_first_repeats_has_a_thousand_requests(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    for server, repeat in ((server, repeat) for server in ("bert_graph", "decode_short") for repeat in range(5)):
        runner.repeat = repeat
        cell = runner.cell("processes", server, "torch_lstm")
        arrivals = schedule("poisson", float(cell.rates_hz), LEAD_IN_S + cell.seconds, 1 + repeat)
        assert sum(at >= LEAD_IN_S for at in arrivals) >= 1000


def test_parts_are_all_pairs_once_and_share_what_is_missing(tmp_path: Path) -> None:
    whole = SCENES["main"].pairs
    parts = [runner_of(tmp_path, "--part", f"{part}/4").parts["main", 0] for part in range(1, 5)]
    assert [pair for part in parts for pair in part] == list(whole) and {len(part) for part in parts} == {9}
    cells = CellFile(tmp_path / "preempt.cells", META)
    runner = runner_of(tmp_path)
    for pair in whole[:12]:
        runner.turns = [arm for turns in runner.turns_of("main") for arm in turns]
        for cell in runner.missing(pair[1], pair[0]):
            cells.add(Outcome(cell, {"latency": {}, "best_effort_per_s": {}}, None, DATE))
    cells.save()
    parts = [runner_of(tmp_path, "--part", f"{part}/4").parts["main", 0] for part in range(1, 5)]
    assert [pair for part in parts for pair in part] == list(whole[12:]) and {len(part) for part in parts} == {6}


def test_a_pair_is_done_before_the_next_and_processes_of_arms_are_few(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "--scene", "eager,ablation")
    assert "cells are missing" in runner.estimate()
    for program, servers in runner.plan():
        assert len(runner._programs(program, servers)) <= 5
        for server in servers:
            assert len({cell.latency for cell in runner.missing(server, program)} - {""}) == 1
    runner = runner_of(tmp_path, "--programs", "torch_lstm")
    assert [*runner.plan()] == [("torch_lstm", ["bert_graph", "vit_graph", "recommender"])] * 2, "half of MPS's is last"


def test_arms_differ_in_who_is_under_cudasched_and_in_settings(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    fleet = runner.fleet
    with fleet:
        runner.name = "main"

        def both(arm: str) -> list[Place]:
            cell = runner.cell(arm, "bert_graph", "torch_lstm")
            return [*runner._processes(cell), *runner._servers(cell)]

        arms = (*SCENES["main"].arms, "before")
        managed = {arm: ["run" in fleet._command(place) for place in both(arm)] for arm in arms}
        assert managed["slices"] == [True, False] and managed["cudasched"] == managed["before"] == [True, True]
        assert managed["processes"] == managed["mps_priority"] == [False, False]
        assert (managed["latency_alone"], managed["best_effort_alone"]) == ([False], [False])
        before = [fleet._environment(place) for place in both("before")]
        assert all(environment["CUDASCHED_TIME_SLICE_US"] == "off" for environment in before)
        assert before[0]["CUDASCHED_RUN_DIR"] == before[1]["CUDASCHED_RUN_DIR"]
        tables_of = {fleet._environment(both(arm)[0])["CUDASCHED_RUN_DIR"] for arm in ("slices", "cudasched")}
        assert len(tables_of) == 2, "an idle server of another arm is no client of this one"
        runner.name = "ablation"
        assert {place.mode for arm in ABLATION for place in both(arm)} == set(ABLATION)
        assert fleet._environment(both("slices_strict_200")[0])["CUDASCHED_TIME_SLICE_US"] == "200"
        runner.name = "outside"
        assert [both(arm)[-1].mode for arm in ("processes", "slices", "slices_inside")] == [
            "outside",
            "outside",
            "plain",
        ]


def test_servers_are_in_regions_or_in_their_programs_process_where_an_arm_says_so(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "--scene", "kinds")
    with runner.fleet as fleet:

        def both(arm: str, server: str = "bert_graph") -> list[Place]:
            cell = runner.cell(arm, server, "torch_resnet50")
            return [*runner._processes(cell), *runner._servers(cell)]

        program, server = both("cudasched_one_process_hint")
        assert program == server and fleet._command(program)[-4:-2] == ["--beside", "bert_graph"]
        program, server = both("cudasched_mps_hint")
        assert "--regions" in fleet._command(server) and "--regions" not in fleet._command(program)
        assert "--mps" in fleet._command(server) and "--mps" in fleet._command(program)
        assert [place.role for place in both("latency_alone_hint")] == ["server"], "a hint alone has no program"
        runner.name = "slack"
        slacked = runner.cell("cudasched_mps_slack", "gpt_decode", "torch_resnet50")
        assert slacked.slo_ms > 0 and slacked.arrivals == "periodic"
        assert fleet._environment(both("cudasched_two_processes_slack", "gpt_decode")[1])["CUDASCHED_POLICY"] == "slack"


def test_alone_under_cudasched_is_measured_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, done = runner_of(tmp_path, "--scene", "graphs"), list[tuple[str, str]]()
    monkeypatch.setattr(runner.fleet, "retire_servers", lambda mode: done.append(("retire", mode)))
    monkeypatch.setattr(runner.fleet, "ask", lambda place, command: done.append((command, place.mode)))
    monkeypatch.setattr(runner, "_counted", lambda cell, programs, servers: {"of": [*programs, *servers]})
    program = Place("program", "decode", "cudasched_mps")
    assert runner._cell(runner.cell("best_effort_alone_mps", "", "decode"), [program]) == {"of": [program]}
    assert done == [("retire", "cudasched_mps"), ("start", "cudasched_mps")]


def test_graphs_are_cut_in_a_rehearsal_and_requests_meet_that(tmp_path: Path, simulated_driver: Path) -> None:
    out = tmp_path / "preempt.json"
    arms = "latency_alone,processes,before,cudasched_one_process"
    given = ["--rehearse", "--out", str(out), "--seconds", "1", "--scene", "graphs", "--only", "whole_step_updated"]
    assert 0 in (run("preempt", [*given, "--arms", arms]) for _ in range(TRIES))
    rows = {row.arm: row for row in load(out).rows}
    assert set(rows) == set(arms.split(","))
    assert rows["cudasched_one_process"].mode == "one_process" and rows["cudasched_one_process"].best_effort_per_s
    done = {of.arm: known.result for of, known in CellFile(cells_path(out)).outcomes.items()}
    assert all(done[arm]["building"]["builds"] > 0 and done[arm]["early_p99_ms"] > 0 for arm in arms.split(",")[2:])
    assert done["before"]["counted"]["best_effort_launches"] > 0


def test_a_file_without_scenes_has_ratios(tmp_path: Path) -> None:
    table = tables.table_of(load(RESULTS / "graphs.json"), "every")
    assert "P50/P99 over alone" in table and "| decode | 0.61/1.04 | 3.28/5.60x |" in table
    assert "P99 is of 596 to 890 requests" in table and "| best effort, under MPS |" in table


def test_a_server_outside_has_another_user_and_root_or_says_why_not() -> None:
    try:
        way = outside()
    except HarnessError as error:
        assert "no server can be outside here: unshare: " in str(error)
        return
    command = [sys.executable, "-c", "import os; print(os.getuid(), *os.listdir('/tmp'))"]
    said = subprocess.run([*way, *command], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["65534", "repo"] if way[0] == "unshare" else said[0] == "65534"


def test_options_that_have_no_meaning_are_refused(tmp_path: Path) -> None:
    for wrong in (["--scene", "nothing"], ["--arms", "nothing"]):
        with pytest.raises(HarnessError, match=f"{wrong[0]}.*nothing"):
            runner_of(tmp_path, *wrong)
    assert runner_of(tmp_path, "--programs", "torch_lstm", "--servers", "vit_graph").parts == {
        ("main", 0): [("torch_lstm", "vit_graph")]
    }
    assert "mps_priority" not in runner_of(tmp_path, "--rehearse").turns
    assert runner_of(tmp_path, "--arms", "before,slices,slices_inside").turns == ["slices", "before"]
    assert "before" not in runner_of(tmp_path).turns


def test_figures_are_met_and_missed(tmp_path: Path) -> None:
    good = figures(results(filled(tmp_path / "good.cells", 2.1, 1.0)))
    bad = figures(results(filled(tmp_path / "bad.cells", 6.9, 0.9)))
    met = {row.figure: row for row in good.figures}
    missed = {row.figure: row for row in bad.figures}
    assert met.keys() == missed.keys() and {"excess_of_before", "outside_p99_ratio", "several_best_effort"} <= set(met)
    assert [name for name, row in met.items() if not row.met] == []
    assert [name for name, row in missed.items() if row.met] == []
    assert met["slices_p99_excess_ms_median"].value == pytest.approx(0.1) and met["slices_p99_excess_ms_worst"].n == 2
    assert met["excess_of_before"].value == pytest.approx(0.05) and met["excess_of_before"].n == 1, "LSTM's are short"
    assert missed["cudasched_eager_worse_in_both"].value == 1
    assert missed["several_best_effort"].value == pytest.approx(0.9) and missed["several_best_effort"].n == 6


def test_a_figure_is_met_only_with_all_of_its_interval(tmp_path: Path) -> None:
    cells = filled(tmp_path / "preempt.cells", 2.1, 1.0)
    once = {row.figure: row for row in figures(results(cells)).figures}
    assert once["slices_best_effort_worst"].interval is None, "one repeat, and no requests"
    assert once["slices_p99_ratio_worst"].interval == pytest.approx((1.05, 1.05)), "over requests"
    assert once["slices_p99_excess_ms_median"].interval == pytest.approx((0.1, 0.1))
    for pair, ms in ((("torch_attention", "bert_graph"), 2.2), (("torch_lstm", "vit_graph"), 2.7)):
        add(cells, "main", "latency_alone", pair, 2.0, 0.0, repeat=1)
        add(cells, "main", "slices", pair, ms, 9.0, repeat=1)
    twice = {row.figure: row for row in figures(results(cells)).figures}
    row = twice["slices_p99_ratio_median"]
    assert row.value == pytest.approx(1.075) and row.interval is not None and row.interval[1] > 1.1 and row.met
    excess = twice["slices_p99_excess_ms_median"]
    assert excess.value <= excess.goal < excess.interval[1] and not excess.met and excess.limited_by
    assert "; 95%: " in tables.core_table(figures(results(cells)))


def test_main_is_a_scene_of_preempt_and_a_pair_or_a_repeat_may_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = partial(runner_of, tmp_path, name="main")
    whole = chosen()
    assert whole.parts["main", 0] == list(SCENES["main"].pairs)
    seconds = float(re.findall(r"about (\d+) s", whole.estimate())[0])
    assert seconds <= 60 * 60, "GPU minutes of a repeat"
    asked = ["--only", "torch_lstm/vit_graph,torch_resnet50", "--repeat", "2", "--repeats", "3"]
    pairs = [("torch_lstm", "vit_graph"), *(("torch_resnet50", server) for server in SERVERS)]
    assert chosen(*asked).parts == {("main", 2): pairs}
    assert [*chosen(*asked, "--part", "2/2").parts.values()] == [pairs[2:]]
    names = MPS["mps_priority"] | MPS["mps_half"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with PreemptFleet(Backend()) as fleet:
        joined = SimpleNamespace(environment={"CUDA_MPS_PIPE_DIRECTORY": "p"}, leave=lambda: None)
        fleet._mps = {"bare": joined}  # type: ignore[dict-item]
        given = {arm: fleet._environment(Place("program", "torch_lstm", f"{arm}_bare")) for arm in MPS}
        server = fleet._environment(Place("server", "bert_graph", "mps_half_bare"))
    told = {arm: {name: each.get(name) for name in names} for arm, each in given.items()}
    assert list(told["mps"].values()) == [None, None] and list(told["mps_priority"].values()) == ["1", None]
    assert list(told["mps_half"].values()) == [None, "50"] and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in server


def test_a_missed_figure_says_what_limits_it_and_checksums_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.preempt.summary.LIMITED_BY", {"bits_failed": "a reason"})
    made = results(filled(tmp_path / "good.cells", 2.1, 1.0))
    done = {"changed": {}, "checked": {"fp8": 2, "lstm": 3}, "failures": [], "seconds": 60.0}
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    files[0].write_text(json.dumps({**done, "checked": {"attention": 1}, "failures": ["one hung"]}))
    for changed in ({}, {"lstm": 2, "fp8": 1}):
        files[1].write_text(json.dumps({**done, "changed": changed}))
        rows = {row.figure: row for row in figures(made, files).rows}
        row = rows["bits_failed"]
        assert (row.value, row.n, row.limited_by) == (len(changed), 3, "a reason" if changed else "")
        assert (rows["soak_failures"].value, rows["soak_gpu_minutes"].value) == (1, 2)


def test_merging_adds_what_a_soak_found(tmp_path: Path) -> None:
    filled(tmp_path / "first.cells", 2.1, 1.0).save()
    (tmp_path / "soak.json").write_text(
        json.dumps({"changed": {}, "checked": {"fp8": 2}, "failures": [], "seconds": 60})
    )
    out = tmp_path / "preempt.json"
    given = [str(tmp_path / "first.cells"), "--with", str(tmp_path / "soak.json")]
    assert main(["merge", "preempt", "--out", str(out), *given]) == 0
    assert "bits_failed" in {row.figure for row in load(tmp_path / "preempt_figures.json").figures}
    assert main(["merge", "preempt", "--out", str(out), given[0]]) == 0
    assert "bits_failed" not in {row.figure for row in load(tmp_path / "preempt_figures.json").figures}


def test_each_repeat_has_rows_of_its_own_and_several_programs_count_together(tmp_path: Path) -> None:
    cells = filled(tmp_path / "preempt.cells", 2.1, 1.0)
    add(cells, "main", "latency_alone", ("torch_lstm", "vit_graph"), 3.0, 0.0, repeat=1)
    add(cells, "main", "slices", ("torch_lstm", "vit_graph"), 3.3, 8.0, repeat=1)
    made = results(cells)
    own = [row for row in made.rows if (row.scene, row.best_effort_load) == ("main", "torch_lstm")]
    rows = {(row.arm, row.repeat): row for row in own}
    row = rows["slices", 1]
    assert row.alone_ms.p99 == 3.0 and row.p99_ratio == pytest.approx(1.1) and row.best_effort_per_s == 8.0
    assert row.latency_ms.max == 3.3 and rows["slices", 0].alone_ms.p99 == 2.0
    several = next(row for row in made.rows if row.arm == "slices" and "+" in row.best_effort_load)
    assert several.best_effort_per_s == pytest.approx(1.8), "either runs for nine tenths of the time that it has alone"
    made.write(tmp_path / "preempt.json")


def test_the_table_is_of_one_server_and_the_plot_has_a_mark_a_cell(tmp_path: Path, drawn: list[Figure]) -> None:
    made = results(filled(tmp_path / "preempt.cells", 2.1, 0.98))
    table = preempt_table(made)
    assert (
        "| torch_attention | 2.00/2.00 | 6.00/6.00 (3.00 to 3.00x) | 4.00/4.00 (2.00 to 2.00x) | 2.10/2.10 (1" in table
    )
    assert "98.0%" in table and "torch_lstm" not in table
    assert "fewer than" not in table
    assert "torch_lstm" in tables.table_of(made, "vit_graph")
    with pytest.raises(ValueError, match="no rows of the server nothing, only of bert_graph, vit_graph"):
        preempt_table(made, "nothing")
    assert plots.plot_scenes(made, tmp_path / "preempt.png", "main")
    lines = [line for line in drawn[0].axes[0].get_lines() if line.get_marker() in ("x", "s", "o", "D")]
    assert [len(line.get_xdata()) for line in lines] == [2, 2, 2, 2]


def test_a_rehearsal_measures_every_arm_and_a_rerun_does_what_is_missing(
    tmp_path: Path, simulated_driver: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "preempt.json"
    common = ["--rehearse", "--out", str(out), "--seconds", "1.5"]
    one = ["--programs", "cupy_persistent", "--servers", "bert_graph"]
    assert run("preempt", [*common, *one, "--minutes", "0.3"]) == TIME_RAN_OUT
    assert not cells_path(out).exists() or not CellFile(cells_path(out)).outcomes, "a pair is measured whole or not"
    # A busy machine starves a program until no two readings are in a cell; that cell is tried again.
    assert 0 in (run("preempt", [*common, *one]) for _ in range(TRIES))
    rows = {row.arm: row for row in load(out).rows}
    assert set(rows) == set(SCENES["main"].arms) - set(MPS)
    assert all(row.scene == "main" and row.repeat == 0 for row in rows.values())
    row = rows["cudasched"]
    assert row.p50 and row.p95 and row.max and row.requests and row.p50_ratio_interval
    assert (row.p99, row.p99_ratio, row.p99_ratio_interval) == (None, None, None), "few requests bear no P99"
    assert row.best_effort_of_time_slices and row.best_effort_gpu_ratio and rows["slices"].best_effort_per_s
    assert load(tmp_path / "preempt_figures.json").rows
    before = cells_path(out).read_text()
    assert run("preempt", [*common, *one]) == 0
    assert json.loads(cells_path(out).read_text())["cells"] == json.loads(before)["cells"]


def test_a_program_that_fails_costs_its_own_cells_alone(
    tmp_path: Path, simulated_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.lab.fleet.SIMULATED_PROGRAMS", ("nothing", "transformer"))
    out = tmp_path / "preempt.json"
    given = ["--rehearse", "--out", str(out), "--seconds", "1.5"]
    programs = ["--programs", ",".join(list(PROGRAMS)[:2]), "--servers", "vit_graph", "--arms", "latency_alone,slices"]
    assert run("preempt", [*given, *programs]) == 1
    outcomes = {(each.best_effort, each.arm): outcome for each, outcome in CellFile(cells_path(out)).outcomes.items()}
    first, second = list(PROGRAMS)[:2]
    assert "ended with status" in str(outcomes[first, "slices"].error)
    assert outcomes[second, "slices"].result and outcomes[first, "latency_alone"].result
