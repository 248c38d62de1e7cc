"""benchmarks/breadth: its programs, what drives one, and the processes of a fleet."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from cudasched.demo.harness import Backend, HarnessError
from support import eventually

from benchmarks.breadth.program import Loop, counted
from benchmarks.breadth.programs import PROGRAMS
from benchmarks.lab.fleet import Place
from benchmarks.lab.processes import per_second
from benchmarks.lab.programs import counted as counted_between
from benchmarks.preempt.benchmark import PreemptFleet


@pytest.mark.parametrize(
    ("name", "needs"),
    [("vit_graph", ""), ("recommender", ""), ("decode_short", ""), ("bert_onnx", "onnx onnxruntime")],
)
def test_a_server_answers_in_little(name: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("torch", *needs.split()):
        pytest.importorskip(needed)
    root = Path(__file__).parents[2]
    for directory in ("benchmarks/breadth", "python/cudasched/demo"):
        monkeypatch.syspath_prepend(str(root / directory))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    from servers import server

    made = server(name, tiny=True)
    for _ in range(2):
        made.step()
        made.synchronize()


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


def test_without_mps_its_cells_alone_fail(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with PreemptFleet(backend) as fleet:
        there, missing = (Place("program", "torch_sparse", mode) for mode in ("plain", "cudasched_mps"))
        fleet.prepare([missing, there])
        with pytest.raises(HarnessError, match="nvidia-cuda-mps-control"):
            fleet.build(missing)
        fleet.build(there)()
        assert there in fleet and missing not in fleet


def test_processes_that_wait_are_stopped_while_something_is_measured(backend: Backend) -> None:
    def is_stopped(place: Place) -> bool:
        pid = {**fleet._running, **fleet._prepared}[place]._process.pid
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    with PreemptFleet(backend) as fleet:
        running, waiting = (Place("program", name, "plain") for name in ("torch_sparse", "torchvision_vit"))
        fleet.build(running)()
        fleet.prepare([waiting])
        with fleet.held():
            eventually(lambda: is_stopped(waiting))
            assert not is_stopped(running)
        fleet.build(waiting)()
        assert not is_stopped(waiting)
