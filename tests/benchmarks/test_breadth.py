"""benchmarks/breadth: its harness over simulated loads, and what follows from its cells."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cudasched.demo.harness import Backend, HarnessError
from test_cells import META, keep

from benchmarks import plots
from benchmarks.breadth.benchmark import ARMS, FEW, SERVERS, BreadthFleet
from benchmarks.breadth.benchmark import PROGRAMS as MEASURED
from benchmarks.breadth.program import Loop, counted, launcher_threads_ns
from benchmarks.breadth.programs import PROGRAMS
from benchmarks.breadth.summary import (
    EXPLAINED,
    MANAGED,
    breadth_figures,
    breadth_table,
    limits_table,
    p99_over_allowed,
)
from benchmarks.colocation.cells import KERNELS, Cell, CellFile, Outcome, cells_path
from benchmarks.figures import best_effort_of_time_slices
from benchmarks.lab.fleet import Place
from benchmarks.lab.processes import per_second
from benchmarks.lab.programs import counted as counted_between
from benchmarks.lab.programs import results
from benchmarks.lab.run import TIME_RAN_OUT, main, run
from benchmarks.results.schema import RESULTS, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATE = "2026-11-22T00:00:00+00:00"
TRIES = 5
KINDS = ("torchvision", "transformers", "jax", "cupy")


def cell(arm: str, program: str, server: str = "bert_graph", repeat: int = 0) -> Cell:
    server, rate_hz = ("", "") if arm == "best_effort_alone" else (server, f"{SERVERS[server]:g}")
    return Cell(arm, server, program, "poisson", rate_hz, 8.0, 20.0 if "cuda" in arm else 0.0, repeat)


def filled(path: Path, programs: dict[str, tuple[float, float]], alone_ms: float = 0.5) -> CellFile:
    """Cells of programs, each with a P99 under cudasched in ms and the steps a second that are left to it then."""
    cells = CellFile(path, META)
    for program, (p99_ms, per_s) in programs.items():
        keep(cells, cell("latency_alone", program), alone_ms)
        keep(cells, cell("best_effort_alone", program), per_s=100.0)
        keep(cells, cell("processes", program), ms=3.0, per_s=90.0)
        for arm in ("cudasched_two_processes", "cudasched_mps"):
            keep(cells, cell(arm, program), ms=p99_ms, per_s=per_s)
        cells.add(Outcome(Cell.kernels(program), {"kernel_us": [[100.0, 10]], "per_item_us": 9000.0}, None, DATE))
    return cells


def test_there_are_programs_of_every_library_and_servers_of_every_kind() -> None:
    assert len(MEASURED) >= 14 and {name.split("_")[0] for name in MEASURED} >= set(KINDS)
    assert set(SERVERS) == {"bert_graph", "vit_graph", "bert_eager", "recommender"}
    for name, program in PROGRAMS.items():
        assert program.steps.__name__ == name and program.steps.__doc__


def test_a_program_imports_nothing_before_it_runs() -> None:
    """Its generator stops at the first yield, before which it only imports; without its library it says so."""
    for name, program in PROGRAMS.items():
        steps = program.steps(True)
        try:
            assert next(steps) is None
        except ImportError as error:
            assert error.name is not None and find_spec(error.name.split(".")[0]) is None, f"{name}: {error}"


def test_a_loop_reads_as_often_as_told_and_pauses_with_all_steps_done() -> None:
    submitted, read = [], []
    steps = iter(lambda: submitted.append(len(submitted) + 1) or submitted[-1], None)
    loop = Loop(steps, read.append, read_every=5)
    assert loop.warm_up() >= 0
    warm = len(submitted)
    running = threading.Thread(target=loop.run)
    running.start()
    while loop.count < 52:
        time.sleep(0.001)
    loop.pausing.set()
    running.join(60)
    assert not running.is_alive() and not loop.pausing.is_set()
    assert loop.count == len(submitted) - warm
    assert read[-1] == submitted[-1], "the last step was waited for"
    assert [count for _, count in loop.readings] == list(range(5, loop.count + 1, 5))
    assert [value - warm for value in read[2:-1]] == [count for _, count in loop.readings]
    (began, _), (ended, _) = loop.readings[1], loop.readings[-2]
    assert loop.readings_within(began, ended) == loop.readings[1:-1]
    assert loop.readings_within(ended + 1, ended) == []


def test_throughput_is_counted_between_readings_and_needs_two() -> None:
    assert per_second([[1_000_000_000, 50], [2_000_000_000, 100], [3_000_000_000, 150]]) == pytest.approx(50)
    for few in ([], [[1, 50]]):
        with pytest.raises(ValueError, match="longer cells"):
            per_second(few)


def test_what_cudasched_counted_is_the_difference_of_two_looks() -> None:
    before = {"event": "result", "launches": 5, "installed": True, "driver_version": 13000, "off_reason": ""}
    assert counted_between(before, before | {"launches": 12}) == {"launches": 7}


def test_kernel_durations_are_counted_by_their_length() -> None:
    assert counted([1.04, 0.96, 7.0], 3) == {"kernel_us": [(1.0, 2), (7.0, 1)], "per_item_us": pytest.approx(3.0)}


def test_a_process_without_a_launcher_thread_has_spent_no_time_on_one() -> None:
    assert launcher_threads_ns() == 0


def test_parts_are_put_together_and_a_program_alone_stands_beside_its_server(tmp_path: Path) -> None:
    first, second, out = (tmp_path / name for name in ("1.cells", "2.cells", "breadth.json"))
    filled(first, {"torch_sparse": (0.6, 96.0)}).save()
    filled(second, {"torchvision_vit": (0.7, 95.0)}, alone_ms=0.6).save()
    assert main(["merge", "breadth", "--out", str(out), str(first), str(second)]) == 0
    rows = load(out).colocations
    assert {(row.arm, row.best_effort_load) for row in rows} == set(
        itertools.product(ARMS, ("torch_sparse", "torchvision_vit"))
    )
    by_program = {row.best_effort_load: row for row in rows if row.arm == "cudasched_two_processes"}
    for program, alone_ms in (("torch_sparse", 0.5), ("torchvision_vit", 0.6)):
        row = by_program[program]
        assert row.alone_ms is not None and row.alone_ms.p99 == pytest.approx(alone_ms)
        assert row.bound_p99_ms is not None and row.duty == pytest.approx(60 * alone_ms / 1e3)
        assert (row.scene, row.repeat) == ("", None)


def test_figures_are_typical_and_worst_and_the_worst_may_reach_the_bound(tmp_path: Path) -> None:
    programs = {"torch_sparse": (0.55, 97.0), "torchvision_vit": (0.6, 96.5), "jax_transformer": (0.8, 90.0)}
    made = results(filled(tmp_path / "breadth.cells", programs))
    table = breadth_figures(made)
    assert "| P99 / alone, median | 6 | 1.2 (<= 1.25) met | 1.2 (<= 1.25) met |" in table
    assert "| P50 / alone, worst | 6, torch_sparse beside bert_graph | 1.6, jax_transformer beside" in table
    assert "| P99 / alone, worst | 6, torch_sparse beside bert_graph | 1.6, jax_transformer beside" in table
    assert "| best effort of time slices, worst |  | 1, jax_transformer beside bert_graph |" in table
    before = [row.model_copy(update={"p50_ratio": None}) for row in made.colocations]
    assert breadth_figures(made.model_copy(update={"rows": before})) == table, "P50 of a file without that ratio"
    assert "| best effort of time slices, pairs below 0.97 |  | 0 | 0 |" in table
    assert "0.928 (>= 0.95) **missed**, jax_transformer" in table and "| requests | 1,800 | 1,800 | 1,800 |" in table
    row = next(row for row in made.rows if row.arm == "cudasched_mps" and row.best_effort_load == "jax_transformer")
    assert p99_over_allowed(row) == pytest.approx(0.8 / 0.75)
    assert p99_over_allowed(row.model_copy(update={"bound_p99_ms": 1.0})) == pytest.approx(0.8 / 1.05)
    lines = breadth_table(made).splitlines()
    said = "| torch_sparse | 100.0/s | 6.00/6.00x · 93% | 1.10/1.10x · 100% (108%) | 1.10/1.10x · 100% (108%) | "
    assert any(line.startswith(said) for line in lines)


def test_a_rehearsal_measures_every_arm_and_a_rerun_does_what_is_missing(
    tmp_path: Path, simulated_driver: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDASCHED_TIME_SLICE_US", "off")  # or the gate steps aside, and no launch waits at it
    out = tmp_path / "breadth.json"
    programs = FEW[:2]
    common = ["--rehearse", "--out", str(out), "--seconds", "1.5", "--scene", "servers", "--servers", "recommender"]
    two = ["--only", ",".join(programs)]
    assert run("breadth", [*common, *two, "--minutes", "0.2"]) == TIME_RAN_OUT
    assert "time ran out" in capsys.readouterr().out
    # A busy machine starves a program until no two readings are in a cell; that cell is tried again.
    assert 0 in (run("breadth", [*common, *two]) for _ in range(TRIES))
    cells = CellFile(cells_path(out))
    assert all(outcome.error is None for outcome in cells.outcomes.values())
    measured = sorted((each.arm, each.best_effort) for each in cells.outcomes)
    assert measured == sorted(itertools.product([*(arm for arm in ARMS if arm != "cudasched_mps"), KERNELS], programs))
    managed = next(outcome for each, outcome in cells.outcomes.items() if each.arm == "cudasched_two_processes")
    assert managed.result is not None and managed.result["counted"]["best_effort_launches"] > 0
    row = {row.arm: row for row in load(out).rows}["cudasched_two_processes"]
    assert row.gate_wait and row.gpu_alone and row.launcher_cpu is not None
    assert row.best_effort_ratio and row.p99_ratio
    # Nothing is left to do: no process is started, and what is there stays.
    before = {key: dataclasses.asdict(value) for key, value in cells.outcomes.items()}
    assert run("breadth", [*common, *two]) == 0
    assert {key: dataclasses.asdict(value) for key, value in CellFile(cells_path(out)).outcomes.items()} == before


def test_without_mps_its_cells_alone_fail(simulated_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    backend = Backend.simulated(simulated_driver)
    try:
        with BreadthFleet(backend) as fleet:
            there, missing = (Place("program", "torch_sparse", mode) for mode in ("plain", "mps"))
            fleet.prepare([missing, there])
            with pytest.raises(HarnessError, match="nvidia-cuda-mps-control"):
                fleet.build(missing)
            fleet.build(there)()
            assert there in fleet and missing not in fleet
    finally:
        backend.close()


def test_processes_that_wait_are_stopped_while_something_is_measured(simulated_driver: Path) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    backend = Backend.simulated(simulated_driver)
    try:
        with BreadthFleet(backend) as fleet:
            running, waiting = (Place("program", name, "plain") for name in ("torch_sparse", "torchvision_vit"))
            fleet.build(running)()
            fleet.prepare([waiting])
            pids = {place: child._process.pid for place, child in [*fleet._running.items(), *fleet._prepared.items()]}
            with fleet.held():
                while state(pids[waiting]) != "T":
                    time.sleep(0.001)
                assert state(pids[running]) != "T"
            fleet.build(waiting)()
            assert state(pids[waiting]) != "T"
    finally:
        backend.close()


def test_cells_far_below_what_is_left_are_listed_with_what_a_request_costs_them() -> None:
    made = load(RESULTS / "breadth.json")
    managed = [row for row in made.colocations if row.arm in MANAGED]
    shares = [(row, row.best_effort_ratio, best_effort_of_time_slices(made, row)) for row in managed]
    rows = [row for row, *both in shares if min(share or 1.0 for share in both) < EXPLAINED]
    lines = limits_table(made).splitlines()[2:]
    assert rows and len(lines) == len(rows)
    assert all(row.best_effort_load in line for row, line in zip(rows, lines, strict=True))
    told = {"best_effort_ratio": 0.94, "duty": 0.1, "gate_wait": 0.25, "gpu_alone": None, "launcher_cpu": None}
    row = rows[0].model_copy(update={**told, "rate_hz": 60.0})
    (line,) = limits_table(made.model_copy(update={"rows": [row]})).splitlines()[2:]
    assert "| 0.940 |  |  | 0.90 |" in line, "6% of 0.9 s in 60 requests"
    assert line.endswith("| not kept | 25% | not kept |")


def test_the_plot_of_programs_has_a_line_a_program_and_a_mark_an_arm(tmp_path: Path, drawn: list[Figure]) -> None:
    made = load(RESULTS / "breadth.json")
    assert plots.plot_programs(made, "bert_graph", tmp_path / "breadth.png")
    left, right = drawn[0].axes[:2]
    programs = {row.best_effort_load for row in made.colocations}
    assert len(left.get_yticks()) == len(programs) == 15
    for axes in (left, right):
        counts = [len(line.get_xdata()) for line in axes.get_lines() if line.get_marker() in ("x", "o", "D")]
        assert counts == [15, 15, 15]
