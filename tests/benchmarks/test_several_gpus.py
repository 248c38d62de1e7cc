"""benchmarks/several_gpus: ranks that step together, who runs where, figures that are met and missed, a rehearsal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cudasched.demo.harness import Backend, Child, HarnessError
from support import PATIENCE_S, eventually
from test_cells import META, keep

from benchmarks.colocation.cells import Cell, CellFile, cells_path
from benchmarks.lab.fleet import Place
from benchmarks.lab.processes import ask, built, ranks_environment
from benchmarks.lab.run import TIME_RAN_OUT, load_benchmark, main, parse, run
from benchmarks.lab.session import Session
from benchmarks.preempt.summary import PROMISED
from benchmarks.results.schema import load
from benchmarks.several_gpus import benchmark
from benchmarks.several_gpus.benchmark import ARMS, HERE, SeveralFleet, SeveralRunner
from benchmarks.several_gpus.summary import HOOKED, KILLS, PROMISES, figures, results

TRIES = 5


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("benchmarks.meta.gpus", lambda: ["a", "b", "c", "d"])
    benchmark.gpus.cache_clear()
    yield
    benchmark.gpus.cache_clear()


def runner_of(tmp_path: Path, *given: str) -> SeveralRunner:
    options = parse("several_gpus", load_benchmark("several_gpus"), ["--out", str(tmp_path / "several.json"), *given])
    return SeveralRunner(Session("several_gpus", options, META), SeveralFleet(Backend()))


def started(script: str, *arguments: str) -> Child:
    """Two ranks on the CPU, built."""
    environment = {**os.environ, **ranks_environment(["", ""]), "CUDA_VISIBLE_DEVICES": ""}
    child = Child(script, [sys.executable, str(HERE / script), *arguments], environment)
    built(child)
    return child


def others_of(child: Child) -> list[int]:
    """The processes that a rank 0 has started."""
    pid = child._process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs_still(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("name", "runs"), [("torch_ddp_resnet50", [2]), ("torch_fsdp_llama", [2, 1])])
def test_ranks_pause_and_go_on_together_and_losses_are_those_of_another_run(name: str, runs: list[int]) -> None:
    pytest.importorskip("torch")
    losses = []
    for pauses in runs:
        child = started("programs.py", name, "--tiny", "--read-every", "1", "--warm-up", "1")
        try:
            (other,) = others_of(child)
            for pause in range(pauses):
                ask(child, "start")
                wanted = 2 * (pause + 1)
                eventually(lambda child=child, wanted=wanted: len(ask(child, "losses")["losses"]) >= wanted)
                ask(child, "pause")
            losses.append(ask(child, "losses")["losses"])
        finally:
            child.stop()
        eventually(lambda other=other: not runs_still(other))  # it has seen that rank 0 is gone
    first, last = losses[0], losses[-1]
    assert all(ours == theirs for ours, theirs in zip(first, last, strict=False))
    assert first[0] != first[1]


def test_a_server_answers_on_both_ranks() -> None:
    pytest.importorskip("torch")
    child = started("servers.py", "tensor_parallel_graph")
    try:
        name = "tensor_parallel_graph"
        start_ns = time.monotonic_ns() + 600_000_000
        given = {"start_ns": start_ns, "seconds": 0.5, "seed": 1, "rates_hz": {name: 20.0}, "arrivals": "periodic"}
        answer = ask(child, "run", **given, hint_ms=0.0, slo_ms=0.0)
        assert answer["latency"][name]["latency_ms"]
    finally:
        child.stop()


def test_a_rank_that_dies_ends_the_others(backend: Backend) -> None:
    command = [sys.executable, str(HERE / "programs.py"), "resnet50", "--simulate"]
    child = Child("ranks", command, {**backend.environment(hooked=False), **ranks_environment(["0", "0"])})
    try:
        child.answer(PATIENCE_S, "imported")
        os.kill(others_of(child)[0], signal.SIGKILL)
        with pytest.raises(HarnessError, match="ended with status"):
            child.answer(PATIENCE_S, "ready")
    finally:
        child.stop(grace_s=0.0)


def test_arms_differ_in_who_is_under_cudasched_and_sizes_in_gpus(tmp_path: Path, four_gpus: None) -> None:
    runner = runner_of(tmp_path)
    assert list(dict.fromkeys(scene for scene, _ in runner.parts)) == ["gpus_2", "gpus_4"]
    assert list(runner_of(tmp_path, "--gpus", "2").parts) == [("gpus_2", 0)]
    with pytest.raises(HarnessError, match="needs 2 GPUs; there are 1"):
        runner_of(tmp_path, "--gpus", "1")
    fleet = runner.fleet
    with fleet:
        for scene, every in (("gpus_2", "a,b"), ("gpus_4", "a,b,c,d")):
            runner.name = scene
            ports = set()
            for arm in ARMS:
                cell = runner.cell(arm, "tensor_parallel_graph", "torch_fsdp_llama")
                places = [*runner._processes(cell), *runner._servers(cell)]
                programs = [place for place in places if place.role == "program"]
                environments = {place: fleet._environment(place) for place in places}
                assert [environments[place]["CUDA_VISIBLE_DEVICES"] for place in programs] == [every] * len(programs)
                assert {environments[place]["NCCL_NVLS_ENABLE"] for place in places} == {"0"}
                ports |= {each["MASTER_PORT"] for each in environments.values()}
                managed = {place.role for place in places if "run" in fleet._command(place)}
                theirs = {
                    HOOKED: {"program"},
                    "slices": {"program"},
                    "before": {"program", "server"},
                    "cudasched": {"program", "server"},
                }
                assert managed == theirs.get(arm, set())
                off = {each.get("CUDASCHED_TIME_SLICE_US") for each in environments.values()}
                assert (off == {"off"}) == (arm == "before")
            assert len(ports) > 1, "jobs are known by their ports"
        bert = fleet._environment(Place("server", "bert_graph", "cudasched_4"))
        assert bert["CUDA_VISIBLE_DEVICES"] == "a" and "MASTER_PORT" not in bert


def filled(path: Path, ms: float, kept: float, **piece: object) -> CellFile:
    """Cells of two and four GPUs: P99 under cudasched is `ms` for 1.5 alone, training `kept` of time slices'."""
    cells = CellFile(path, META)
    for size, server in ((2, "bert_graph"), (4, "bert_graph"), (2, "tensor_parallel_graph")):
        for arm in ARMS:
            lead = "auto" if arm in (HOOKED, "before", "slices", "cudasched") else 0.0
            name = "" if arm.startswith("best_effort_alone") else server
            rate = "120" if name else ""
            cell = Cell(arm, name, "torch_fsdp_llama", "poisson", rate, 9.0, lead, 0, scene=f"gpus_{size}")
            latency_ms = {"latency_alone": 1.5, "processes": 5.0, "before": 3.0}.get(arm, ms)
            per_s = {"best_effort_alone": 7.0, HOOKED: 10.0, "processes": 8.2}.get(arm, 8.2 * kept)
            served = latency_ms if name else None
            keep(cells, cell, served, None if arm == "latency_alone" else per_s, requests=1000)
    told = {"seconds": 600.0, "kills": 20, "gap_s": 1.0, "readings": 9, "changed": 0, "problem": ""}
    cell = Cell(KILLS, "bert_graph", "torch_fsdp_llama", "poisson", "300", 0.0, 0.0, 0, scene="gpus_2")
    keep(cells, cell, **{**told, **piece})  # type: ignore[arg-type]
    return cells


def test_figures_are_met_and_missed(tmp_path: Path) -> None:
    good, bad = (
        filled(tmp_path / "good.cells", 1.7, 1.0),
        filled(tmp_path / "bad.cells", 2.0, 0.9, kills=19, seconds=500.0, changed=1),
    )
    met, missed = ({row.figure: row for row in figures(results(one), one).figures} for one in (good, bad))
    assert met.keys() == missed.keys() and {KILLS, "kills_minutes", "kills_failures"} <= set(met)
    assert len(met) == 2 * 2 * 4 + 3 and set(met) - set(PROMISES) == {KILLS, "kills_minutes", "kills_failures"}
    assert [name for name, row in met.items() if not row.met] == []
    assert [name for name, row in missed.items() if row.met] == []
    for arm in PROMISED:
        assert met[f"{arm}_gpus_2_p99_ratio"].n == 2 and met[f"{arm}_gpus_4_p99_ratio"].n == 1
        alone = met[f"{arm}_gpus_2_lost_without_server"]
        assert alone.n == 1, "beside the server on two GPUs there is none without"
        assert alone.value == pytest.approx(1 - 0.82 - 0.12 * 1.5)
    rows = results(good).colocations
    assert {(row.scene, row.gpus) for row in rows} == {("gpus_2", 2), ("gpus_4", 4)}


@pytest.mark.parametrize("piece", [{"problem": "a rank ended"}, {"gap_s": 31.0}, {"readings": 0}])
def test_a_piece_fails_where_training_ends_or_hangs(tmp_path: Path, piece: dict[str, object]) -> None:
    cells = filled(tmp_path / "several.cells", 1.7, 1.0, **piece)
    assert {row.figure: row.value for row in figures(results(cells), cells).figures}["kills_failures"] == 1


def test_a_rehearsal_measures_every_arm_and_pieces_of_kills_add_up(tmp_path: Path, simulated_driver: Path) -> None:
    out = tmp_path / "several.json"
    common = ["--rehearse", "--out", str(out), "--seconds", "1.5", "--servers", "tensor_parallel_graph"]
    # A busy machine starves a program until no two readings are in a cell; that cell is tried again.
    assert 0 in (run("several_gpus", [*common, "--only", "torch_ddp_resnet50"]) for _ in range(TRIES))
    assert {row.arm for row in load(out).colocations} == set(ARMS)
    pieces = [*common, "--only", KILLS, "--kill-minutes", "0.1"]
    assert run("several_gpus", [*pieces, "--minutes", "0.65"]) in (0, TIME_RAN_OUT)
    assert run("several_gpus", pieces) == 0
    found = [each for each in CellFile(cells_path(out)).outcomes.values() if each.cell.arm == KILLS]
    assert found and all(each.result and each.result["kills"] and not each.result["problem"] for each in found)
    assert run("several_gpus", pieces) == 0, "nothing is measured twice"
    again = CellFile(cells_path(out)).outcomes
    assert [each for each in again.values() if each.cell.arm == KILLS] == found
    assert main(["merge", "several_gpus", "--out", str(tmp_path / "both.json"), str(cells_path(out))]) == 0
    names = {row.figure for row in load(tmp_path / "both_figures.json").figures}
    assert {"kills", "slices_gpus_2_best_effort"} <= names
